"""`jaxbench check` on two nodes of null GPUs with planted faults."""

import json
import re

import null_gpus
import pytest

from jaxbench.base.versions import installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(null_gpus.missing() is not None, reason=str(null_gpus.missing())),
    pytest.mark.skipif(
        not installed("pynvml"), reason="needs nvidia-ml-py: pip install nvidia-ml-py"
    ),
]

HEALTHY = """
* kernel_us 2000
* host_gb_s 20
* nvlink_gb_s 15
* network_gb_s 10
"""
PLANTED = """
1 kernel_us 3200
1 reasons 68
1 sm_mhz 1500
2 nvlink_gb_s 7.5
2 nvlinks_down 9
3 network_gb_s 5
4 ecc_uncorrected 2
6 power_limit_w 500
"""
"""A GPU that is hot, one with dead NVLinks, a slow adapter, ECC errors, a lowered power limit; GPUs
4 to 7 are the second node's. Kernels take long enough that a busy machine's delays do not hide the
hot GPU."""

NAMED = {
    "node0 gpu 1": ("bf16 matmuls", "1500 of 1980 MHz under load: hardware thermal slowdown"),
    "node0 gpu 2": ("exchange in a node", "9 of 18 NVLinks are down"),
    "node0 gpu 3 - node1 gpu 3": ("exchange between nodes",),
    "node1 gpu 0": ("uncorrected ECC errors: 2",),
    "node1 gpu 2": ("power limit 500 W instead of 700",),
}


def check(folder, gpus, state, nodes=2):
    """Checks nodes of so many null GPUs; returns the processes and check.json."""
    (folder / "state").write_text(state)
    variables = null_gpus.environment(gpus, state=folder / "state", still=1)
    # Nothing is autotuned here, so it does not matter which process finds what in the cache.
    variables |= null_gpus.job_of(nodes) | {"JAX_ENABLE_COMPILATION_CACHE": "true"}
    program = ("-m", "jaxbench.check", "--output", str(folder))
    jobs = [
        null_gpus.start(program=program, folder=folder, **variables, JAX_PROCESS_ID=rank,
                        SLURM_NODEID=rank, SLURMD_NODENAME=f"node{rank}")
        for rank in map(str, range(nodes))
    ]  # fmt: skip
    for job in jobs:
        job.wait()
    assert (folder / "check.json").exists(), jobs[0].text
    return jobs, json.loads((folder / "check.json").read_text())


def test_the_check_names_what_is_planted(tmp_path):
    jobs, report = check(tmp_path, 4, HEALTHY + PLANTED)
    found = dict(line.split(": ", 1) for line in report["faults"])
    assert found.keys() == NAMED.keys(), jobs[0].text
    for where, parts in NAMED.items():
        assert [part for part in parts if part not in found[where]] == [], jobs[0].text
    assert [job.status for job in jobs] == [6, 6]
    assert report["null"]
    assert "null GPUs: nothing here is a measurement" in jobs[0].out


@pytest.mark.nightly
def test_of_four_nodes_the_one_with_the_slow_adapter_is_named(tmp_path):
    _, report = check(tmp_path, 2, HEALTHY + "5 network_gb_s 5", nodes=4)
    (fault,) = report["faults"]
    assert re.match(r"node2 gpu 1: exchange between nodes \d+ % below the median of 12,", fault)
    assert fault.endswith(", with each of 3 partners")
    assert report["exclude"] == "node2"


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(20))
def test_a_healthy_cluster_has_no_finding(tmp_path, number):
    jobs, report = check(tmp_path, 8, HEALTHY)
    assert report["faults"] + report["remarks"] == [], jobs[0].text
    assert [job.status for job in jobs] == [0, 0]
