"""launch/slurm.sbatch with programs in place of Slurm's."""

import json
import os
import sys

import launching  # noqa: F401
import pytest
from commands import ROOT
from disk import needs_small_disk, run_on_disk


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Runs a start of job 7 of a submission, on a small disk for its temporary files if that has a
    size; srun does nothing but `words`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, value in {
        "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n0",
        "SLURMD_NODENAME": "n0", "JAXBENCH_RESULTS": str(tmp_path / "results"),
        "JAXBENCH_NAME": "test", "JAXBENCH_ROOT": str(ROOT), "JAXBENCH_CHECK": "off",
        "JAXBENCH_VENV": sys.prefix,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)

    def run(submission, number=0, words="", kib=1024):
        for name, text in (("srun", words), ("scontrol", "")):
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
        monkeypatch.setenv("submission", submission)
        monkeypatch.setenv("described", json.dumps({"submission": submission}))
        folder = tmp_path / f"{submission}-{number}"
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(folder / "disk"))
        script = ["bash", ROOT / "launch" / "slurm.sbatch"]
        status, _, err, left = run_on_disk(folder, kib, script, ROOT)
        assert [path.name for path in left.iterdir() if path.name != "other"] == []
        return status, err, (tmp_path / "results/7/sbatch_jaxbench_test_7.out").read_text()

    return run


@needs_small_disk
def test_results_of_another_job_with_the_number_move_aside(start, tmp_path):
    folder = tmp_path / "results" / "7"
    folder.mkdir(parents=True)  # as launch/submit.py makes it
    start("first")
    (folder / "run.json").write_text("first")
    start("first", number=1)  # a job that was requeued goes on
    assert (folder / "run.json").read_text() == "first"
    assert (folder / "ranks" / "start-2").is_dir()
    start("second")
    assert not (folder / "run.json").exists()
    assert not (folder / "ranks" / "start-2").exists()
    (aside,) = (tmp_path / "results").glob("7-before-*")
    assert (aside / "run.json").read_text() == "first"


@needs_small_disk
def test_results_of_which_nobody_said_whose_they_are_move_aside(start, tmp_path):
    old = tmp_path / "results" / "7" / "run.json"
    old.parent.mkdir(parents=True)
    old.write_text("old")
    start("new")
    assert not old.exists()
    (aside,) = (tmp_path / "results").glob("7-before-*")
    assert (aside / "run.json").read_text() == "old"


WORDS = "rank 0 on n0: error: what happened\nrank 0 on n0: exit 3\n"


@needs_small_disk
@pytest.mark.parametrize(
    ("kib", "before"),
    [(64, "true"), (1024, 'cat /dev/zero > "$TMPDIR/other" 2> /dev/null'),
     (1024, "rm -r \"$JAXBENCH_RESULTS/7/ranks/start-1\"")],
)  # fmt: skip
def test_last_words_survive_a_disk_that_is_full_and_one_that_fills(kib, before, start, tmp_path):
    """And results that are not there any more."""
    words = f"{before}; printf '{WORDS!r}' >&2; exit 3".replace("''", "'")
    status, _, log = start("first", words=words, kib=kib)
    assert (status, log.splitlines()[-1]) == (3, "failed: rank 0 on n0: what happened")
    if "rm" not in before:
        assert (tmp_path / "results/7/ranks/start-1/srun.log").read_text() == WORDS
