"""launch/submit.sh on a real Slurm: two virtual nodes with two tasks each, and FSDP across them."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import count
from types import SimpleNamespace

import pytest
import slurm
from commands import ROOT, read
from slurm import TINY, ended, submit, wait

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing())),
]

STEPS = 80
TOLERANCE = 1e-3
"""Four processes add up in another order than four devices of one: roundings of bf16."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm.Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    return tmp_path_factory.mktemp("slurm") / 'my stage\'s "1"'


def main_log(folder):
    return next(folder.glob("sbatch_jaxbench_*.out")).read_text()


def steps_of(folder):
    return read(folder)[1]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The losses of the same run in one process with four devices."""
    folder = tmp_path_factory.mktemp("one")
    subprocess.run(
        [ROOT / "launch/run.sh", "--config", "configs/llama31_8b_bf16.yaml", "--cpu-devices", "4",
         "--steps", str(STEPS), "--output", folder, *TINY],
        cwd=ROOT, check=True, capture_output=True, env=os.environ | {"JAXBENCH_VENV": sys.prefix},
    )  # fmt: skip
    return [step["loss"] for step in steps_of(folder)]


SHELL = {
    "SBATCH_EXPORT": "NONE", "SBATCH_TIMELIMIT": "1", "SBATCH_ARRAY_INX": "0-1",
    "SLURM_DISTRIBUTION": "cyclic", "SLURM_LABELIO": "1", "SLURM_NTASKS": "9", "SLURM_JOB_ID": "5",
    "OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1:9", "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "JAX_COORDINATOR_ADDRESS": "nowhere:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0",
    "JAX_LOCAL_DEVICE_IDS": "7", "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9", "CDPATH": "/tmp", "PYTHONHOME": "/none",
    "JAXBENCH_COMMAND": "check", "JAXBENCH_NSYS_RANKS": "0",
}  # fmt: skip
"""Variables that a user's shell may have, each of which has broken a job."""


@pytest.fixture(scope="module")
def saved(cluster, stage, tmp_path_factory):
    """A job that saved its end, from a shell with such variables, a foreign numpy, and somebody on
    the ports of the next jobs."""
    foreign = tmp_path_factory.mktemp("foreign")
    for name in ("numpy", "yaml"):
        (foreign / f"{name}.py").write_text("raise ImportError('foreign')\n")
    first = slurm.first_job() % 4096
    with contextlib.ExitStack() as stack:
        for job in range(first, first + 4):
            taken = stack.enter_context(socket.socket())
            taken.bind(("", 61440 + job % 4096))
            taken.listen()
        number, folder = submit(
            cluster, stage, "--check", "on", ENABLE_CHECKPOINT="true", MAX_STEPS=str(STEPS),
            PYTHONPATH=str(foreign), **SHELL,
        )  # fmt: skip
        job = wait(cluster, number, ended)
    return SimpleNamespace(number=number, folder=folder, job=job)


def test_four_processes_on_two_nodes_have_the_losses_of_one(saved, one_process):
    assert (saved.job["JobState"], saved.job["Comment"]) == ("COMPLETED", "completed"), (
        saved.folder / "ranks/rank-0.log"
    ).read_text()
    record, steps = read(saved.folder)
    assert record["status"] == "completed"
    assert (record["hardware"]["processes"], record["hardware"]["devices"]) == (4, 4)
    assert [s["loss"] for s in steps] == pytest.approx(one_process, abs=TOLERANCE)


def test_results_lie_where_they_are_published_to_lie(saved, stage):
    number, folder = saved.number, saved.folder
    assert folder == stage / "results" / "0.1.0" / "bf16" / "8b" / "4" / number
    assert sorted(p.name for p in folder.iterdir()) == sorted([
        "check.json", "checkpoints", "environment.json", "job.json",
        f"sbatch_jaxbench_llama31_8b_bf16_4_{number}.out",
        "log-llama31_8b_bf16_smoke.out", "ranks", "run.json", "steps.jsonl",
    ])  # fmt: skip
    assert sorted(p.name for p in (folder / "ranks").iterdir()) == [
        *(f"rank-{n}.log" for n in range(4)), "start-1",
    ]  # fmt: skip
    for n, node in ((1, "n0"), (2, "n1"), (3, "n1")):  # blocks of ranks
        assert (folder / f"ranks/rank-{n}.log").read_text().startswith(f"start 1, on {node}\n")
    assert json.loads((folder / "job.json").read_text())["status"] == "completed"
    text = (folder / "environment.json").read_text()
    assert "HF_TOKEN" not in json.loads(text)
    assert json.loads(text)["SLURM_JOB_ID"] == number
    assert "hf_secret" not in text
    main = main_log(folder)
    assert "check: no fault in 4 devices of 2 nodes" in main
    phases = re.findall(r"^\d\d:\d\d:\d\d (\w+): ", main, re.M)
    assert phases == ["starting", "compiling", "loading", "training", "saving"]
    assert len(re.findall(r"^step +\d+  \S+ s  loss ", main, re.M)) == STEPS
    assert max(map(len, main.splitlines())) < 250
    assert "completed: llama31_8b_bf16, row smoke (smoke)" in main
    record, _ = read(folder)
    assert len(record["ranks"]) == 4


