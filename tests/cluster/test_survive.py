"""Runs that are killed, stopped, frozen or out of disk, as child processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace

import jax
import pytest
from cases import tiered
from commands import ROOT, TINY, kill, read, run, start, start_two, wait_for_steps
from disk import needs_small_disk, run_on_disk
from tiny import tiny_run

from jaxbench.base.errors import STATUS, RecipeError
from jaxbench.cluster import ending
from jaxbench.cluster.watchdog import Watchdog
from jaxbench.recipe import recipes
from jaxbench.run import command, saved_checkpoints
from jaxbench.run import prepare as beginning
from jaxbench.run.arguments import parse_arguments
from jaxbench.run.session import Attempt, Session, benchmark

STEPS = 400
SAVING = (*TINY, "--steps", STEPS, "--checkpoint-every", 50, "--resume")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Compiled once, for all runs on the same devices."""
    return ("--compilation-cache", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """An undisturbed run that saved nothing."""
    folder = tmp_path_factory.mktemp("whole")
    status, _, err = run(*TINY, "--steps", STEPS, *cache, "--output", folder)
    assert (status, err) == (0, "")
    return read(folder)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_losses(whole, cache, tmp_path):
    process = start(*SAVING, *cache, "--output", tmp_path)
    wait_for_steps(process, tmp_path, 120)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    record, _ = read(tmp_path)  # what was known when it was killed
    assert record["status"] == "running"
    assert {"compile_s", "kernels"} <= record.keys()
    assert record["checkpoints"][0]["step"] == 50
    status, out, err = run(*SAVING, *cache, "--output", tmp_path)
    assert (status, err) == (0, "")
    assert "Global Checkpoint Load : Rank : 0 : " in out
    record, steps = read(tmp_path)
    assert record["compiled_before"]
    (resumed,) = record["resumed_at"]
    assert resumed >= 50
    assert resumed % 50 == 0
    assert f"resumed at step {resumed}" in record["not_comparable_because"]
    assert (record["status"], record["restored"]["step"]) == ("completed", resumed)
    assert [s["step"] for s in steps] == list(range(STEPS))
    assert [s["loss"] for s in steps] == [s["loss"] for s in whole[1]]
    assert record["loss"] == whole[0]["loss"]


def test_only_the_same_run_is_resumed_and_a_complete_one_is_left_alone(tmp_path):
    arguments = (*SAVING[:-1], "--output", tmp_path)
    first = prepared(*arguments, "--resume")[0]
    (tmp_path / "run.json").write_text(
        json.dumps(
            {
                "status": "completed",
                "recipe": recipes.describe(first),
                "resumed_at": [],
                "starts": [],
            }
        )
    )
    before = (tmp_path / "run.json").read_bytes()
    assert prepared(*arguments, "--resume") == (first, None)
    for change in (("--seed", 1), ("--set", "model.layers=2"), ("--steps", 500)):
        with pytest.raises(RecipeError, match=r"^--resume: .*/run\.json is another run, whose "):
            prepared(*arguments, *change, "--resume")
    with pytest.raises(RecipeError, match="already holds a run; name another folder, or continue"):
        prepared(*arguments)
    assert (tmp_path / "run.json").read_bytes() == before
    for recipe, reason in (("{}", "no 'batch'"), ("[]", "its recipe has another form")):
        text = f'{{"status": "running", "recipe": {recipe}, "starts": []}}'
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(RecipeError, match=f"is no record of this version: {reason}$"):
            prepared(*arguments, "--resume")


def prepared(*arguments):
    """(run, session) of a command line."""
    args = command.parse_arguments([str(a) for a in arguments])
    recipe = recipes.load(args.config)
    overrides = recipes.parse_overrides(args.set)
    described = recipes.resolve(
        recipe, "smoke", devices=2, overrides=overrides, steps=args.steps, seed=args.seed
    )
    with ExitStack() as held:
        return beginning.prepare(described, args, held)


@pytest.mark.slow
def test_two_processes_resume_from_the_last_checkpoint_that_both_can_read(tmp_path, cache):
    """The data of the last one are cut where the second process alone reads them, or both."""
    saving = (*TINY, "--steps", 12, "--checkpoint-every", 4, "--keep", 3, "--output", tmp_path)
    assert run(*saving, *cache)[0] == 0
    record = json.loads((tmp_path / "run.json").read_text()) | {"status": "running"}
    (tmp_path / "run.json").write_text(json.dumps(record))
    last = tmp_path / "checkpoints" / "12"
    data = max(last.glob("state/ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:1000])
    processes = start_two(*saving, "--set", "parallelism.fsdp=4", "--resume")
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        kill(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert f"warning: {last} cannot be restored: " in outputs[0][0]
    record, steps = read(tmp_path)
    assert record["resumed_at"] == [8]
    assert record["restored"]["skipped"][0].startswith(f"{last} cannot be restored: ")
    assert [s["step"] for s in steps] == list(range(12))
    assert saved_checkpoints.steps(tmp_path / "checkpoints") == [4, 8, 12]
    assert [*(tmp_path / "checkpoints").glob("unreadable-12-*")]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_and_another_process_count_goes_on(
    whole, cache, tmp_path
):
    """Two processes with two devices each, FSDP across them, then one process with two devices."""
    processes = start_two(*SAVING, "--set", "parallelism.fsdp=4", "--output", tmp_path)
    try:
        wait_for_steps(processes[0], tmp_path, 60)
        processes[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        kill(processes)
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2, outputs
    assert "step  59  " in outputs[0][0]
    assert "step" not in outputs[1][0]  # only the first process reports
    record, steps = read(tmp_path)
    assert (record["status"], record["reason"]) == ("interrupted", "SIGTERM")
    assert (record["hardware"]["processes"], record["hardware"]["devices"]) == (2, 4)
    assert record["checkpoints"][-1]["step"] == len(steps)
    ranks = record["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert rank["step_time_s"]["p95"] >= rank["step_time_s"]["median"] > 0
        assert 0 <= rank["wait_s"] <= rank["step_time_s"]["mean"]
    status, _, err = run(*SAVING, *cache, "--output", tmp_path)
    assert (status, err) == (0, "")
    after, steps = read(tmp_path)
    assert after["resumed_at"] == [record["checkpoints"][-1]["step"]]
    assert [s["step"] for s in steps] == list(range(STEPS))
    # Four devices add up in another order than two: roundings of bf16 activations.
    for step, expected in zip(steps, whole[1], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], abs=1e-3)


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (signal.SIGTERM, ("interrupted", "SIGTERM")),
        (None, ("failed", "jax.errors.JaxRuntimeError: UNKNOWN")),
    ],
)
def test_a_peer_lost_after_the_job_s_signal_is_its_consequence(number, outcome, monkeypatch):
    """A process ends at once on a signal before its first step, and the others may be in theirs."""

    def lose_peer(_):
        raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: Connection reset by peer")

    monkeypatch.setattr(Attempt, "_train", lose_peer)
    attempt = object.__new__(Attempt)
    attempt.run, attempt.watchdog = tiny_run(), Watchdog()
    attempt.signals = SimpleNamespace(received=number, agreed=None)
    status, reason, _ = attempt.outcome()
    assert status == outcome[0]
    assert reason.startswith(outcome[1])


def test_a_mistake_that_the_compiler_finds_is_one_line_and_no_lost_rank(monkeypatch):
    def refuse(_):
        raise RecipeError("xla_gpu_some_flag is unknown")

    monkeypatch.setattr(Attempt, "_train", refuse)
    monkeypatch.setattr(Watchdog, "lost", lambda _: "rank 1 is lost")
    attempt = object.__new__(Attempt)
    attempt.run, attempt.watchdog = tiny_run(), Watchdog()
    attempt.signals = SimpleNamespace(received=None, agreed=None)
    assert attempt.outcome() == ("failed", "xla_gpu_some_flag is unknown", "mistake")


def test_a_rank_that_reads_a_stale_record_ends_with_one_line(tmp_path, monkeypatch, capsys):
    """It does not wait for the others, as an exit with a traceback would."""
    (tmp_path / "run.json").write_text("{")
    waits = []
    monkeypatch.setattr(ending, "leave", lambda status, wait: waits.append(wait) or status)
    options = parse_arguments(["--config", "x", "--output", str(tmp_path), "--resume"])
    session = Session(folder=tmp_path, options=options)
    assert benchmark(tiny_run(), session) == 2
    assert "is not a complete record" in capsys.readouterr().err
    assert waits == [False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "time limit")]
)
def test_a_signal_while_it_compiles_ends_it_at_once(number, reason, tmp_path):
    """Tracing and compiling take several times as long as it may."""
    process = start("--config", "nemotronh_56b_fp8", "--output", tmp_path, "--watchdog", 60)
    try:
        while "compiling" not in (line := process.stdout.readline()):
            assert line
        time.sleep(1)
        process.send_signal(number)
        began = time.monotonic()
        process.communicate(timeout=60)
    finally:
        kill([process])
    assert process.returncode == 128 + number
    assert time.monotonic() - began < 5
    record, steps = read(tmp_path)
    assert (record["status"], record["reason"], steps) == ("interrupted", reason, [])


SECOND = """
import os, signal, sys
from jaxbench.cluster.signals import Signals
signals = Signals(print)
signals.stop(0)
for number in sys.argv[1:]:
    os.kill(os.getpid(), int(number))
print(signals.stop(1), signals.agreed.name)
"""


@pytest.mark.parametrize(
    ("number", "aborts"), [(signal.SIGTERM, False), (signal.SIGUSR1, False), (signal.SIGINT, True)]
)
def test_only_a_second_ctrl_c_aborts_what_is_saved(number, aborts):
    """Slurm sends a second signal while a job may still save."""
    command = [sys.executable, "-c", SECOND, str(int(signal.SIGUSR1)), str(int(number))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ("KeyboardInterrupt" in done.stderr) is aborts
    assert done.stdout == ("" if aborts else "True SIGUSR1\n")


LOST = {
    (1, signal.SIGKILL): (
        0, "lost", r"lost rank 1 on (\S+) \(training, last completed step (\d+)\)"
    ),
    (1, signal.SIGSTOP): (
        0, "hang",
        r"no sign of life for 2.5 s from rank 1 on (\S+) \(training, last completed step (\d+)\)",
    ),
    (0, signal.SIGSTOP): (1, "hang", r"no sign of life for 2.5 s from rank 0 on (\S+)"),
}  # fmt: skip
"""Who is left, the cause, and the reason, by the rank that is lost and by what."""


@pytest.mark.slow
@pytest.mark.parametrize("case", tiered([], LOST, [(1, signal.SIGKILL), (0, signal.SIGSTOP)]))
def test_a_process_ends_when_another_one_is_lost_and_names_it(case, tmp_path):
    (rank, number), (left, cause, reason), timeout = case, LOST[case], 5
    processes = start_two(
        *TINY, "--cpu-devices", 1, "--steps", 10**6, "--output", tmp_path, "--watchdog", timeout
    )
    try:
        wait_for_steps(processes[0], tmp_path, 10)
        time.sleep(2)  # steps take milliseconds, and are posted once in half a second
        processes[rank].send_signal(number)
        at = time.monotonic()
        _, err = processes[left].communicate(timeout=60)
        elapsed = time.monotonic() - at
        record, steps = read(tmp_path)
        frozen = processes[rank].poll() is None
    finally:
        kill(processes)
    assert processes[left].returncode == STATUS[cause], err
    assert elapsed < 1.5 * timeout + 4
    assert frozen == (number == signal.SIGSTOP)  # nobody else is killed
    if left != 0:
        assert re.search(reason, err), err
        return
    assert (record["status"], record["cause"]) == ("failed", cause)
    found = re.fullmatch(reason, record["reason"])
    assert found[1] == os.uname().nodename
    assert abs(int(found[2]) - steps[-1]["step"]) < 2000  # a post ago


@pytest.mark.nightly
def test_a_job_that_is_suspended_for_longer_than_the_time_limit_goes_on(tmp_path):
    """As by `scontrol suspend`. On CPUs not for longer than 30 s: Gloo gives up then."""
    processes = start_two(
        *TINY, "--cpu-devices", 1, "--steps", 10**6, "--output", tmp_path, "--watchdog", 3
    )
    try:
        wait_for_steps(processes[0], tmp_path, 10)
        for number, seconds in ((signal.SIGSTOP, 12), (signal.SIGCONT, 5), (signal.SIGTERM, 0)):
            for process in processes:
                process.send_signal(number)
            time.sleep(seconds)
        for process in processes:
            process.communicate(timeout=60)
    finally:
        kill(processes)
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2
    assert read(tmp_path)[0]["reason"] == "SIGTERM"


@pytest.mark.slow
@needs_small_disk
def test_a_full_disk_is_reported_and_the_last_good_checkpoint_stays(tmp_path):
    """A file system of its own that holds one checkpoint, but not three."""
    arguments = [sys.executable, "-m", "jaxbench.train", *TINY, "--steps", "60"]
    arguments += ["--checkpoint-every", "20", "--keep", "3", "--output", tmp_path / "disk" / "run"]
    status, _, err, left = run_on_disk(tmp_path, 1600, arguments, ROOT)
    assert (status, err) == (STATUS["storage"], "")
    record, _ = read(left / "run")
    assert record["status"] == "failed"
    # A step is recorded while the checkpoint is being written: either may be the first to fail.
    assert re.search(
        "was not saved; the last good one has step 20: |the record in .* cannot be written: ",
        record["reason"],
    )
    assert "No space left on device" in record["reason"]
    assert saved_checkpoints.steps(left / "run" / "checkpoints") == [20]


def test_a_record_that_is_cut_short_is_one_line(tmp_path):
    arguments = (*SAVING, "--output", tmp_path)
    first = prepared(*arguments)[0]
    whole = json.dumps({"status": "running", "recipe": recipes.describe(first), "resumed_at": []})
    for text in (whole[: len(whole) // 2], "", "[]", '{"status": "running"}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(RecipeError, match=r"run\.json is not a complete record: ") as error:
            prepared(*arguments)
        assert "\n" not in str(error.value)
        assert f"--restore {tmp_path} --output NEW" in str(error.value)
        assert (tmp_path / "run.json").read_text() == text


@pytest.mark.slow
def test_a_process_that_waits_for_the_others_to_begin_can_be_ended(tmp_path):
    """JAX's own answer to SIGTERM would be to note it, for a minute or until Slurm kills it."""
    stuck = (
        "import time, jax; from jaxbench.cluster import job; job.join(); print('joined', "
        "flush=True); time.sleep(600)"
    )
    processes = start_two(*TINY, "--output", tmp_path / "run", second=stuck)
    try:
        assert processes[1].stdout.readline() == "joined\n"
        time.sleep(2)  # the other has joined too, and asks for its devices
        began = time.monotonic()
        processes[0].terminate()
        assert processes[0].wait(timeout=30) == -signal.SIGTERM
    finally:
        kill(processes)
    assert time.monotonic() - began < 5
