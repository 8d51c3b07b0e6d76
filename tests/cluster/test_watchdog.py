"""The watchdog on a file system that shows what is not so."""

import json
import os
import select
import subprocess
import time

import pytest
from commands import TINY, kill, start, start_two

from jaxbench.cluster import heartbeat, watchdog
from jaxbench.errors import STATUS

BEAT = {
    "rank": 0, "host": "far", "pid": 1, "beats": 1, "phase": "training", "started": 3,
    "completed": 2,
}  # fmt: skip


def write(folder, rank, **changes):
    """A heartbeat as a process of another host writes it."""
    (folder / f"{rank}.json").write_text(json.dumps({**BEAT, "rank": rank, **changes}))


@pytest.mark.parametrize("content", ["", '{"rank": 1, "ho', "[]", '{"rank": 1}', None])
def test_a_heartbeat_that_cannot_be_read_is_skipped_and_counted(content, tmp_path):
    write(tmp_path, 0)
    if content is None:  # what cannot be opened as a file
        (tmp_path / "1.json").mkdir()
    else:
        (tmp_path / "1.json").write_text(content)
    assert heartbeat.read_neighbors(tmp_path / "2.json") == []
    reader = watchdog.Reader(tmp_path, processes=2)
    assert [beat["rank"] for beat in reader.read()] == [0]
    assert reader.problem().startswith("cannot read 1 of 2 heartbeats: ")
    if content is not None:
        write(tmp_path, 1)
        assert len(reader.read()) == 2
        assert reader.problem() == ""


def test_a_rank_that_cannot_be_read_is_not_taken_for_silent():
    watch = watchdog.Watch(processes=2, timeout=10, now=0)
    beats = [{**BEAT, "rank": rank} for rank in range(2)]
    assert watch.verdict(beats, now=0) is None
    for now in range(1, 200, 10):
        alive = [{**BEAT, "beats": now, "completed": now}, beats[1]]
        assert watch.verdict(alive, now, unreadable=[1]) is None
    # Readable again, and silent from then on.
    assert watch.verdict(alive, now + 5) is None
    assert watch.verdict([{**alive[0], "beats": 999}, beats[1]], now + 16).startswith(
        "no sign of life for 10 s from rank 1 on far"
    )


def test_while_steps_complete_no_rank_is_dead():
    """Steps are collective: a rank of which nothing is heard takes part, and cannot write. So too
    while the others save, for longer than the watchdog's time."""
    watch, mute = watchdog.Watch(processes=3, timeout=10, now=0), {**BEAT, "rank": 1}
    for now in range(0, 200, 5):  # of the third there never was a heartbeat
        steps = {**BEAT, "beats": now, "started": now + 1, "completed": now}
        assert watch.verdict([steps, mute], now) is None
    for now in range(200, 295, 5):
        saves = {**steps, "beats": now, "phase": "saving"}
        assert watch.verdict([saves, mute], now) is None
    # It is heard again, and then silent while no step completes.
    heard = {**saves, "rank": 1, "beats": 2}
    assert watch.verdict([{**saves, "beats": 295}, heard], 295) is None
    assert watch.verdict([{**saves, "beats": 306}, heard], 306).startswith(
        "no sign of life for 10 s from rank 1 on far"
    )


def test_a_hang_is_found_though_a_rank_cannot_write():
    watch, mute = watchdog.Watch(processes=2, timeout=10, now=0), {**BEAT, "rank": 1}
    for now in range(0, 50, 5):
        steps = {**BEAT, "beats": now, "started": now + 1, "completed": now}
        assert watch.verdict([steps, mute], now) is None
    assert watch.verdict([{**steps, "beats": 50}, mute], 50) is None
    assert watch.verdict([{**steps, "beats": 56}, mute], 56) == (
        "no progress within the time limit of 10 s: rank 0 on far (training, last completed "
        "step 45)"
    )


