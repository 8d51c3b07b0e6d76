"""`launch/verdict.py` on what srun collected: the first error, a check, a job that never ran."""

import json

import launching  # noqa: F401
import pytest
import verdict


@pytest.fixture
def decided(tmp_path, monkeypatch):
    """The verdict on the first start of a job on n0 and n1 with two ranks each, by what srun
    collected."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\n[ $2 = job ] || printf 'n0\\nn1\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    monkeypatch.setenv("JAXBENCH_EXCLUDE_SLOW", "true")
    (tmp_path / "ranks" / "start-1").mkdir(parents=True)
    job = {"status": "running", "recipe": {"recipe": "llama31_8b_bf16", "row": "2"}}
    (tmp_path / "job.json").write_text(json.dumps(job))

    def decide(messages, step="train", status=143):
        (tmp_path / "messages").write_text(messages)
        said = verdict.main(step, str(tmp_path), 0, status, str(tmp_path / "messages"))
        return said, json.loads((tmp_path / "job.json").read_text())

    return decide


ENDED = "rank 0 on n0: exit 143\nsrun: error: n0: task 0: Exited with exit code 143\n"
TASK_2 = "srun: error: n1: task 2: "


@pytest.mark.parametrize(
    ("messages", "cause", "reason"),
    [
        (
            f"{TASK_2}Exited with exit code 2\n"
            f"slurmstepd: error: execve(): /a/run.sh: No such file or directory\n{ENDED}",
            "launch", "rank 2 on n1: it cannot be started: /a/run.sh: No such file or directory",
        ),
        (
            f"slurmstepd: error: execve(): /a/run.sh: Permission denied\n{TASK_2}Exited with exit "
            f"code 13\n{ENDED}",
            "launch", "rank 2 on n1: it cannot be started: /a/run.sh: Permission denied",
        ),
        (
            f"srun: error: task 3 launch failed: Slurmd could not connect IO\n{ENDED}",
            "launch", "rank 3 on n1: it cannot be started: Slurmd could not connect IO",
        ),
        (
            "srun: error: Task launch for StepId=7.0 failed on node n1: Invalid job credential\n"
            "srun: error: Application launch failed: Invalid job credential\n",
            "launch", "n1: it cannot be started: Invalid job credential",
        ),
        (
            f"{TASK_2}Out Of Memory\n{ENDED}slurmstepd: error: Detected 1 oom_kill event in "
            "StepId=7.0. Some of the step tasks have been OOM Killed.\n",
            "memory", "rank 2 on n1: out of host memory: the kernel killed the process",
        ),
        (
            "rank 2 on n1: exit 137\nslurmstepd: error: Detected 1 oom-kill event(s) in step 7.0\n"
            f"{TASK_2}Out Of Memory\n",
            "memory", "rank 2 on n1: out of host memory: the kernel killed the process",
        ),
        (
            "rank 2 on n1: error: out of host memory: the kernel killed the process\n"
            f"rank 2 on n1: exit 4\n{ENDED}",
            "memory", "rank 2 on n1: out of host memory: the kernel killed the process",
        ),
        (f"{TASK_2}Bus error\nsrun: error: n0: task 0: Killed\n", "lost",
         "lost rank 2 on n1 (Bus error)"),
        ("srun: error: n[0-1]: tasks 0-3: Killed\n", "lost", "lost rank 0 on n[0-1] (Killed)"),
        ("srun: error: Unable to create step: Invalid user id\nsrun: error: b\n", "lost a node",
         "lost a node, or no process could be started; srun: error: Unable to create step: "),
        (
            "slurmstepd: error: couldn't chdir to `/a': No such file: going to /tmp instead\n"
            f"rank 1 on n0: error: NaN\nrank 1 on n0: exit 3\n{TASK_2}Killed\n",
            "numbers", "rank 1 on n0: NaN",
        ),
    ],
)  # fmt: skip
def test_the_first_error_of_srun_decides_where_no_process_does(
    messages, cause, reason, decided, monkeypatch
):
    monkeypatch.setenv("JAXBENCH_RESUME", "true")
    (code, _, _, line), record = decided(messages)
    assert line.startswith(f"failed: {reason}")
    assert code != 0
    assert (record["status"], record["cause"]) == ("failed", cause)
    assert record["reason"].startswith(reason)


@pytest.mark.parametrize(("node", "excluded"), [("n1", "n1"), ("n[0-1]", "")])
def test_only_a_single_node_is_left_out(node, excluded, decided, monkeypatch):
    """srun may name all nodes of a job at once."""
    monkeypatch.setenv("JAXBENCH_EXCLUDE_SLOW", "true")
    (_, _, nodes, _), _ = decided(f"srun: error: {node}: tasks 0-3: Killed\n")
    assert nodes == excluded


def test_a_check_says_in_its_file_what_it_found(decided, tmp_path):
    report = {"status": 6, "faults": ["n1 gpu 0: MIG is on", "b", "c", "d"], "exclude": "n1"}
    (tmp_path / "check.json").write_text(json.dumps(report))
    said, record = decided("rank 0 on n0: exit 6\n", "check", 143)
    assert said == (6, "0", "n1", "failed: check: n1 gpu 0: MIG is on; b; c")
    assert (record["status"], record["cause"]) == ("failed", "gpu")
    (tmp_path / "check.json").unlink()
    said, record = decided("rank 1 on n0: error: 0 GPUs\nrank 1 on n0: exit 2\n", "check", 143)
    assert said == (2, "", "", "failed: check: rank 1 on n0: 0 GPUs")
    assert (record["status"], record["cause"]) == ("failed", "mistake")
    limit = "slurmstepd: error: *** STEP 7.0 ON n0 CANCELLED AT 1 DUE TO TIME LIMIT ***\n"
    said, record = decided(limit + ENDED, "check")
    assert said[3] == "failed: check: it did not end within its time limit"
    assert record["cause"] == "hang"


def test_a_job_without_its_record_did_not_complete(decided):
    said, record = decided("", status=0)
    assert (said[0], record["status"], record["cause"]) == (5, "failed", "storage")


def test_a_job_that_slurm_ends_says_so_before_it_may_be_killed(decided, tmp_path):
    """In both records: the run may be killed too, while it saves."""
    run = tmp_path / "run.json"
    run.write_text((tmp_path / "job.json").read_text())
    answer = "#!/bin/sh\necho JobId=7 JobState=COMPLETING Restarts=0\n"
    (tmp_path / "scontrol").write_text(answer)
    said, record = decided("", step="ending")
    assert said == ()
    assert (record["status"], record["cause"]) == ("interrupted", "cancelled")
    assert json.loads(run.read_text())["reason"] == "cancelled; killed before it had ended"
