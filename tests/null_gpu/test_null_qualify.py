"""`jaxbench qualify` on real Slurm, with virtual nodes whose null GPUs have planted faults."""

import json
import re
import signal
import subprocess
import sys
import time

import null_gpus
import pytest
import slurm
from commands import ROOT

from jaxbench.base.errors import STATUS

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(null_gpus.missing() is not None, reason=str(null_gpus.missing())),
    pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing())),
]

HEALTHY = "* kernel_us 2000\n* host_gb_s 20\n* network_gb_s 10\n"
PLANTED = {
    "n1": "* kernel_us 3600\n",
    "n2": "* ecc_uncorrected 2\n",
    "n4": "* network_gb_s 4\n",
    "n6": "* hot_share 0.5\n* nvlink_errors_per_s 3\n",
}
"""A slow GPU, one with ECC errors, a slow adapter, and a GPU that is too hot under load."""

DCGM = """#!/bin/sh
echo "| Denylist                  | Pass                                           |"
[ "$SLURMD_NODENAME" != n2 ] && exit 0
echo "| Page Retirement/Row Remap | Fail - GPU 0                                   |"
exit 226
"""
"""NVIDIA's diagnosis is not on this machine."""


ROW = "configs/llama31_8b_bf16.yaml --gpus 2 " + " ".join(f"--set '{s}'" for s in null_gpus.TINY)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Eight nodes with a null GPU each; one is drained."""
    folder = tmp_path_factory.mktemp("slurm")
    for node in range(8):
        serial = f"* serial {1000 + node}\n"
        (folder / f"state-n{node}").write_text(HEALTHY + serial + PLANTED.get(f"n{node}", ""))
    (folder / "dcgmi").write_text(DCGM)
    (folder / "dcgmi").chmod(0o755)
    variables = null_gpus.environment(1, still=1) | {
        "NULL_GPU_STATE": f"{folder}/state-$SLURMD_NODENAME", "PYTHONPATH": str(ROOT),
        "PATH": f"{folder}:$PATH",
    }  # fmt: skip
    prolog = folder / "prolog"
    lines = (f'echo "export {name}={value}"\n' for name, value in variables.items())
    prolog.write_text("#!/bin/sh\n" + "".join(lines))
    prolog.chmod(0o755)
    with slurm.Cluster(folder, nodes=8, prolog=prolog) as running:
        running.run("scontrol", "update", "nodename=n5", "state=drain", "reason=test")
        yield running


def start(cluster, folder):
    variables = {k: v for k, v in cluster.environment.items() if not k.startswith("JAX_")}
    variables |= {"STAGE_PATH": str(folder / "stage"), "JAXBENCH_VENV": sys.prefix}
    told = f'echo "$NODE $CAUSE: $EVIDENCE" >> {folder}/told'
    words = (
        "--nodes", "n[0-7]", "--gpus-per-node", 1, "--wait", 1, "--minutes", 1, "--row", ROW,
        "--on-fail", told,
    )  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "jaxbench", "qualify", *map(str, words), "--output", folder / "q"],
        env=variables, cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def test_an_interrupted_qualification_goes_on_and_names_what_is_planted(cluster, tmp_path):
    kept = {}
    for stage in ("nodes", "together"):
        cut = start(cluster, tmp_path)
        while not [*(tmp_path / "q" / stage).glob("*/check.json")]:
            assert cut.poll() is None, cut.communicate()
            time.sleep(0.5)
        cut.send_signal(signal.SIGINT)
        _, err = cut.communicate(timeout=60)
        assert cut.returncode == 130, err
        assert "the same command continues" in err
        assert all(path.stat().st_mtime_ns == at for path, at in kept.items())
        kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("q/*/*/check.json")}
    assert {path.parent.name for path in tmp_path.glob("q/together/*/check.json")} == {"2"}
    last = start(cluster, tmp_path)
    out, err = last.communicate(timeout=2400)
    assert last.returncode == STATUS["gpu"], out + err
    assert all(path.stat().st_mtime_ns == at for path, at in kept.items())
    found = json.loads((tmp_path / "q" / "qualify.json").read_text())["nodes"]
    verdicts = {node: entry["verdict"] for node, entry in found.items()}
    assert verdicts == {
        "n0": "pass", "n1": "fail", "n2": "fail", "n3": "pass", "n4": "fail", "n5": "not reached",
        "n6": "fail", "n7": "pass",
    }, out  # fmt: skip
    assert "bf16 matmuls" in found["n1"]["why"]
    assert "uncorrected ECC errors: 2" in found["n2"]["why"]
    assert "dcgmi diag: Page Retirement/Row Remap Fail" in found["n2"]["why"]
    assert "exchange between nodes" in found["n4"]["why"]
    assert "ms with a clock that heat held down" in found["n6"]["why"]
    assert "qualify: 3 pass, 4 fail, 1 not reached, of 8 nodes" in out
    assert re.search(r"remark: n6 gpu 0: \d+ errors on NVLinks under load", out)
    assert re.search(r"row: llama31_8b_bf16:2.*: not comparable: ", out)
    for nodes in ({"n0", "n3"}, {"n0", "n3", "n7"}):
        number = len(nodes)
        together = json.loads((tmp_path / "q/together" / f"{number}" / "check.json").read_text())
        assert together["hosts"].keys() == nodes
        assert together["minutes"] == (1 if number == 3 else None)
        sizes = [s for s in together["sizes"] if s["collective"] == "all-reduce"]
        assert [round(s["bytes"] / 8**n, 2) for n, s in enumerate(sizes[4:], 5)] == [1] * 5
        most = sizes[-1]
        assert 5 < most["algbw"] < 10.5  # a null GPU sends the buffer once, at 10 GB/s
        assert re.search(rf"all-reduce +{number} +{most['bytes']} +{most['busbw']:.4g}", out)
    assert [job[2] for job in json.loads((tmp_path / "q/rows.json").read_text()).values()] == [
        ["n0", "n3"]
    ]
    page = (tmp_path / "q" / "qualify.html").read_text()
    assert "3 of 8 nodes passed, 4 failed, 1 not reached. 0 of 1 row passed." in page
    assert "Largest collectives by number of nodes" in page
    assert "0000000001003" in page
    told = (tmp_path / "told").read_text().splitlines()
    assert sorted(line.partition(":")[0] for line in told) == [
        "n1 gpu", "n2 gpu", "n4 network", "n6 gpu",
    ]  # fmt: skip
    again = start(cluster, tmp_path)
    assert again.communicate(timeout=300)[0].splitlines()[-1] == out.splitlines()[-1]
    assert (tmp_path / "told").read_text().splitlines() == told
