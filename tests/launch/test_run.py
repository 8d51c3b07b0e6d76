"""`launch/run.sh`, what one process of a job runs, where its node lacks something or a peer is
lost."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import launching  # noqa: F401
import pytest
import slurm
import verdict
from commands import ROOT, TINY, kill


def test_a_node_without_the_environment_says_so_in_one_line(tmp_path):
    """And is the first that fails, with the status of a mistake: the job ends."""
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")  # one that cannot find jax
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "launch" / "run.sh", "--config", "llama31_8b_bf16"], capture_output=True, text=True,
        env=os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "JAXBENCH_VENV": str(tmp_path / "none"),
            "JAXBENCH_MESSAGES": "3", "SLURM_PROCID": "5", "SLURMD_NODENAME": "n7",
            "SLURM_RESTART_COUNT": "1",
        },
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == "start 2, on n7\n"  # by which launch/verdict.py tells starts apart
    reason, ended = done.stderr.splitlines()
    assert reason.startswith("rank 5 on n7: error: no Python with jax, neither ")
    assert ended == "rank 5 on n7: exit 2"


@pytest.fixture
def two_ranks(tmp_path):
    """Starts two ranks that compile, the second on another node: (process, job's folder) of each.
    Each believes to be the first that fails."""
    started = []

    def begin(*options):
        address = f"127.0.0.1:{slurm.free_ports(1)[0]}"
        for rank in range(2):
            folder = tmp_path / str(rank)
            (folder / "ranks").mkdir(parents=True)
            log = folder / "ranks" / f"rank-{rank}.log"
            with log.open("a") as out, (folder / "messages").open("w") as err:
                out.write("start 1, on n0\n" if rank == 0 else "")  # as launch/slurm.sbatch does
                out.flush()
                process = subprocess.Popen(
                    [ROOT / "launch/run.sh", *TINY, "--cpu-devices", "1", *options,
                     "--output", tmp_path / "run"],
                    cwd=ROOT, stdout=out, stderr=err, env=os.environ | {
                        "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2",
                        "JAX_PROCESS_ID": str(rank), "JAXBENCH_MESSAGES": "3",
                        "JAXBENCH_VENV": sys.prefix, "SLURMD_NODENAME": f"n{rank}",
                    },
                )  # fmt: skip
            started.append((process, folder))
        return started

    yield begin
    kill([process for process, _ in started])


@pytest.mark.slow
def test_a_first_process_that_is_lost_while_all_compile_is_one_line(two_ranks, monkeypatch):
    (first, lost), (second, left) = two_ranks("--steps", "1000000")
    log = lost / "ranks" / "rank-0.log"
    while " compiling: " not in log.read_text():
        assert first.poll() is None, log.read_text()
        time.sleep(0.05)
    (python,) = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    os.kill(int(python), signal.SIGKILL)
    assert first.wait(timeout=20) == 128 + signal.SIGKILL
    second.wait(timeout=30)  # of the five minutes for which it waits for others
    monkeypatch.setenv("PATH", "/none")  # no Slurm to ask
    said = (lost / "messages").read_text()
    assert verdict.verdict(str(lost), 0, said, {}) == (
        "failed", "lost", "lost rank 0 on n0 (killed by SIGKILL), before the first step", True
    )  # fmt: skip
    said = (left / "messages").read_text()
    status, cause, reason, again = verdict.verdict(str(left), 0, said, {})
    assert (status, cause, again) == ("failed", "network", True)
    expected = r"rank 1 on n1: it lost the network or another process: .*UNAVAILABLE: .*"
    assert re.fullmatch(expected, reason), reason


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
