"""A job number that occurs again: launch/slurm.sbatch with programs in place of Slurm's."""

import os
import subprocess
import sys

import launching  # noqa: F401
import pytest
from commands import ROOT


@pytest.fixture
def start(tmp_path):
    """Runs a start of job 7 of a submission, in which srun does nothing."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "scontrol"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)

    def run(submission, number=0):
        done = subprocess.run(
            ["bash", ROOT / "launch" / "slurm.sbatch"], capture_output=True, text=True, timeout=60,
            env=os.environ | {
                "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
                "SLURM_RESTART_COUNT": str(number), "JAXBENCH_RESULTS": str(tmp_path / "results"),
                "JAXBENCH_NAME": "test", "JAXBENCH_ROOT": str(ROOT), "JAXBENCH_CHECK": "off",
                "JAXBENCH_SUBMISSION": submission, "JAXBENCH_VENV": sys.prefix,
                "SLURM_JOB_NODELIST": "n0", "SLURMD_NODENAME": "n0", "TMPDIR": str(tmp_path),
            },
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    return run


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


def test_results_of_which_nobody_said_whose_they_are_move_aside(start, tmp_path):
    old = tmp_path / "results" / "7" / "run.json"
    old.parent.mkdir(parents=True)
    old.write_text("old")
    start("new")
    assert not old.exists()
    (aside,) = (tmp_path / "results").glob("7-before-*")
    assert (aside / "run.json").read_text() == "old"
