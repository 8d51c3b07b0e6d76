"""Files that are there whole or not at all."""

import json
from pathlib import Path

import pytest

from jaxbench.files import RESERVE_BYTES, Lines, ReservedJson, write_json


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


def test_a_line_that_cannot_be_written_fails_at_once_and_only_once():
    lines = Lines(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        lines.write("one")
    lines.close()
