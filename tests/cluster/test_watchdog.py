"""The watchdog: what it says of a job that stands still, and when it ends its process."""

import json
import subprocess
import threading
import time
from dataclasses import asdict, replace

import pytest
from commands import TINY, kill, start_two

from jaxbench.base.errors import STATUS
from jaxbench.cluster import watchdog
from jaxbench.cluster.watchdog import KEY, SLOW, Progress, Standstill, Watchdog, parse

TRAINS = Progress(0, "n0", "training", started=3, completed=2)


class Store:
    """The key-value store of JAX's coordination service, in this process."""

    def __init__(self):
        self.values, self.frozen = {}, threading.Event()
        self.answers = threading.Event()
        self.answers.set()

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite
        self.answers.wait()
        self.values[key] = value

    def key_value_dir_get(self, prefix):
        self.answers.wait()
        return [pair for pair in self.values.items() if pair[0].startswith(prefix)]

    def post(self, process):
        self.values[f"{KEY}/{process.rank}"] = json.dumps(asdict(process))


class Process:
    """A process of a job of two, whose end is noted: it does not end the tests."""

    def __init__(self, store, patch, rank=0):
        self.store, self.reason, self.status = store, None, None
        self.gone = threading.Event()
        for name, value in {"process_count": 2, "process_index": rank}.items():
            patch.setattr(watchdog.jax, name, lambda value=value: value)
        patch.setattr(watchdog, "coordination_client", lambda: store)
        patch.setattr(watchdog, "coordinator", lambda: "n0")
        patch.setattr(watchdog.os, "_exit", self._exit)
        patch.setenv("SLURMD_NODENAME", f"n{rank}")
        self.watchdog = Watchdog(0.8, lambda reason: setattr(self, "reason", reason))

    def _exit(self, status):
        self.status = status
        self.watchdog._stop.set()
        self.gone.set()

    def train(self, steps, seconds):
        self.watchdog.phase = "training"
        for step in range(steps):
            self.watchdog.started = step + 1
            self.watchdog.completed = step
            time.sleep(seconds / steps)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def process(store, monkeypatch):
    """Makes a process of a rank."""
    made = []

    def make(rank=0):
        made.append(Process(store, monkeypatch, rank))
        return made[-1]

    yield make
    store.answers.set()
    for process in made:
        process.watchdog._stop.set()
        process.watchdog._thread.join()


def posts(store, rank):
    return json.loads(store.values[f"{KEY}/{rank}"])


def test_a_process_posts_its_progress_and_its_end(store, process):
    one = process(rank=1)
    while not store.values:  # at once: it may be lost before the next time
        assert one.watchdog._thread.is_alive()
    one.train(4, 0.1)
    one.watchdog.end()
    assert posts(store, 1) == {
        "rank": 1, "host": "n1", "phase": "ended", "started": 4, "completed": 3,
        "posts": posts(store, 1)["posts"],
    }  # fmt: skip
    assert one.status is None


def test_a_frozen_rank_is_named_and_only_the_own_process_ends(store, process):
    store.post(replace(TRAINS, rank=1, host="n1", completed=7, posts=5))
    one = process()
    one.train(8, 1.6)
    assert one.status is None  # steps are collective: while they complete, every rank is alive
    assert one.gone.wait(5)
    assert one.reason == (
        "no sign of life for 0.4 s from rank 1 on n1 (training, last completed step 7)"
    )
    assert one.status == STATUS["hang"]


def test_a_frozen_coordinator_is_named_by_the_others(store, process):
    one = process(rank=1)
    one.train(4, 0.1)
    store.answers.clear()
    assert one.gone.wait(5)
    assert (one.status, one.reason) == (
        STATUS["hang"], "no sign of life for 0.4 s from rank 0 on n0",
    )  # fmt: skip


def test_a_process_that_was_stopped_and_goes_on_is_not_ended(process, monkeypatch):
    """As by `scontrol suspend`: the clock has gone on, but the thread has not waited."""
    one, clock, stopped = process(), time.monotonic, [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock() + stopped[0])
    one.train(4, 0.1)
    for _ in range(4):
        stopped[0] += 3600
        one.train(2, 0.05)
    assert one.status is None


def test_the_thread_that_ends_the_process_first_gives_the_reason(process):
    """A run that has failed takes its time to say so: that it stands still meanwhile is no news."""
    one = process()
    one.train(4, 0.1)
    one.watchdog.claim()
    assert not one.gone.wait(1)
    one.watchdog.end()
    assert (one.status, one.reason) == (None, None)
    late = threading.Thread(target=one.watchdog.end, daemon=True)
    late.start()
    late.join(0.1)
    assert late.is_alive()


