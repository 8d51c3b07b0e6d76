"""`launch/run.sh`, what one process of a job runs, on a node that lacks something."""

import os
import subprocess

import pytest
from commands import ROOT


def test_a_node_without_the_environment_says_so_in_one_line(tmp_path):
    """And is the first that fails, with the status of a mistake: the job ends."""
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")  # one that cannot find jax
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "launch" / "run.sh", "--config", "llama31_8b_bf16"], capture_output=True, text=True,
        env=os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "JAXBENCH_VENV": str(tmp_path / "none"),
            "JAXBENCH_EXITS": str(tmp_path), "SLURM_PROCID": "5", "SLURMD_NODENAME": "n7",
            "SLURM_RESTART_COUNT": "1",
        },
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == "start 2, on n7\n"  # by which launch/verdict.py tells starts apart
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: node n7: no Python with jax, neither ")
    assert (tmp_path / "first" / "rank").read_text() == "5 n7 2\n"


@pytest.fixture
def host(tmp_path):
    """The files by which a kernel with two GPUs says which CPUs are near: here, one for each."""
    allowed = sorted(os.sched_getaffinity(0))
    cpus = (allowed[0], allowed[-1])
    for address, cpu in zip(("0000:1b:00.0", "0000:db:00.0"), cpus, strict=True):
        (tmp_path / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text(f"{cpu}\n")
    return tmp_path, cpus


def bound(local_id, processes, root):
    """The CPUs of what a process starts after it was bound, its device order, and its stderr."""
    ask = "import os; print(*os.sched_getaffinity(0), os.environ.get('CUDA_DEVICE_ORDER'))"
    script = f'. launch/near.sh; bind_near {local_id} {processes} "$1"; python3 -c "$2"'
    done = subprocess.run(
        ["bash", "-euc", script, "bash", root, ask],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split(), done.stderr


def test_a_process_runs_on_the_cpus_of_its_gpu(host):
    root, cpus = host
    for local_id in range(2):
        assert bound(local_id, 2, root) == ([str(cpus[local_id]), "PCI_BUS_ID"], "")


def test_nobody_is_bound_where_slurm_alone_knows_whose_gpu_is_whose(host):
    root, _ = host
    everywhere = [*map(str, sorted(os.sched_getaffinity(0))), "None"]
    assert bound(0, 1, root) == (everywhere, "")
    assert bound(0, 2, root / "none") == (everywhere, "")


def test_cpus_that_a_job_does_not_have_are_a_warning(host):
    root, _ = host
    (root / "sys/bus/pci/devices/0000:1b:00.0/local_cpulist").write_text("4000\n")
    _, err = bound(0, 2, root)
    assert err.endswith("warning: not bound to CPUs 4000 of GPU 0\n")