def test_before_training_the_time_is_longer_and_told():
    watch = watchdog.Watch(processes=1, timeout=10, now=0)
    for now in range(watchdog.SLOW * 10 + 1):
        assert watch.verdict([{**BEAT, "beats": now, "phase": "compiling"}], now) is None
    said = watch.verdict([{**BEAT, "beats": 101, "phase": "compiling"}], 101)
    assert said.startswith("no progress within the time limit of 100 s: rank 0 on far (compiling")


def test_a_frozen_rank_is_named_though_steps_are_noticed_after_its_last_heartbeat():
    watch, frozen = watchdog.Watch(processes=2, timeout=5, now=0), {**BEAT, "rank": 1}
    for now in range(8):
        steps = {**BEAT, "beats": now, "started": now + 1, "completed": now}
        assert watch.verdict([steps, {**frozen, "beats": min(now, 6)}], now) is None
    for now in range(8, 13):
        assert watch.verdict([{**steps, "beats": now}, {**frozen, "beats": 6}], now) is None
    assert watch.verdict([{**steps, "beats": 13}, {**frozen, "beats": 6}], 13).startswith(
        "no sign of life for 5 s from rank 1 on far"
    )


def test_a_heartbeat_that_cannot_be_replaced_says_so_once_and_goes_on(tmp_path, capsys):
    """As without inodes, or in a folder that became read-only: its file can still be written."""
    beat = heartbeat.Heartbeat(tmp_path / "1.json", interval=0.01)
    (tmp_path / "1.tmp").mkdir()
    beat.completed = 7
    end = time.monotonic() + 20
    while time.monotonic() < end:
        seen = heartbeat.read(tmp_path / "1.json")
        if isinstance(seen, dict) and seen["completed"] == 7 and seen["beats"] > 4:
            break
    assert time.monotonic() < end
    beat.end()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: the heartbeat of rank 1 cannot be written: ")
    assert "Is a directory" in line


def test_of_stuck_ranks_the_one_behind_is_named_and_the_others_counted():
    """Where the network is lost all are stuck, and the one behind is not at fault."""
    watch = watchdog.Watch(processes=3, timeout=10, now=0)
    beats = [{**BEAT, "rank": rank, "started": 3 if rank == 1 else 4} for rank in range(3)]
    for now in range(11):
        alive = [{**beat, "beats": now} for beat in beats]
        assert watch.verdict(alive, now) is None
    said = watch.verdict([{**beat, "beats": 11} for beat in beats], 11)
    assert said == (
        "no progress within the time limit of 10 s: rank 1 on far (training, last completed "
        "step 2); 2 more wait"
    )


@pytest.mark.parametrize("phase", ["training", "saving"])
def test_the_phase_of_the_rank_behind_sets_the_limit(phase):
    """Whether it hangs in the step before a save that the others wait in, or is slow to save."""
    watch = watchdog.Watch(processes=2, timeout=10, now=0)
    others = {**BEAT, "rank": 1, "started": 4, "completed": 3, "phase": "saving"}
    limit = 10 if phase == "training" else 10 * watchdog.SLOW
    for now in range(limit + 1):
        beats = [{**beat, "beats": now} for beat in ({**BEAT, "phase": phase}, others)]
        assert watch.verdict(beats, now) is None
    said = watch.verdict([{**beat, "beats": now + 1} for beat in beats], now + 1)
    assert said.startswith(
        f"no progress within the time limit of {limit} s: rank 0 on far ({phase}, "
    )


def test_a_failing_process_asks_for_those_of_its_host_alone(tmp_path, monkeypatch):
    """Of 2048, which may all fail at once and ask for 2 s each."""
    here, gone = os.uname().nodename, 2**22 + 1  # a process id that there cannot be
    for rank in range(2048):
        write(tmp_path, rank, host=here if 8 <= rank < 16 else "far", pid=os.getpid())
    write(tmp_path, 3, pid=gone)  # on another host nobody can tell
    write(tmp_path, 9, host=here, pid=gone, phase="ended")
    asked, read = [], heartbeat.read
    monkeypatch.setattr(heartbeat, "read", lambda path: asked.append(path) or read(path))
    assert watchdog.wait_for_lost_neighbor(tmp_path / "10.json", seconds=0.5) is None
    assert len(asked) == 7 + 2
    write(tmp_path, 14, host=here, pid=gone)
    said = watchdog.wait_for_lost_neighbor(tmp_path / "10.json")
    assert said == f"lost rank 14 on {here} (training, last completed step 2)"
    assert len(asked) == 9 + 2 * 9