def test_a_saved_job_is_loaded_for_one_step_by_one_process_per_node(cluster, stage, saved):
    path = saved.folder.relative_to(stage)
    one = ("--processes-per-node", "1")
    number, folder = submit(cluster, stage, *one, LOAD_CHECKPOINT_PATH=str(path))
    assert wait(cluster, number, ended)["JobState"] == "COMPLETED"
    record, steps = read(folder)
    assert (record["hardware"]["processes"], record["hardware"]["devices"]) == (2, 4)
    assert [step["step"] for step in steps] == [STEPS]
    assert record["restored"]["step"] == STEPS
    log = (folder / "ranks" / "rank-0.log").read_text()
    assert "Global Checkpoint Load : Rank : 0 : Start time : " in log


def test_a_job_that_is_requeued_and_loses_a_process_ends_with_the_same_losses(
    cluster, stage, one_process
):
    """The one restart that it may have is for the process: Slurm's own does not count."""
    saving = ("--checkpoint-every", "10", "--restarts", "1")
    number, folder = submit(cluster, stage, *saving, MAX_STEPS=str(STEPS))
    wait(cluster, number, lambda job: len(steps_of(folder)) > 15)
    cluster.run("scontrol", "requeue", number)
    wait(cluster, number, lambda job: job["Restarts"] == "1" and job["JobState"] == "RUNNING")
    wait(cluster, number, lambda job: len(read(folder)[0]["resumed_at"]) == 1)
    assert "interrupted: llama31_8b_bf16" in (folder / "ranks/rank-0.log").read_text()
    first = read(folder)[0]["resumed_at"][0]
    assert first > 15  # saved when it was stopped
    wait(cluster, number, lambda job: len(steps_of(folder)) > first + 15)
    kill_rank(number, folder, 3)
    job = wait(cluster, number, ended)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "2")
    record, steps = read(folder)
    assert record["status"] == "completed"
    assert job["Comment"] == "completed"  # and not of the start before
    assert len(record["resumed_at"]) == 2
    assert [step["step"] for step in steps] == list(range(STEPS))
    assert [s["loss"] for s in steps] == pytest.approx(one_process, abs=TOLERANCE)


LONG = {"MAX_STEPS": "100000"}


def running(cluster, number, folder, steps=5):
    """Returns when a job has trained so many steps."""
    wait(cluster, number, lambda job: len(steps_of(folder)) > steps)


def kill_rank(number, folder, rank):
    """SIGKILL to the process of a rank; the step before which it died."""
    os.kill(slurm.processes(number)[rank], signal.SIGKILL)
    return len(steps_of(folder))


def test_a_cancelled_job_ends(cluster, stage):
    """Though it saves: it was somebody's wish."""
    number, folder = submit(cluster, stage, ENABLE_CHECKPOINT="true", **LONG)
    running(cluster, number, folder)
    cluster.run("scancel", number)
    job = wait(cluster, number, ended)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    assert main_log(folder).splitlines()[-1] == "interrupted: cancelled"
    record, steps = read(folder)
    assert (record["status"], record["reason"]) == ("interrupted", "cancelled")
    told = record["slurm"]
    assert (told["job"], told["state"], told["nodes"]) == (number, "CANCELLED", "n[0-1]")
    assert re.fullmatch(r"00:\d\d:\d\d", told["elapsed"])
    assert (folder / "checkpoints" / str(len(steps))).is_dir()


