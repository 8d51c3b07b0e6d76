"""`jaxbench jobs`: what it tells of jobs in the queue, ended and lost, and what it follows."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from launching import slurm

from jaxbench.cluster import jobs

STATES = "pending, running, completed, failed, interrupted, lost"


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Two jobs of Llama, one of which runs, and one of Grok that is in no queue."""
    monkeypatch.setenv("PATH", slurm(tmp_path))
    monkeypatch.setenv("STAGE_PATH", str(tmp_path))
    monkeypatch.delenv("LLMB_INSTALL", raising=False)
    (tmp_path / "queue").write_text("78|RUNNING|3:05|n[0-1]\n79|PENDING|0:00|(Priority)\n")
    ended = {"state": "CANCELLED", "elapsed": "00:01:40", "nodes": "n7"}
    why = dict.fromkeys(("cause", "reason"), "cancelled")
    add(tmp_path, "77", "llama31_8b_bf16", status="interrupted", slurm=ended, **why)
    add(tmp_path, "78", "llama31_8b_bf16", status="running")
    add(tmp_path, "102", "grok1_314b_bf16", status="running")
    (tmp_path / "results/1/bf16/8b/8/79").mkdir()
    return tmp_path


def add(stage, number, recipe, **record):
    folder = stage / "results" / "1" / "bf16" / "8b" / "8" / number
    folder.mkdir(parents=True)
    content = {"recipe": {"recipe": recipe, "gpus": 8, "steps": 50}, **record}
    (folder / "run.json").write_text(json.dumps(content))
    (folder / "steps.jsonl").write_text("{}\n" * 20)
    (folder / f"sbatch_jaxbench_{recipe}_8_{number}.out").write_text(f"the log of {number}\n")


def test_jobs_are_listed_across_recipes(stage, capsys):
    assert jobs.main([]) == 0
    heading, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heading[:3] == ["job", "run", "state"]
    assert [line[0] for line in lines] == ["77", "78", "79", "102"]
    told = [" ".join(line[1:]) for line in lines]
    assert told == [
        "llama31_8b_bf16 8 GPUs interrupted: cancelled CANCELLED 00:01:40 n7 20 of 50 cancelled",
        "llama31_8b_bf16 8 GPUs running RUNNING 3:05 n[0-1] 20 of 50",
        "8 GPUs pending PENDING 0:00 (Priority)",
        f"grok1_314b_bf16 8 GPUs lost 20 of 50 {jobs.LOST}",
    ]


def listed(capsys, *words):
    assert jobs.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_jobs_are_listed_by_state_and_time_as_json(stage, capsys):
    failed = listed(capsys, "--state", "interrupted,lost")
    assert [(job["job"], job["state"]) for job in failed] == [
        ("77", "interrupted: cancelled"), ("102", "lost"),
    ]  # fmt: skip
    assert failed[0]["folder"] == str(stage / "results/1/bf16/8b/8/77")
    week_ago = (datetime.now(UTC) - timedelta(days=7)).isoformat(timespec="seconds")
    add(stage, "76", "llama31_8b_bf16", status="completed", started=week_ago)
    assert len(listed(capsys)) == 5
    for since, count in (("6d", 4), ("169h", 5), ("2000-01-01", 5), (week_ago[:10], 5)):
        assert len(listed(capsys, "--since", since)) == count, since
    assert jobs.main(["--state", "failed"]) == 0
    assert capsys.readouterr().out == "none of 5 jobs is as asked\n"


@pytest.mark.parametrize(
    "text",
    [
        '{"status": "completed", "summary": null}',
        '{"status": "completed", "recipe": "x"}',
        '{"status": "completed", "recipe": {"gpus": 8}}',
        '{"status": 7}',
        '{"status": null}',
        '{"status": "done", "recipe": {}}',
        '{"status": "completed", "started": "0001-01-01T00:00:00+14:00"}',
        '{"status": "failed", "started": "2026-11-28T10:00:00", "slurm": {"nodes": null}}',
        '{"status": "failed", "reason": {"a": 1}, "slurm": [1]}',
        '{"status": "completed", "summary": {"step_time_s": {"mean": "1"}}}',
        '{"status": "failed", "reason": "\\u001b[2J\\ud800"}',
        "[" * 100_000,
        "[]",
        "",
    ],
)
def test_a_malformed_record_hides_no_other_job(text, stage, capsys):
    folder = stage / "results/1/bf16/8b/8"
    (folder / "102/run.json").write_text(text)
    (folder / "²").mkdir()
    for words in ([], ["status", "102"], ["--json"], ["--since", "2026-11-01"]):
        assert jobs.main(words) == 0
        out = capsys.readouterr().out
        assert "102" in out
        assert "\x1b" not in out
        assert "of None" not in out
        out.encode()
    assert "llama31_8b_bf16" in out


