"""`launch/verdict.py`: what an exit status says, and whether the job goes on."""

import json
import signal

import launching  # noqa: F401
import pytest
import verdict

from jaxbench.base.errors import STATUS

ABORTED = (
    "F1122 14:07:54.208690   27163 client.h:80] Terminating process because the JAX distributed "
    "service detected fatal errors. This most likely indicates that another task died; see the "
    "other task logs for more details. Disable Python buffering, i.e. `python -u`, to be sure to "
    "see all the previous output. absl::Status: UNAVAILABLE: "
)
"""As jax 0.10.2 says it before it aborts a process."""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Ends the first start of a job that saves by a failure of rank 3: (whether it is requeued,
    record); prints the last line of its log."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm to ask, unless a test makes one
    monkeypatch.setenv("JAXBENCH_RESUME", "true")
    monkeypatch.setenv("JAXBENCH_RESTARTS", "3")

    def end(status, said="", record=None, told="", before="", srun="", later=""):
        (tmp_path / "ranks" / "start-1").mkdir(parents=True, exist_ok=True)
        said = f"{before}start 1, on n1\n{said}"
        (tmp_path / "ranks" / "rank-3.log").write_text(said)
        messages = tmp_path / "messages"
        messages.write_text(
            f"{told}rank 3 on n1: exit {status}\nrank 2 on n1: exit 134\n"
            f"{later and f'rank 0 on n0: {later}'}\n"
            f"srun: error: n1: task 2: Exited with exit code 134\n{srun}"
        )
        path, recipe = tmp_path / "run.json", {"recipe": "llama31_8b_bf16", "row": "smoke"}
        content = {"status": "running", "cause": None, "recipe": recipe, **(record or {})}
        path.write_text(json.dumps(content))
        _, delay, _, line = verdict.main("train", str(tmp_path), 0, 1, str(messages))
        print(line)
        return bool(delay), json.loads(path.read_text())

    return end


def test_every_cause_of_a_failure_has_a_rule():
    statuses = {rule[0] for rule in verdict.RULES}
    assert set(STATUS.values()) <= statuses


@pytest.mark.parametrize(
    ("cause", "again"),
    [("numbers", False), ("mistake", False), ("memory", False), ("storage", False),
     ("failed", False), ("gpu", True), ("network", True)],
)  # fmt: skip
def test_what_was_not_the_work_s_fault_brings_the_job_back(cause, again, job, tmp_path, capsys):
    code, record = job(STATUS[cause], "step 1\nerror: what happened\n")
    assert code == again
    assert (record["status"], record["cause"]) == ("failed", cause)
    assert record["reason"].startswith("rank 3 on n1: ")
    assert record["reason"].endswith(": what happened")
    assert capsys.readouterr().out == f"failed: {record['reason']}\n"
    log = tmp_path / "log-llama31_8b_bf16_smoke.out"
    assert log.read_text() == f"failed: {record['reason']}\n"


def test_what_a_process_said_past_the_file_system_is_quoted(job):
    """Its log is on the file system that failed; what came of it, later, is not the reason."""
    words = "rank 3 on n1: error: the record cannot be written: No space left on device\n"
    _, record = job(STATUS["storage"], "error: another\n", told=words)
    assert record["cause"] == "storage"
    assert record["reason"] == (
        "rank 3 on n1: the record cannot be written: No space left on device"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cause", "reason"),
    [("hang", "no sign of life for 30 s from rank 7 on n4 (training, last completed step 12)"),
     ("lost", "lost rank 7 on n4 (training, last completed step 12)")],
)  # fmt: skip
def test_a_rank_that_names_another_one_is_quoted(cause, reason, job, capsys):
    words = f"rank 3 on n1: error: {reason}\n"
    code, record = job(STATUS[cause], told=words)
    assert (code, record["cause"], record["reason"]) == (True, cause, reason)
    assert capsys.readouterr().out == f"failed: {reason}\n"


@pytest.mark.parametrize("cause", ["hang", "storage"])
def test_a_rank_that_jax_aborts_since_the_first_one_ended_is_its_consequence(cause, job):
    """Whichever shell is faster to say so."""
    words = "rank 0 on n0: error: what happened\n"
    _, record = job(128 + signal.SIGABRT, ABORTED, told=words, later=f"exit {STATUS[cause]}")
    assert record["cause"] == cause
    assert record["reason"].endswith("what happened")


@pytest.mark.parametrize("later", [f"exit {STATUS['lost']}", f"exit {STATUS['network']}"])
def test_the_first_rank_may_be_a_consequence_itself(later, job):
    words = "rank 0 on n0: error: lost rank 3 on n1\n"
    _, record = job(128 + signal.SIGABRT, ABORTED, told=words, later=later)
    assert record["cause"] == "network"
    assert record["reason"].startswith("rank 3 on n1: it lost the network or another process: ")


