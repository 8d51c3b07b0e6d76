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
    venv = tmp_path / "none"  # not replaced by another Python, though that one has jax
    done = subprocess.run(
        [ROOT / "launch" / "run.sh", "--config", "llama31_8b_bf16"], capture_output=True, text=True,
        env=os.environ | {
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "JAXBENCH_VENV": str(venv),
            "JAXBENCH_MESSAGES": "3", "SLURM_PROCID": "5", "SLURMD_NODENAME": "n7",
            "SLURM_RESTART_COUNT": "1",
        },
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == "start 2, on n7\n"  # by which launch/verdict.py tells starts apart
    reason, ended = done.stderr.splitlines()
    assert reason.startswith(f"rank 5 on n7: error: no Python with jax at {venv}/bin/python; ")
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
    found = verdict.verdict("train", str(lost), 0, 137, said, {})
    assert (found.status, found.cause, found.again, found.nodes) == ("failed", "lost", True, "n0")
    assert found.reason == "lost rank 0 on n0 (killed by SIGKILL), before the first step"
    said = (left / "messages").read_text()
    found = verdict.verdict("train", str(left), 0, 134, said, {})
    assert (found.status, found.cause, found.again) == ("failed", "network", True)
    expected = r"rank 1 on n1: it lost the network or another process: .*UNAVAILABLE: .*"
    assert re.fullmatch(expected, found.reason), found.reason


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


def rank(tmp_path, said="", **environment):
    """A rank of a job on node n7 whose Python does what `said` says: (status, messages, log)."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/bash\n[ "$1" != -c ] || exit 0\n{said}\n')
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "launch" / "run.sh", "--config", "x"], capture_output=True, text=True, cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"], "JAXBENCH_VENV": str(tmp_path / "venv"),
            "JAXBENCH_MESSAGES": "3", "JAXBENCH_LOGS": str(tmp_path / "rank"), "SLURM_PROCID": "0",
            "SLURMD_NODENAME": "n7", **environment,
        },
    )  # fmt: skip
    log = tmp_path / "rank-0.log"
    return done.returncode, done.stderr.splitlines(), log.read_text() if log.exists() else ""


def test_a_rank_has_the_packages_of_its_environment_only(tmp_path):
    variables = {"PYTHONPATH": "/foreign", "PYTHONHOME": "/none", "PYTHONWARNINGS": "error"}
    asks = "env | grep '^PYTHON' | sort"
    status, messages, log = rank(tmp_path, asks, CDPATH="/tmp:/", **variables)
    assert (status, messages) == (0, [])
    assert log.splitlines() == ["PYTHONNOUSERSITE=1", f"PYTHONPATH={ROOT}", "PYTHONSAFEPATH=1"]


def test_an_exported_cdpath_is_no_other_tree(tmp_path):
    """`cd` prints where it went, and may go elsewhere."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (tmp_path / "other" / "launch").mkdir(parents=True)
    status, messages, _ = rank(tmp_path, CDPATH=str(tmp_path / "other"))
    assert (status, messages) == (0, [])
    done = subprocess.run(
        ["launch/submit.sh", "--help"], cwd=ROOT, capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], "CDPATH": str(ROOT), "JAXBENCH_VENV": sys.prefix},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    for script in [*(ROOT / "launch").glob("*.sh"), ROOT / "launch/slurm.sbatch"]:
        assert not re.search(r"(?<!CDPATH= )\bcd (?!-- \"\$root\")", script.read_text()), script


def test_a_node_that_does_not_see_the_stage_says_so(tmp_path):
    status, (reason, ended), _ = rank(tmp_path, JAXBENCH_LOGS="/dev/null/rank")
    assert status == 5
    assert reason.startswith(
        "rank 0 on n7: error: its log /dev/null/rank-0.log cannot be written: Not a"
    )
    assert ended == "rank 0 on n7: exit 5"


def test_a_rank_that_the_kernel_kills_is_out_of_host_memory(tmp_path):
    """By the count of its control group, or else of its host."""
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("9:name=systemd:/\n0::/job\n")
    (group / "memory.events").write_text("low 0\noom 1\noom_kill 3\noom_group_kill 0\n")
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    script = '. launch/near.sh; oom_kills "$1"; rm "$1"/sys/fs/cgroup/job/*; oom_kills "$1"'
    script += '; oom_kills "$1/none"; echo end'
    done = subprocess.run(
        ["bash", "-euc", script, "bash", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("oom_kill 3\noom_kill 7\nend\n", "")
    grep = tmp_path / "bin" / "grep"  # the kernel counts one more each time
    grep.parent.mkdir()
    grep.write_text(f"#!/bin/sh\necho x >> {tmp_path}/count\nwc -l < {tmp_path}/count\n")
    grep.chmod(0o755)
    path = f"{grep.parent}:{os.environ['PATH']}"
    status, messages, _ = rank(tmp_path, "kill -9 $$", PATH=path)
    reason = "error: out of host memory: the kernel killed the process"
    assert (status, messages) == (4, [f"rank 0 on n7: {line}" for line in (reason, "exit 4")])
    status, messages, _ = rank(tmp_path, "kill -9 $$")
    assert (status, messages) == (137, ["rank 0 on n7: exit 137"])


def test_a_rank_that_is_ended_while_it_looks_for_jax_does_not_lack_it(tmp_path):
    status, messages, _ = rank(tmp_path)
    assert (status, messages) == (0, [])
    python = tmp_path / "venv/bin/python"
    python.write_text("#!/bin/sh\nkill -TERM $$\n")
    done = subprocess.run(
        [ROOT / "launch" / "run.sh"], capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], "JAXBENCH_VENV": str(tmp_path / "venv"),
             "JAXBENCH_MESSAGES": "3", "SLURMD_NODENAME": "n7"},
    )  # fmt: skip
    assert done.stderr == "rank 0 on n7: exit 143\n"