def test_a_large_job_is_read_as_often_as_it_writes(tmp_path, monkeypatch):
    """2048 files in 10 s, not in one."""
    sleeps, arguments = [], [str(tmp_path), str(tmp_path), "2048", "300"]
    monkeypatch.setattr(watchdog.sys, "argv", ["watchdog", *arguments])
    monkeypatch.setattr(watchdog.signal, "signal", lambda *_: None)
    monkeypatch.setattr(watchdog.time, "sleep", sleeps.append)
    write(tmp_path, 0, phase="ended")
    assert watchdog.main() == 0
    assert sleeps == [10.0]


def test_the_watchdog_says_when_it_is_blind_and_lives_on(tmp_path):
    write(tmp_path, 0)
    (tmp_path / "1.json").write_text("{")
    process = start(tmp_path, tmp_path, 2, 30, module="jaxbench.cluster.watchdog")
    try:
        assert "watchdog: cannot read 1 of 2 heartbeats: " in line_of(process)
        write(tmp_path, 1)
        assert line_of(process) == "watchdog: reads all heartbeats again\n"
        assert process.poll() is None
        write(tmp_path, 0, phase="ended")
        assert process.wait(timeout=20) == 0
    finally:
        kill([process])


def test_what_the_first_process_said_in_the_end_is_not_written_over(tmp_path):
    """A signal ended it while it compiled; others could not say that they end."""
    record = json.dumps({"status": "interrupted", "reason": "SIGTERM", "cause": None})
    (tmp_path / "run.json").write_text(record)
    beats = tmp_path / "beats"
    beats.mkdir()
    write(beats, 0, phase="ended")
    write(beats, 1, host=os.uname().nodename, pid=2**22 + 1)  # more than there can be
    process = start(tmp_path, beats, 2, 30, module="jaxbench.cluster.watchdog")
    try:
        assert process.wait(timeout=20) == 0
    finally:
        kill([process])
    assert (tmp_path / "run.json").read_text() == record


def line_of(process):
    """The next line on a process's stderr, within some seconds."""
    assert select.select([process.stderr], [], [], 20)[0]
    return process.stderr.readline()


@pytest.mark.slow
def test_what_stops_the_first_process_is_told_to_all(tmp_path):
    """In seconds, not after the five minutes for which they would wait."""
    (tmp_path / "file").touch()
    tiny = ("--config", "llama31_8b_bf16", "--cpu-devices", 1, "--set", "parallelism.fsdp=2")
    processes = start_two(*tiny, "--output", tmp_path / "file" / "run")
    began = time.monotonic()
    try:
        errors = [process.communicate(timeout=60)[1] for process in processes]
    except subprocess.TimeoutExpired:
        pytest.fail("a process waits")
    finally:
        kill(processes)
    assert time.monotonic() - began < 45
    assert [process.returncode for process in processes] == [STATUS["storage"]] * 2
    assert "Not a directory" in errors[0]
    assert "error: the first process failed: " in errors[1]
    assert "Not a directory" in errors[1]


@pytest.mark.slow
def test_what_one_process_alone_sees_ends_it(tmp_path):
    """As on a node without GPUs. To leave in order it would wait for the others, and they for it,
    until something aborts it, as if it had lost them."""
    own = [*TINY, "--cpu-devices", "1", "--local-devices", "3"]
    second = f"import sys; from jaxbench.run import command; sys.exit(command.main({own}))"
    processes = start_two(*TINY, "--cpu-devices", 1, "--output", tmp_path / "run", second=second)
    try:
        _, err = processes[1].communicate(timeout=60)
    finally:
        kill(processes)
    assert processes[1].returncode == STATUS["mistake"]
    assert err.endswith(", process 1: sees 1 device, 3 were expected\n")
    assert err.count("\n") == 1
