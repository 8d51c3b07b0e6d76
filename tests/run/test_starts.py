"""Starts of a run: what each ran on, and figures that are of one of them alone."""

import json
import signal
from dataclasses import replace

import pytest
from tiny import tiny_run

from jaxbench.cluster.signals import Signals
from jaxbench.cluster.watchdog import Watchdog
from jaxbench.results.window import start_of
from jaxbench.run import records, session, start_record, summary
from jaxbench.run.arguments import parse_arguments
from jaxbench.run.records import Recorder
from jaxbench.run.session import Session

RUN = replace(tiny_run(), steps=120)


def begin(folder, run, step, *options):
    """The recorder of a start from a step."""
    args = parse_arguments(["--config", "llama31_8b_bf16", *options])
    record = start_record.new_record(run, folder / "run.json", args, step)
    return Recorder(folder, run, record, step)


def record_steps(recorder, numbers, seconds=1.0, host_s=0.0):
    for number in numbers:
        recorder.step(
            {"step": number, "loss": 5.0, "grad_norm": 1.0, "learning_rate": 1e-4, "wait_s": 0.0,
             "step_time_s": seconds, "host_s": host_s, "memory_bytes": 1, "peak_memory_bytes": 1}
        )  # fmt: skip


def killed(recorder):
    """What is left of its files."""
    for file in (recorder._log, recorder._jsonl):
        file.close()


def finished(recorder):
    recorder.finish("completed", None)
    return json.loads((recorder.folder / "run.json").read_text())


def test_a_resumed_run_never_mixes_two_programs(tmp_path, capsys):
    """Microbatches of 1 instead of 8 from step 40 on: the window is of the steps behind it."""
    first = begin(tmp_path, RUN, 0)
    record_steps(first, range(60), seconds=1.0)
    killed(first)
    other = replace(RUN, batch=replace(RUN.batch, microbatch=1))
    second = begin(tmp_path, other, 40, "--resume", "--output", "x")
    record_steps(second, range(40, 120), seconds=3.0)
    record = finished(second)
    assert (record["summary"]["window"], record["summary"]["start"]) == ([80, 119], 1)
    assert record["summary"]["step_time_s"]["mean"] == 3.0
    assert record["resumed_at"] == [40]
    begun = record["starts"]
    assert [start["step"] for start in begun] == [0, 40]
    assert begun[0]["changed"] == {}
    assert begun[1]["changed"] == {
        "recipe.batch.microbatch": [8, 1], "recipe.batch.accumulation": [1, 8],
    }  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(s["step"], s["start"]) for s in lines] == [
        *((n, 0) for n in range(40)), *((n, 1) for n in range(40, 120)),
    ]  # fmt: skip


@pytest.mark.parametrize("option", ["pgle", "tune_kernels"])
def test_what_measurements_change_is_another_program(option, tmp_path):
    flag = f"--{option.replace('_', '-')}"
    record_steps(first := begin(tmp_path, RUN, 0, flag), range(40))
    killed(first)
    record_steps(second := begin(tmp_path, RUN, 40, "--resume", "--output", "x"), range(40, 50))
    record = finished(second)
    assert record["starts"][1]["changed"] == {f"options.{option}": [True, False]}
    assert record["summary"]["start"] == 1


def test_without_enough_steps_of_the_last_program_there_is_no_rate(tmp_path, capsys):
    record_steps(first := begin(tmp_path, RUN, 0), range(119))
    killed(first)
    other = replace(RUN, batch=replace(RUN.batch, microbatch=1))
    second = begin(tmp_path, other, 119, "--resume", "--output", "x")
    record_steps(second, [119], seconds=3.0)
    record = finished(second)
    reason = record["no_summary"]
    assert "summary" not in record
    assert reason.endswith("the last of 2 starts has only step 119")
    assert record["loss"]["first"] == 5.0
    out = capsys.readouterr().out
    assert f"step time   none: {reason}" in out
    assert "throughput" not in out


CHANGED = {"recipe.parallelism.fsdp": [1, 4]}
SAME = {"hardware.host": ["n1", "n2"], "versions.commit": ["a", "b"]}


