"""Files that are there whole or not at all, and have one writer."""

import errno
import json
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import ROOT

from jaxbench.base import files
from jaxbench.base.errors import RecipeError
from jaxbench.base.files import RESERVE_BYTES, Lines, ReservedJson, new_folder, owned, write_json


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_room_is_kept_and_given_back(tmp_path):
    path, reserve = tmp_path / "run.json", tmp_path / ".run.json.reserve"
    file = ReservedJson(path)
    for value in (1, 2):
        assert reserve.stat().st_blocks * 512 >= RESERVE_BYTES
        file.write({"a": value})
        assert json.loads(path.read_text()) == {"a": value}
    file.close()
    assert list(tmp_path.iterdir()) == [path]


def test_the_room_grows_with_what_is_written(tmp_path):
    """The record of many processes is longest when it is written last."""
    reserve = tmp_path / ".run.json.reserve"
    file = ReservedJson(tmp_path / "run.json", more=2**20)
    assert reserve.stat().st_blocks * 512 >= RESERVE_BYTES + 2**20
    file.write({"a": "x" * 2**21})
    assert reserve.stat().st_blocks * 512 >= 2**22
    file.close()


def test_a_line_that_cannot_be_written_fails_at_once_and_only_once():
    lines = Lines(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        lines.write("one")
    lines.close()


def test_lines_of_a_file_that_was_deleted_are_an_error(tmp_path):
    lines = Lines(tmp_path / "steps.jsonl")
    lines.write("one")
    (tmp_path / "steps.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"steps\.jsonl was deleted or replaced"):
        lines.write("two")
    (tmp_path / "steps.jsonl").write_text("another run's")
    with pytest.raises(FileNotFoundError, match=r"steps\.jsonl was deleted or replaced"):
        lines.write("three")
    lines.close()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_an_owner_keeps_others_out_until_its_end(kind, tmp_path):
    path = tmp_path if kind == "folder" else tmp_path / "plan.html"
    with owned(path):
        who = re.escape(f"process {os.getpid()} on {platform.node()} since ")
        with pytest.raises(RecipeError, match=f"{path} is in use by {who}"), owned(path):
            pass
    assert not [*tmp_path.iterdir()]
    with owned(path):
        pass


def test_a_killed_owner_leaves_the_folder_free(tmp_path):
    """The kernel gives up the lock; the file that it leaves is no owner."""
    code = (
        "import os, sys; from jaxbench.base.files import *\n"
        "with owned(Path(sys.argv[1])): os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=True)
    assert (tmp_path / ".owner").exists()
    with owned(tmp_path):
        pass


def test_one_of_many_becomes_the_owner_at_a_time(tmp_path):
    """Owners that follow each other at once, each of which deletes the file that it had locked."""
    inside, most = [], []

    def own(_):
        with owned(tmp_path, wait=True):
            inside.append(1)
            most.append(len(inside))
            inside.pop()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(own, range(200)))
    assert max(most) == 1
    assert len(most) == 200


def test_a_start_of_a_job_waits_for_the_lock_of_the_start_before(tmp_path, monkeypatch):
    """On NFS it outlives a node that died."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    before = owned(tmp_path)
    before.__enter__()
    monkeypatch.setattr(files.time, "sleep", lambda seconds: before.__exit__(None, None, None))
    with owned(tmp_path):
        monkeypatch.setenv("SLURM_JOB_ID", "8")
        with pytest.raises(RecipeError, match=r"in use by process .* job 7"), owned(tmp_path):
            pass


def test_a_file_system_without_locks_has_no_owners(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with owned(tmp_path), owned(tmp_path):
        pass


def test_new_folders_have_names_of_their_own(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(new_folder, [tmp_path / "20260101-120000"] * 8))
    assert len({*made}) == 8
    assert all(folder.is_dir() for folder in made)
    assert (tmp_path / "20260101-120000") in made
    assert (tmp_path / "20260101-120000-8") in made
