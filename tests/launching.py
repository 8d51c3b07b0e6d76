"""Helpers for tests of launch/: its modules, jobs from options, and fake Slurm commands."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

import sbatch  # noqa: F401
import site_file  # noqa: F401
import submit
import sweep  # noqa: F401
from mistakes import assert_mistake

STAGE = {"STAGE_PATH": "/stage"}
LLAMA = STAGE | {"WORKLOAD": "llama31", "MODEL_SIZE": "405b", "DTYPE": "BF16"}


def job(*options, **environment):
    """The job of options and variables."""
    return submit.make_job(submit.parse_arguments(list(options)), environment)


def value(job, option):
    """What a job gives to an option of `train`."""
    return job.arguments[job.arguments.index(option) + 1]


def refused(options, variables, message, monkeypatch, capsys):
    """It is a mistake, and nothing is submitted."""
    monkeypatch.setattr(submit.os, "environ", variables)
    monkeypatch.setattr(submit, "submit", lambda job: pytest.fail("it was submitted"))
    assert_mistake(submit.main, options, message, capsys)


SBATCH = """#!/bin/sh
if [ "$1" = --test-only ]; then cat "{folder}/refused" >&2 2> /dev/null && exit 1; exit 0; fi
number=$(( $(ls "{folder}" | grep -c '^script-') + 77 ))
cat > "{folder}/script-$number"
echo $number
"""


def slurm(folder, *, answer=SBATCH, pyxis=True):
    """The PATH of commands that take every job: submitted scripts are `script-<id>` in the folder,
    ids from 77; jobs in `queue` are in the queue; `refused` is why it will never start any."""
    places = folder / "bin"
    places.mkdir(parents=True, exist_ok=True)
    container = "      --container-image=IMAGE  [pyxis]" if pyxis else ""
    texts = {
        "sbatch": answer.format(folder=folder),
        "srun": f"#!/bin/sh\necho 'Usage: srun [OPTIONS]\n{container}'\n",
        "squeue": f'#!/bin/sh\ncat "{folder}/queue" 2> /dev/null || true\n',
    }
    for name, text in texts.items():
        path = places / name
        path.write_text(text)
        path.chmod(0o755)
    return f"{places}:/usr/bin:/bin"