def test_a_hang_of_the_start_before_is_forgotten(job):
    """`benchmarks/lose_and_resume.py` found this: the record was not yet written again."""
    hang = {"status": "failed", "cause": "hang", "reason": "no sign of life for 60 s from rank 7"}
    _, record = job(128 + signal.SIGKILL, record=hang)
    assert (record["cause"], record["reason"]) == (
        "lost", "lost rank 3 on n1 (killed by SIGKILL), before the first step",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("said", "verdict_is"),
    [
        ("srun: error: Node failure on n1\nsrun: forcing job termination\n", "lost a node"),
        (
            "slurmstepd-n0: error: *** STEP 7.0 ON n0 CANCELLED DUE TO NODE FAILURE ***",
            "lost a node",
        ),
        ("slurmstepd-n0: error: *** STEP 7.0 ON n0 CANCELLED DUE TO PREEMPTION ***", "preempted"),
        ("", "requeued"),
    ],
)
def test_why_slurm_starts_a_job_again(said, verdict_is, job, tmp_path, capsys):
    """The first as slurm-wlm 22.05 says it of a node that nothing reaches any more."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho JobId=7 JobState=COMPLETING Restarts=1\n")
    (tmp_path / "scontrol").chmod(0o755)
    code, record = job(128 + signal.SIGKILL, srun=said)
    assert (code, record["status"], record["cause"]) == (False, "interrupted", verdict_is)
    assert capsys.readouterr().out == f"interrupted: {verdict_is}\n"


@pytest.mark.parametrize(
    ("preempted", "cause", "counted"),
    [("2026-11-29T16:48:40", "preempted", False), ("2026-11-29T15:00:00", "SIGTERM", True),
     ("None", "SIGTERM", True)],
)  # fmt: skip
def test_a_preempted_job_in_its_grace_time_comes_back(preempted, cause, counted, job, tmp_path):
    """Slurm sends SIGTERM while the job still runs. A preemption of an earlier start is none."""
    state = f"JobState=RUNNING Restarts=0 StartTime=2026-11-29T16:00:00 PreemptTime={preempted}"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho JobId=7 {state}\n")
    (tmp_path / "scontrol").chmod(0o755)
    again, record = job(128 + signal.SIGTERM)
    assert (again, record["status"], record["cause"]) == (True, "interrupted", cause)
    assert (tmp_path / "ranks" / "start-1" / "requeued").exists() is counted


def test_a_run_that_completes_in_its_grace_time_is_complete(tmp_path):
    state = {"JobState": "RUNNING", "StartTime": "2026-11-29T16:00:00",
             "PreemptTime": "2026-11-29T16:48:40"}  # fmt: skip
    (tmp_path / "run.json").write_text('{"status": "completed"}')
    (tmp_path / "steps.jsonl").write_text('{"step": 49}\n')
    found = verdict.verdict("train", str(tmp_path), 0, 0, "", state)
    assert (found.status, found.again) == ("completed", False)


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """Ends the starts of a job that saves, each by the loss of a rank: (delays, lines).
    Of the first `requeued` Slurm says that it requeues the job; `steps` has the last step of
    each."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAXBENCH_RESUME", "true")
    monkeypatch.setenv("JAXBENCH_RESTARTS", "3")
    (tmp_path / "messages").write_text("rank 3 on n1: exit 137\n")

    def end(steps, requeued=0):
        scontrol, delays, lines = tmp_path / "scontrol", [], []
        for start, step in enumerate(steps):
            (tmp_path / "ranks" / f"start-{start + 1}").mkdir(parents=True)
            (tmp_path / "steps.jsonl").write_text(f'{{"step": {step}}}\n')
            ending = f"JobState=COMPLETING Restarts={start + 1}"
            answer = ending if start < requeued else "JobState=RUNNING"
            scontrol.write_text(f"#!/bin/sh\necho JobId=7 {answer}\n")
            scontrol.chmod(0o755)
            said = verdict.main("train", str(tmp_path), start, 1, str(tmp_path / "messages"))
            delays.append(said[1])
            lines.append(said[3])
        return delays, lines

    return end


LOST = "failed: lost rank 3 on n1 (killed by SIGKILL), after step"


def test_only_restarts_of_our_own_count(starts):
    """Three preemptions, and then as many lost ranks as `--restarts` allows, and one more; Slurm
    counts all of them."""
    delays, lines = starts(range(7), requeued=3)
    assert delays == ["", "", "", "0", "30", "60", ""]
    assert lines == [
        *["interrupted: requeued"] * 3, *(f"{LOST} {step}" for step in range(3, 6)),
        f"{LOST} 6; all restarts are used up",
    ]  # fmt: skip