def test_an_error_inside_ends_the_watchdog(process):
    """Whatever it is: a watchdog that stays could replace the reason."""
    one = process()
    with pytest.raises(OSError, match="full"), one.watchdog:
        raise OSError("full")
    assert not one.watchdog._thread.is_alive()


def test_a_process_of_which_nothing_is_heard_any_more_is_lost(store, process):
    store.post(replace(TRAINS, rank=1, host="n1", posts=5))
    one = process()
    one.watchdog.claim()  # as one that fails
    assert one.watchdog.lost() == "lost rank 1 on n1 (training, last completed step 2)"
    store.post(replace(TRAINS, rank=1, host="n1", posts=5, phase="ended"))
    assert one.watchdog.lost() is None
    store.answers.clear()
    assert one.watchdog.lost() is None  # nobody can say


FORGED = {
    "no JSON": '{"rank": 1, "ho',
    "no object": "[1]",
    "deep": "[" * 100_000,
    "empty": "",
    "a pid": '{"rank": 1, "host": "n1", "pid": -1}',
    "a field is missing": '{"rank": 1}',
    "a rank that is none": json.dumps(asdict(replace(TRAINS, rank=99))),
    "a negative rank": json.dumps(asdict(replace(TRAINS, rank=-1))),
    "another rank's": json.dumps(asdict(replace(TRAINS, phase="ended"))),
    **{
        f"{name} {value!r}": json.dumps(asdict(replace(TRAINS, rank=1)) | {name: value})
        for name, value in {
            "rank": True, "host": None, "phase": ["training"], "started": "3", "completed": 1.5,
            "posts": None,
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("text", FORGED.values(), ids=FORGED)
def test_what_is_no_progress_of_this_job_is_left_out(text):
    right = (f"{KEY}/0", json.dumps(asdict(TRAINS)))
    assert parse([(f"{KEY}/1", text), right, (f"{KEY}/x", right[1])], processes=2) == [TRAINS]


def test_forged_posts_neither_stop_the_watchdog_nor_end_the_job(store, process):
    one = process()
    for name, text in FORGED.items():
        store.values[f"{KEY}/{name}"] = text
        store.values[f"{KEY}/1"] = text
        one.train(2, 0.05)
    assert one.status is None
    store.post(replace(TRAINS, rank=1, host="n1", phase="ended"))
    assert one.gone.wait(5)  # it still watches
    assert "rank 0 on n0 (training" in one.reason


def said(job, posted, idle):
    """The reason after some seconds, of which nothing was said before."""
    for at in range(int(job._timeout / 2) + 1, idle):
        assert job.reason([replace(p, posts=at) for p in posted], at) is None
    return job.reason([replace(p, posts=idle) for p in posted], idle)


def test_of_stuck_ranks_the_one_behind_is_named_and_the_others_counted():
    """Where the network is lost all are stuck, and the one behind is not at fault."""
    posted = [replace(TRAINS, rank=rank, started=3 if rank == 1 else 4) for rank in range(3)]
    assert said(Standstill(3, 10), posted, 11) == (
        "no progress within the time limit of 10 s: rank 1 on n0 (training, last completed "
        "step 2); 2 more wait"
    )


def test_before_training_the_time_is_longer_and_told():
    posted = [replace(TRAINS, phase="compiling", completed=-1)]
    assert said(Standstill(1, 10), posted, 10 * SLOW + 1) == (
        "no progress within the time limit of 100 s: rank 0 on n0 (compiling, last completed "
        "step none)"
    )


@pytest.mark.parametrize("phase", ["training", "saving"])
def test_the_phase_of_the_rank_behind_sets_the_limit(phase):
    """Whether it hangs in the step before a save that the others wait in, or is slow to save."""
    others = replace(TRAINS, rank=1, started=4, completed=3, phase="saving")
    limit = 10 if phase == "training" else 10 * SLOW
    reason = said(Standstill(2, 10), [replace(TRAINS, phase=phase), others], limit + 1)
    start = f"no progress within the time limit of {limit} s: rank 0 on n0 ({phase}, "
    assert reason.startswith(start)


def test_a_rank_that_still_gets_on_is_waited_for():
    job = Standstill(2, 10)
    for idle in range(6, 40):
        slow = replace(TRAINS, rank=1, phase="loading" if idle % 8 < 4 else "compiling", posts=idle)
        assert job.reason([replace(TRAINS, posts=idle), slow], idle) is None


def test_a_rank_that_never_began_is_named():
    reason = said(Standstill(3, 10), [TRAINS, replace(TRAINS, rank=2)], 10 * SLOW + 1)
    assert reason == "never a sign of life from rank 1"


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
    assert err.endswith(", process 1 sees 1 device, but 3 were expected\n")
    said = [line for line in err.splitlines() if not line.startswith("waiting for")]
    assert len(said) == 1