@pytest.mark.parametrize(
    ("begins", "changed", "window", "start"),
    [
        ((0,), ({},), [11, 44], 0),
        ((0, 60), ({}, SAME), [11, 44], 0),  # the published window is whole there
        ((0, 30), ({}, {}), [65, 99], 1),
        ((0, 80), ({}, CHANGED), [90, 99], 1),
        ((0, 10), ({}, CHANGED), [11, 44], 1),
        ((0, 20, 50), ({}, CHANGED, {}), [75, 99], 2),
        ((0, 20, 98), ({}, CHANGED, SAME), [59, 97], 1),  # of the same program, and longer
        ((0, 20, 60, 40), ({}, {}, {}, {}), [70, 99], 3),  # from an older checkpoint
        ((20,), ({},), [60, 99], 0),
        ((0, 98), ({}, CHANGED), [99, 99], 1),
        ((0, 99), ({}, CHANGED), None, None),
        ((0, 100), ({}, CHANGED), None, None),
    ],
)
def test_the_window_lies_within_one_start(begins, changed, window, start):
    begun = [{"step": s, "changed": c} for s, c in zip(begins, changed, strict=True)]
    counted = summary.counted_steps([{"step": n} for n in range(begins[0], 100)], begun)
    assert ([counted[0]["step"], counted[-1]["step"]] if counted else None) == window
    if window:
        of = {start_of(step["step"], begins) for step in counted}
        assert of == {start}


def test_a_start_from_an_older_checkpoint_than_planned(tmp_path):
    """That of step 60 could not be read: the steps from 40 on come again."""
    record_steps(first := begin(tmp_path, RUN, 0), range(70))
    killed(first)
    second = begin(tmp_path, RUN, 60, "--resume", "--output", "x")
    assert len(second.steps) == 60
    options = parse_arguments(["--config", "llama31_8b_bf16"])
    second.begin(40, start_record.start_fields(RUN, options, second.record, 40))
    record_steps(second, range(40, 120))
    record = finished(second)
    assert record["resumed_at"] == [40]
    assert [start["step"] for start in record["starts"]] == [0, 40]
    assert record["not_comparable_because"][-1] == "resumed at step 40"
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in lines] == list(range(120))


def test_steps_of_a_line_that_is_no_record_are_not_kept(tmp_path):
    lines = [json.dumps({"step": n}) for n in range(4)]
    for odd in ('{"step": 2}}', "[2]", '{"stop": 2}', '{"step": "2"}', '{"step": 2'):
        (tmp_path / "steps.jsonl").write_text("\n".join([*lines[:2], odd, lines[3]]))
        assert records.steps_before(9, tmp_path / "steps.jsonl") == [{"step": 0}, {"step": 1}]


@pytest.mark.parametrize(("seconds", "host_s", "slow"), [(1.5, 1.49, True), (1.5, 0.4, False)])
def test_a_run_with_slow_records_is_not_comparable(seconds, host_s, slow, tmp_path):
    recorder = begin(tmp_path, RUN, 0)
    record_steps(recorder, range(10), seconds, host_s)
    text = "slow storage or terminal: writing the records of a step takes 1.5 s"
    reasons = finished(recorder)["not_comparable_because"]
    assert any(reason.startswith(text) for reason in reasons) == slow


def test_a_run_whose_folder_is_deleted_fails(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    recorder = begin(folder, RUN, 0)
    record_steps(recorder, [0])
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(records.RunFailed, match=r"steps\.jsonl was deleted or replaced") as error:
        record_steps(recorder, [1])
    assert error.value.cause == "storage"
    killed(recorder)


def test_a_record_says_interrupted_before_the_last_save(tmp_path):
    """Slurm may kill the process while it saves."""
    recorder = begin(tmp_path, RUN, 0)
    signals = Signals.__new__(Signals)
    signals.agreed, signals._received, signals._stepping = None, [], False
    options = parse_arguments(["--config", "llama31_8b_bf16"])
    begun = Session(folder=tmp_path, options=options)
    attempt = session.Attempt(RUN, begun, recorder, signals, Watchdog())
    assert not attempt._stop(1)
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "running"
    signals._received.append(signal.SIGTERM)
    assert attempt._stop(2)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "interrupted"
    assert record["reason"] == "SIGTERM, and it did not end by itself"
    killed(recorder)
