"""`jaxbench qualify` on real Slurm, with virtual nodes whose null GPUs have planted faults."""

import json
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
}
"""A slow GPU, one with ECC errors, and a slow adapter."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Six nodes with a null GPU each; the last one is drained."""
    folder = tmp_path_factory.mktemp("slurm")
    for node in range(6):
        (folder / f"state-n{node}").write_text(HEALTHY + PLANTED.get(f"n{node}", ""))
    variables = null_gpus.environment(1, still=1) | {
        "NULL_GPU_STATE": f"{folder}/state-$SLURMD_NODENAME", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    prolog = folder / "prolog"
    lines = (f'echo "export {name}={value}"\n' for name, value in variables.items())
    prolog.write_text("#!/bin/sh\n" + "".join(lines))
    prolog.chmod(0o755)
    with slurm.Cluster(folder, nodes=6, prolog=prolog) as running:
        running.run("scontrol", "update", "nodename=n5", "state=drain", "reason=test")
        yield running


def start(cluster, folder):
    variables = {k: v for k, v in cluster.environment.items() if not k.startswith("JAX_")}
    told = f'echo "$NODE $CAUSE: $EVIDENCE" >> {folder}/told'
    words = "--nodes", "n[0-5]", "--gpus-per-node", 1, "--wait", 1, "--on-fail", told
    return subprocess.Popen(
        [sys.executable, "-m", "jaxbench", "qualify", *map(str, words), "--output", folder / "q"],
        env=variables, cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def test_an_interrupted_qualification_goes_on_and_names_what_is_planted(cluster, tmp_path):
    first, reports = start(cluster, tmp_path), tmp_path / "q" / "nodes"
    while not [*reports.glob("*/check.json")]:
        assert first.poll() is None, first.communicate()
        time.sleep(0.5)
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130, err
    assert "the same command continues" in err
    kept = {path: path.stat().st_mtime_ns for path in reports.glob("*/check.json")}
    second = start(cluster, tmp_path)
    out, err = second.communicate(timeout=1200)
    assert second.returncode == STATUS["gpu"], out + err
    assert all(path.stat().st_mtime_ns == at for path, at in kept.items())
    found = json.loads((tmp_path / "q" / "qualify.json").read_text())["nodes"]
    verdicts = {node: entry["verdict"] for node, entry in found.items()}
    assert verdicts == {
        "n0": "pass", "n1": "fail", "n2": "fail", "n3": "pass", "n4": "fail", "n5": "not reached",
    }, out  # fmt: skip
    assert "bf16 matmuls" in found["n1"]["why"]
    assert "uncorrected ECC errors: 2" in found["n2"]["why"]
    assert "exchange between nodes" in found["n4"]["why"]
    assert out.rstrip().endswith("qualify: 2 pass, 3 fail, 1 not reached, of 6 nodes")
    told = (tmp_path / "told").read_text().splitlines()
    assert sorted(line.partition(":")[0] for line in told) == ["n1 gpu", "n2 gpu", "n4 network"]
    again = start(cluster, tmp_path)
    assert again.communicate(timeout=300)[0].splitlines()[-1] == out.splitlines()[-1]
    assert (tmp_path / "told").read_text().splitlines() == told
