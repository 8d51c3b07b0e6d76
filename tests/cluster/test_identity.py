"""What a job asks once, and not once for each of its processes."""

import os

import pytest
from commands import ROOT, TINY, kill, start_two


@pytest.mark.nightly
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout: git clone")
def test_one_process_asks_git_what_runs(tmp_path):
    """The answer is part of what a cached program is known by: two might differ."""
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text(f'#!/bin/sh\necho "$JAX_PROCESS_ID" >> "{tmp_path}/asked"\n')
    git.chmod(0o755)
    tiny = (*TINY, "--cpu-devices", 1, "--steps", 2, "--output", tmp_path / "run")
    processes = start_two(*tiny, PATH=f"{git.parent}:{os.environ['PATH']}")
    try:
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    finally:
        kill(processes)
    assert set((tmp_path / "asked").read_text().split()) == {"0"}