@pytest.mark.nightly
def test_a_full_stage_is_storage_and_costs_no_restart(cluster, tmp_path):
    """Without an inode no checkpoint or verdict has a new file."""
    stage = tmp_path / "stage"
    stage.mkdir()
    options = ["-o", "size=64m,nr_inodes=200", "none", str(stage)]
    subprocess.run(["mount", "-t", "tmpfs", *options], check=True)
    try:
        number, folder = submit(cluster, stage, "--checkpoint-every", "10", **LONG)
        running(cluster, number, folder)
        with contextlib.suppress(OSError):
            for name in count():
                (stage / f"{name}").touch()
        job = wait(cluster, number, ended)
        last = main_log(folder).splitlines()[-1]
    finally:
        subprocess.run(["umount", "--lazy", stage], check=True)
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("FAILED", "0", "5:0")
    assert re.match(r"failed: rank 0 on n0: the checkpoint of step \d+ was not saved; ", last), last
    assert "No space left on device" in last


@pytest.mark.nightly
def test_a_job_is_cancelled_at_once_while_it_compiles(cluster, stage):
    big = ("--set", "model.layers=24", "--set", "model.embed=512")
    number, folder = submit(cluster, stage, *big, ENABLE_CHECKPOINT="true", **LONG)
    wait(cluster, number, lambda job: folder.exists() and "compiling: " in main_log_so_far(folder))
    cluster.run("scancel", number)
    began = time.monotonic()
    assert wait(cluster, number, ended)["JobState"] == "CANCELLED"
    assert time.monotonic() - began < 15  # of the 20 s after which Slurm kills
    record, steps = read(folder)
    assert (record["status"], record["reason"], steps) == ("interrupted", "cancelled", [])


def main_log_so_far(folder):
    return "".join(path.read_text() for path in folder.glob("sbatch_jaxbench_*.out"))


def test_a_lost_rank_is_named_in_the_end(cluster, stage):
    number, folder = submit(cluster, stage, **LONG)
    running(cluster, number, folder)
    step = kill_rank(number, folder, 2)
    assert wait(cluster, number, ended)["JobState"] == "FAILED"
    last = main_log(folder).splitlines()[-1]
    # On a busy machine a peer may notice before the shell of the rank.
    found = re.fullmatch(
        r"failed: lost rank 2 on (n1 \(killed by SIGKILL\), after step (\d+)|\w+ \(.*\)); "
        "it does not save, so it ends", last,
    )  # fmt: skip
    assert found, last
    assert found[2] is None or int(found[2]) >= step - 5
    assert read(folder)[0]["reason"].startswith("lost rank 2 on ")


@pytest.mark.nightly
def test_a_suspended_job_goes_on_and_one_with_a_frozen_rank_ends(cluster, stage):
    """Suspended for longer than the watchdog's time limit, as for a more urgent job; then a rank
    hangs, which nobody but the watchdog ends."""
    number, folder = submit(cluster, stage, "--watchdog", "6", **LONG)
    running(cluster, number, folder)
    cluster.run("scontrol", "suspend", number)
    wait(cluster, number, lambda job: job["JobState"] == "SUSPENDED")
    time.sleep(1)
    steps = len(steps_of(folder))
    time.sleep(14)
    assert len(steps_of(folder)) == steps
    cluster.run("scontrol", "resume", number)
    running(cluster, number, folder, steps + 10)
    os.kill(slurm.processes(number)[2], signal.SIGSTOP)
    assert wait(cluster, number, ended)["JobState"] == "FAILED"
    reason = r"no sign of life for 3 s from rank 2 on n1 \(training, last completed step \d+\)"
    last, (record, _) = main_log(folder).splitlines()[-1], read(folder)
    assert re.fullmatch(rf"failed: {reason}; it does not save, so it ends", last), last
    assert (record["status"], record["cause"]) == ("failed", "hang")


@pytest.mark.nightly
def test_the_first_rank_that_fails_decides_and_is_quoted(cluster, stage, tmp_path):
    """One rank's mistake is not the others' loss: the job ends, though it saves."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"""#!/bin/sh
if [ "$SLURM_PROCID $2" = "3 jaxbench.train" ]; then
  sleep 2; echo "error: no memory on this node" >&2; exit 2