def test_a_job_is_shown_followed_and_cancelled(stage, capfd):
    assert jobs.main(["status", "78"]) == 0
    assert "nodes    n[0-1]\n" in capfd.readouterr().out
    assert jobs.main(["log", "77"]) == 0
    assert capfd.readouterr().out == "the log of 77\n"
    scancel = stage / "bin" / "scancel"
    scancel.write_text(f'#!/bin/sh\necho "$@" > "{stage}/cancelled"\n')
    scancel.chmod(0o755)
    assert jobs.main(["cancel", "78", "79"]) == 0
    assert (stage / "cancelled").read_text() == "78 79\n"


@pytest.mark.parametrize(
    ("words", "path", "message"),
    [
        (["status", "5"], None, "job 5 has no results; the last jobs that have some: 78, 79, 102"),
        (["--state", "done"], None, "argument --state: 'done' is not one of " + STATES),
        (
            ["--since", "May"],
            None,
            "argument --since: 'May': expected 2d, 12h or a day such as 2026-11-20",
        ),
        (["cancel", "77", "--json"], None, "jobs cancel takes no --state, --since and --json"),
        (["cancel"], None, "jobs cancel needs the id of a job"),
        (["log", "79"], None, "job 79 has not begun"),
        (["--stage", "/none"], None, "no job has results in /none"),
        ([], "/none", "there is no squeue here; on one host use launch/run.sh --config RECIPE"),
    ],
)
def test_a_mistake_is_one_line(words, path, message, stage, capsys, monkeypatch):
    if path:
        monkeypatch.setenv("PATH", path)
    assert jobs.main(words) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_job_that_never_ran_says_why(stage, capsys):
    folder = stage / "results/1/bf16/8b/8/80"
    folder.mkdir()
    ended = {"status": "failed", "cause": "storage", "reason": "rank 1 on n1: no log"}
    recipe = {"recipe": "llama31_8b_bf16", "gpus": 8, "steps": 50}
    (folder / "job.json").write_text(json.dumps({"recipe": recipe, **ended}))
    (stage / "results/1/bf16/8b/8/81").mkdir()
    (stage / "results/1/bf16/8b/8/81/run.json").write_text("{")
    assert jobs.main(["list", "80", "81"]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert "failed: storage" in first
    assert "rank 1 on n1: no log" in first
    assert "failed" in second
    assert "cannot be read" in second


def test_variables_of_squeue_hide_no_job(stage, monkeypatch):
    squeue = stage / "bin" / "squeue"
    squeue.write_text('#!/bin/sh\n[ "$SQUEUE_STATES$SLURM_CLUSTERS" != c ] || echo "78|RUNNING"\n')
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SLURM_CLUSTERS", "c")
    assert jobs.queue() == {"78": ["RUNNING"]}


@pytest.mark.parametrize("text", ["", '{"status": "comp', "[]", "{}", '{"stat": 1}'])
def test_a_record_that_is_cut_off_is_a_failed_job(text, tmp_path):
    (tmp_path / "run.json").write_text(text)
    record = jobs.record_of(tmp_path)
    assert jobs.state("1", record, {}) == "failed"
    assert record["reason"].startswith("its record cannot be read: ")


@pytest.mark.parametrize(
    ("slurms", "state"),
    [("RUNNING", "running"), ("COMPLETING", "running"), ("PENDING", "pending")],
)
def test_a_run_that_saves_after_a_signal_still_runs(slurms, state):
    """Its record says already that it was interrupted; one that was requeued waits."""
    assert jobs.state("7", {"status": "interrupted"}, {"7": [slurms, "1:00", "n0"]}) == state
