"""Runs on a file system that is stale, read-only or slow for a while (`tests/faults.c`)."""

import errno
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from commands import TINY, kill, read, start, wait_for_steps

from jaxbench.base.errors import STATUS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("cc") is None, reason="needs a C compiler: apt-get install gcc"
    ),
]
SOURCE = Path(__file__).parents[1] / "faults.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, SOURCE, "-ldl"], check=True)
    return path


@pytest.fixture
def faulty(library, tmp_path):
    """Starts a run: (its process, its folder, how to break the file system)."""
    processes = []

    def begin(*options):
        control = tmp_path / "control"
        processes.append(
            start(*TINY, *options, "--output", tmp_path / "run",
                  LD_PRELOAD=str(library), FAULTS=str(control))
        )  # fmt: skip
        wait_for_steps(processes[0], tmp_path / "run", 5)

        def breaks(code, part, milliseconds=0):
            control.with_suffix(".new").write_text(f"{code} {milliseconds} {part}")
            control.with_suffix(".new").rename(control)

        return processes[0], tmp_path / "run", breaks

    yield begin
    kill(processes)


@pytest.mark.nightly
def test_slow_records_do_not_end_a_job(faulty):
    """A fifth of a second for each call, of which a step's records take a few, for longer than the
    watchdog's time."""
    process, folder, breaks = faulty("--steps", 10**6, "--watchdog", 4)
    breaks(0, "/run/", milliseconds=200)
    before = len(read(folder)[1])
    time.sleep(5)
    assert 0 < len(read(folder)[1]) - before < 50  # of hundreds
    breaks(0, "/none/")
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert err == ""
    record, steps = read(folder)
    assert (record["status"], record["reason"]) == ("interrupted", "SIGTERM")
    assert [step["step"] for step in steps] == list(range(len(steps)))


def test_a_file_system_that_becomes_read_only_is_one_line(faulty):
    process, folder, breaks = faulty("--steps", 10**6)
    breaks(errno.EROFS, "/run/")
    _, err = process.communicate(timeout=60)
    assert process.returncode == STATUS["storage"]
    assert err == f"error: the record in {folder} cannot be written: Read-only file system\n"
    record, steps = read(folder)
    assert record["status"] == "running"  # the last that could be written
    assert [step["step"] for step in steps] == list(range(len(steps)))
