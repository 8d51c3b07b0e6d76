"""Heartbeats and the watchdog."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time

import pytest
from commands import ROOT, TINY, kill, start_two

from jaxbench.cluster import heartbeat, watchdog
from jaxbench.errors import STATUS

BEAT = {
    "rank": 0, "host": "far", "pid": 1, "beats": 1, "phase": "training", "started": 3,
    "completed": 2,
}  # fmt: skip


PLACE = heartbeat.Place("localhost", 0, "1795.25")


@pytest.fixture
def receiver():
    """The watchdog's end of the start of a job, and the place to which its heartbeats go."""
    end = heartbeat.Receiver(PLACE.start)
    yield end, PLACE._replace(port=end.socket.getsockname()[1])
    end.socket.close()


def send(place, rank, **changes):
    """A heartbeat, as a process of another host sends it."""
    content = json.dumps({**BEAT, "start": place.start, "rank": rank, **changes})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(content.encode(), ("127.0.0.1", place.port))


def test_what_is_no_heartbeat_of_this_start_is_ignored(receiver):
    end, place = receiver
    send(place, 0, beats=3, completed=7)
    send(place, 0, beats=2)  # overtaken on its way
    send(place._replace(start="1794.75"), 1)  # of a start that was killed
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for text in ("", '{"rank": 1, "ho', "[]", '{"rank": 1}', "\xff"):
            sender.sendto(text.encode(), ("127.0.0.1", place.port))
    (beat,) = end.read(0.1)
    assert (beat["rank"], beat["beats"], beat["completed"]) == (0, 3, 7)


def test_a_process_says_that_it_lives_and_that_it_ends(receiver, tmp_path, monkeypatch):
    """And on its host, where it runs: for others that lose it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    end, place = receiver
    beat = heartbeat.Heartbeat(1, place, interval=0.01)
    assert (place.folder / "1").read_text() == str(os.getpid())
    beat.completed = 7
    while end.read(0.02)[0]["completed"] != 7:
        pass
    beat.end()
    assert end.read(0.1)[0]["phase"] == "ended"
    assert list(tmp_path.iterdir()) == []


def test_a_heartbeat_that_cannot_be_sent_says_so_once_and_goes_on(capsys):
    beat = heartbeat.Heartbeat(1, PLACE._replace(host="no.such.invalid"), interval=0.01)
    time.sleep(0.1)
    beat.end()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: rank 1 cannot send its heartbeat: ")


def test_while_steps_complete_no_rank_is_dead():
    """Steps are collective: a rank of which nothing is heard takes part. So too
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


def test_a_hang_is_found_though_a_rank_is_not_heard():
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


GONE = 2**22 + 1
"""A process id that there cannot be."""


def test_a_failing_process_names_one_of_its_host_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert watchdog.wait_for_lost_neighbor(PLACE, seconds=0.1) is None
    PLACE.folder.mkdir()
    (PLACE.folder / "1").write_text(str(os.getpid()))
    (PLACE.folder / "3").write_text("")  # not yet written
    assert watchdog.wait_for_lost_neighbor(PLACE, seconds=0.1) is None
    (PLACE.folder / "14").write_text(str(GONE))
    (PLACE.folder / "3").unlink()
    said = watchdog.wait_for_lost_neighbor(PLACE)
    assert said == f"lost rank 14 on {os.uname().nodename}"


def test_what_the_first_process_said_in_the_end_is_not_written_over(tmp_path, receiver):
    """A signal ended it while it compiled; others could not say that they end."""
    record = json.dumps({"status": "interrupted", "reason": "SIGTERM", "cause": None})
    (tmp_path / "run.json").write_text(record)
    end, place = receiver
    send(place, 0, phase="ended")
    send(place, 1, host=os.uname().nodename, pid=GONE)
    descriptor = end.socket.fileno()
    done = subprocess.run(
        [sys.executable, "-m", "jaxbench.cluster.watchdog", tmp_path, place.start, str(descriptor),
         "2", "30"],
        cwd=ROOT, pass_fds=[descriptor], timeout=20, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert (tmp_path / "run.json").read_text() == record


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