def test_the_same_failure_at_the_same_step_ends_the_job(starts):
    delays, lines = starts([8, 5, 5])
    assert delays == ["0", "30", ""]
    assert lines[-1] == f"{LOST} 5; the same as in the last restart, at the same step, so it ends"


def test_a_restart_that_cannot_be_counted_is_not_made(job, tmp_path, capsys):
    (tmp_path / "ranks" / "start-1" / "requeued" / "x").mkdir(parents=True)
    code, _ = job(128 + signal.SIGKILL)
    assert not code
    assert capsys.readouterr().out == (
        "failed: lost rank 3 on n1 (killed by SIGKILL), before the first step; it ends, since "
        "restarts cannot be counted: Is a directory\n"
    )


GLOO = "terminate called after throwing an instance of 'gloo::IoException'\n  what():  "


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (
            f"{ABORTED}Failed to send RPC to coordination service. Either the leader task was "
            "preempted/died/restarted unexpectedly or this task is experiencing network issues. "
            "Check earlier\n",
            "UNAVAILABLE: Failed to send RPC to coordination service",
        ),
        (
            f"{GLOO}[external/gloo/gloo/transport/tcp/pair.cc:339] writev [198.19.2.198]:21427: "
            "Software caused connection abort\n",
            "[external/gloo/gloo/transport/tcp/pair.cc:339] writev [198.19.2.198]:21427: Software "
            "caused connection abort",
        ),
        (
            f"{ABORTED}The following tasks are unhealthy (stopped sending heartbeats):\n1\n2\n"
            "The tasks have crashed. Check the task logs for an earlier error\n",
            "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats): 1 2",
        ),
    ],
)
def test_a_rank_that_jax_aborts_lost_the_network_and_was_not_lost(status, reason, job, capsys):
    trace = "*** Check failure stack trace: ***\n    @     0x7fd75b040634  absl::LogMessage()\n"
    code, record = job(128 + signal.SIGABRT, f"{status}{trace}")
    assert (code, record["cause"]) == (True, "network")
    assert record["reason"] == (
        f"rank 3 on n1: it lost the network or another process: {reason}"
    )  # fmt: skip
    assert capsys.readouterr().out.count("\n") == 1


def test_a_rank_that_xla_aborts_for_a_cuda_error_has_a_failing_gpu(job):
    """As jaxlib 0.10.2 said it on a null GPU."""
    said = (
        "F1124 14:04:54.950446   25514 async_execution.cc:77] Check failed: async_stream_->"
        "RecordEvent(event_) is OK (INTERNAL: CUDA error: Error recording CUDA event: "
        "CUDA_ERROR_UNKNOWN: unknown error) Failed to record async execution completion event\n"
    )
    code, record = job(128 + signal.SIGABRT, said)
    assert (code, record["cause"]) == (True, "gpu")
    assert record["reason"] == (
        "rank 3 on n1: its GPU failed: CUDA_ERROR_UNKNOWN: unknown error"
    )  # fmt: skip


def test_a_rank_that_aborts_by_itself_is_lost(job):
    said = "terminate called after throwing an instance of 'std::system_error'\n"
    _, record = job(128 + signal.SIGABRT, said, before=f"{ABORTED}of the start before\n")
    assert record["cause"] == "lost"
    assert record["reason"] == "lost rank 3 on n1 (killed by SIGABRT), before the first step"


def test_what_a_rank_said_in_the_start_before_is_not_quoted(job):
    before = "start 1, on n0\nerror: Connection reset by peer\n"
    _, record = job(1, "ModuleNotFoundError: No module named 'flax'\n", before=before)
    assert record["reason"] == "rank 3 on n1: ModuleNotFoundError: No module named 'flax'"


def test_a_verdict_that_cannot_be_recorded_is_said(job, tmp_path, capsys):
    """As on a full disk: the job is not left without its last line, nor where it was."""
    (tmp_path / "run.json.verdict").mkdir()
    code, record = job(128 + signal.SIGKILL)
    assert (code, record["status"]) == (True, "running")
    assert capsys.readouterr().out == (
        "failed: lost rank 3 on n1 (killed by SIGKILL), before the first step; its record does not "
        "say so: Is a directory\n"
    )


def test_a_rank_s_own_line_is_quoted_without_the_recipe(job):
    """Which the line of the job need not name again."""
    said = "failed: llama31_8b_bf16, row smoke (smoke): loss is nan at step 3\nrecord: run.json\n"
    _, record = job(STATUS["numbers"], said)
    assert record["reason"] == "rank 3 on n1: loss is nan at step 3"


def test_a_leak_does_not_burn_the_restarts(job, monkeypatch):
    oom = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n"
    again, record = job(128 + signal.SIGKILL, srun=oom)
    assert (again, record["cause"]) == (False, "memory")