fi
exec {sys.executable} "$@"
""")
    python.chmod(0o755)
    number, folder = submit(
        cluster, stage, ENABLE_CHECKPOINT="true", JAXBENCH_VENV=str(tmp_path), **LONG
    )
    job = wait(cluster, number, ended)
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "0")
    last = main_log(folder).splitlines()[-1]
    assert re.fullmatch(r"failed: rank 3 on n1: no memory on this node", last), last


@pytest.mark.nightly
def test_a_job_that_reaches_its_time_limit_saves_and_ends(cluster, stage):
    """The limit is lowered while it trains, to less than the 120 s before it of Slurm's notice."""
    number, folder = submit(cluster, stage, ENABLE_CHECKPOINT="true", **LONG)
    began = time.monotonic()
    running(cluster, number, folder)
    minutes = int((time.monotonic() - began) // 60) + 2
    cluster.run("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")
    job = wait(cluster, number, ended)
    assert job["Restarts"] == "0"
    assert main_log(folder).splitlines()[-1] == "interrupted: time limit"
    record, steps = read(folder)
    assert (record["status"], record["reason"]) == ("interrupted", "time limit")
    assert (folder / "checkpoints" / str(len(steps))).is_dir()


@pytest.mark.nightly
def test_a_preempted_job_comes_back(cluster, stage):
    """And so does one whose node is lost: Slurm requeues both by itself."""
    number, folder = submit(cluster, stage, "--checkpoint-every", "20", **LONG)
    running(cluster, number, folder)
    urgent = cluster.run(
        "sbatch", "--parsable", "-p", "urgent", "-N2", "-o", "/dev/null", "--wrap=sleep 3"
    ).strip()
    wait(cluster, urgent, ended)
    wait(cluster, number, lambda job: len(read(folder)[0].get("resumed_at", [])) == 1)
    assert "interrupted: preempted" in main_log(folder)
    first = read(folder)[0]["resumed_at"][0]
    running(cluster, number, folder, first + 20)
    cluster.run("scontrol", "update", "node=n1", "state=down", "reason=test")
    wait(cluster, number, lambda job: job["Restarts"] == "2")
    cluster.run("scontrol", "update", "node=n1", "state=resume")
    wait(cluster, number, lambda job: len(read(folder)[0].get("resumed_at", [])) == 2)
    assert "interrupted: lost a node" in main_log(folder)
    cluster.run("scancel", number)
    wait(cluster, number, ended)
    assert main_log(folder).splitlines()[-1] == "interrupted: cancelled"


@pytest.mark.nightly
@pytest.mark.parametrize("saves", [True, False])
def test_a_job_preempted_with_a_grace_time_comes_back(cluster, stage, saves):
    """Slurm signals such a job, which then ends by itself. That is none of its own restarts."""
    options = ["--restarts", "0", *(["--checkpoint-every", "20"] if saves else [])]
    number, folder = submit(cluster, stage, *options, SBATCH_PARTITION="graceful", **LONG)
    running(cluster, number, folder, 25)
    urgent = cluster.run(
        "sbatch", "--parsable", "-p", "urgent", "-N2", "-o", "/dev/null", "--wrap=sleep 3"
    ).strip()
    wait(cluster, urgent, ended)
    wait(cluster, number, lambda job: job["Restarts"] == "1" and job["JobState"] == "RUNNING")
    wait(cluster, number, lambda job: read(folder)[0]["status"] == "running")
    assert "interrupted: preempted" in main_log(folder)
    assert (read(folder)[0]["resumed_at"][0] > 0) == saves
    cluster.run("scancel", number)
    wait(cluster, number, ended)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("--mem=500", (500 * 2**20, "SLURM_MEM_PER_NODE")),
        ("--mem-per-cpu=250", (500 * 2**20, "SLURM_MEM_PER_CPU")),
        ("--mem=0", None),
    ],
)
def test_a_process_sees_the_memory_that_slurm_gave_to_its_job(cluster, tmp_path, asked, found):
    code = (
        "import os; from jaxbench.run.host_memory import slurm_limit; "
        "print(slurm_limit(os.environ))"
    )
    script, out = tmp_path / "job.sh", tmp_path / "out"
    step = f"srun env PYTHONPATH='{ROOT}' '{sys.executable}' -c '{code}'"
    script.write_text(f"#!/bin/bash\n#SBATCH {asked} -N1 -c2 -o {out}\n{step}\n")
    wait(cluster, cluster.run("sbatch", "--parsable", str(script)).strip(), ended)
    assert out.read_text().strip() == str(found)
