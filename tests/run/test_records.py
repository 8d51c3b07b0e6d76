"""Records: the published line formats, the window and the arithmetic of a summary."""

import errno
import json
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import ROOT
from disk import needs_small_disk, run_on_disk
from tiny import tiny_run

from jaxbench.base.errors import STATUS
from jaxbench.base.files import ReservedJson
from jaxbench.recipe import recipes
from jaxbench.report import logs
from jaxbench.results.throughput import throughput
from jaxbench.results.window import spread
from jaxbench.results.window import window as published_window
from jaxbench.run import command, records, start_record, summary
from jaxbench.run.arguments import parse_arguments
from jaxbench.run.records import Recorder

RUN = recipes.resolve(recipes.load("llama31_8b_bf16"), 8)
STEP = {
    "step": 49,
    "loss": 11.9588,
    "grad_norm": 1.0,
    "learning_rate": 3e-4 * 50 / 2001,
    "step_time_s": 12.39,
    "memory_bytes": 44271689728,
    "peak_memory_bytes": 70833405952,
}


def record_of(run):
    """What a recorder has to know of a run."""
    return {
        "label": run.label, "comparable": False, "not_comparable_because": ["smoke"],
        "recipe": recipes.describe(run), "published": None,
        "hardware": {"device": "x86_64", "null": False, "processes": 1},
        "first_step": 0, "starts": [{"step": 0, "changed": {}}],
    }  # fmt: skip


def test_nemo_line_is_the_published_one():
    """The sample of the Llama 3.1 document, with the field that the next release added."""
    line = summary.nemo_line(RUN, {**STEP, "tflops_per_gpu": 612.63})
    assert line == (
        "Training epoch 0, iteration 49/49 | lr: 7.496e-06 | global_batch_size: 128 | "
        "global_step: 49 | peak_memory_usage: 70833405952 | memory_allocated: 44271689728 | "
        "reduced_train_loss: 11.96 | train_step_timing in s: 12.39 | TFLOPS_per_GPU: 612.6 | "
        "consumed_samples: 6400"
    )


def test_maxtext_line_is_the_published_one():
    """The sample of the Llama 2 document; its FLOP/s follow from its own step time."""
    run = recipes.resolve(recipes.load("llama2_70b_bf16"), 64)
    rates = throughput(run, 7.908, None)
    step = {**STEP, "step_time_s": 7.908, "loss": 0.0}
    step |= {"tflops_per_gpu": rates["tflops_per_gpu"]["full"]}
    step |= {"tokens_per_s_per_gpu": rates["tokens_per_s_per_gpu"]}
    number = r"(\d+\.\d{3})"
    match = re.fullmatch(
        rf"completed step: 49, seconds: 7\.908, TFLOP/s/device: {number}, "
        rf"Tokens/s/device: {number}, total_weights: 524288, loss: 0\.000",
        summary.maxtext_line(run, step),
    )
    assert match
    # Printed there: 460.480 and 1035.970, from a step time with more digits than 7.908.
    assert float(match.group(1)) == pytest.approx(460.480, rel=1e-4)
    assert float(match.group(2)) == pytest.approx(1035.970, rel=1e-4)


def collected(folder):
    """Samples of each log that NVIDIA's parse_train_timing.sh (release 25.05) counts, below a
    folder: step time and FLOP/s of iterations 11 to 44 of 50; none of a log that failed."""
    line = r"iteration (\d+)/49 .*train_step_timing in s: ([\d.]+).*TFLOPS_per_GPU: ([\d.]+)"
    found = {}
    for path in folder.rglob("*.out"):
        samples = re.findall(line, text := path.read_text())
        other = path.name.startswith(("sbatch_", "vboost")) or "nccltrace" in path.name
        if samples or (not other and re.search("iteration|training|model|experiment", text)):
            found[path.name] = [s[1:] for s in samples if 11 <= int(s[0]) <= 44]
    return found


def test_published_parser_reads_a_run_once(tmp_path):
    """In the layout of the published programme, and with the main log of a job next to it."""
    name = "pretrain_llama3.1_8b_bf16_gpus8"
    folder = tmp_path / "experiments" / name / f"{name}_1795579216" / name
    folder.mkdir(parents=True)
    recorder = Recorder(folder, RUN, record_of(RUN))
    recorder.phase("training", "steps 0 to 49")
    for n in range(50):
        recorder.step(STEP | {"step": n})
    recorder.finish("completed", None, None)
    main = re.search(r"^log=\$folder/(\S+)$", (ROOT / "launch/slurm.sbatch").read_text(), re.M)[1]
    (folder / main).write_text("12:00:00 training: steps 0 to 49\n")
    (log,) = folder.glob("log-*.out")
    found = collected(tmp_path / "experiments")
    assert [*found] == [log.name]
    assert len(found[log.name]) == 34
    assert {seconds for seconds, _ in found[log.name]} == {"12.39"}


def test_the_log_of_a_short_run_is_not_one_that_ends_early(tmp_path):
    run = replace(RUN, steps=6)
    recorder = Recorder(tmp_path, run, record_of(run))
    for n in range(6):
        recorder.step(STEP | {"step": n})
    recorder.finish("completed", None, None)
    (log,) = tmp_path.glob("log-*.out")
    assert logs.read(log).steps.problems() == []
    assert logs.read(log).tokens == run.tokens_per_step


@pytest.mark.parametrize(
    ("steps", "window"), [(50, (11, 44)), (45, (11, 44)), (44, (22, 43)), (3, (1, 2)), (2, (1, 1))]
)
def test_window(steps, window):
    assert published_window(steps) == window


def test_the_window_of_a_restored_run_has_the_numbers_of_its_steps():
    steps = [{**STEP, "step": n, "step_time_s": float(n)} for n in range(20, 24)]
    made = summary.summary(RUN, steps, None, [{"step": 20}])["summary"]
    assert made["window"] == [22, 23]
    assert (made["step_time_s"]["mean"], made["step_time_s"]["last"]) == (22.5, 23.0)
    later = [{**STEP, "step": n, "step_time_s": float(n)} for n in range(45, 50)]
    assert summary.summary(RUN, later, None, [{"step": 45}])["summary"]["window"] == [47, 49]


@pytest.mark.parametrize(("steps", "reasons"), [(50, 0), (20, 1)])
def test_a_run_that_is_too_short_is_not_comparable(steps, reasons, tmp_path, monkeypatch):
    devices = {"device": "NVIDIA H100 80GB HBM3", "platform": "gpu", "null": False, "devices": 8}
    monkeypatch.setattr(start_record, "hardware", lambda: devices)
    options = parse_arguments(["--config", "llama31_8b_bf16"])
    record = start_record.new_record(replace(RUN, steps=steps), tmp_path / "run.json", options, 0)
    assert record["comparable"] == (not reasons)
    assert len(record["not_comparable_because"]) == reasons


def test_spread():
    assert spread([4.0, 1.0, 2.0, 3.0]) == {
        "mean": 2.5,
        "std": pytest.approx(1.25**0.5),
        "median": 2.5,
        "p95": 4.0,
    }
    assert spread([float(n) for n in range(100)])["p95"] == 94.0


def test_throughput_gives_the_published_row():
    """8 GPUs, 12.27 s: 85459 tokens/s, 62.47 % (by a peak of 989.5), 135.43 days."""
    rates = throughput(RUN, 12.27, 989.5)
    assert rates["tokens_per_s"] == pytest.approx(85459, abs=1)
    assert rates["days_per_1t_tokens"] == pytest.approx(135.43, abs=0.01)
    assert 100 * rates["mfu"]["published"] == pytest.approx(62.47, rel=1e-3)
    assert 100 * rates["mfu"]["full"] == pytest.approx(62.55, rel=1e-3)
    assert 100 * rates["mfu"]["causal"] == pytest.approx(55.59, rel=1e-3)
    assert throughput(RUN, 12.27, None)["mfu"] == dict.fromkeys(rates["mfu"])


def test_a_run_that_fails_before_its_first_step_still_has_a_record(tmp_path, capsys):
    run = tiny_run()
    recorder = Recorder(tmp_path, run, record_of(run))
    recorder.finish("failed", "out of memory", None)
    written = json.loads((tmp_path / "run.json").read_text())
    assert (written["status"], written["reason"]) == ("failed", "out of memory")
    assert "failed: llama31_8b_bf16, row smoke (smoke): out of memory" in capsys.readouterr().out


@pytest.mark.parametrize("dropless", [True, False])
def test_what_dropless_experts_drop_is_said_and_not_comparable(dropless, tmp_path, capsys):
    """A share of 2^-16 in two of the four steps of the window. 512 sequences of 32 tokens go to 2
    experts in each of 2 layers, and in each of 2 applications of the block behind them."""
    capacity = () if dropless else ("model.experts={capacity_factor: 1.0, capacity_tokens: 8}",)
    prediction = "model.prediction={pattern: '*E', depth: 2, loss: 0.3}"
    run = tiny_run(
        prediction, "batch.global_batch=512", *capacity, family="qwen3_30b_a3b_bf16", steps=8
    )
    assert summary.assignments(run) == 512 * 32 * 2 * (2 + 2) == 2**17
    for shares, count in (([0.0] * 8, 0), ([0.5, *[0.0] * 4, 2**-16, 2**-16, 0.0], 4)):
        recorder = Recorder(tmp_path, run, record_of(run) | {"not_comparable_because": []})
        for step, share in enumerate(shares):
            recorder.step(STEP | {"step": step, "tokens_dropped": share})
        recorder.finish("completed", None, None)
        written, out = json.loads((tmp_path / "run.json").read_text()), capsys.readouterr().out
        assert written["summary"]["tokens_dropped"] == count
        reason = f"dropless experts dropped {count} assignments in steps 4 to 7"
        drops = bool(count and dropless)
        assert [why.startswith(reason) for why in written["not_comparable_because"]] == drops * [
            True
        ]
        assert written["comparable"] == (not drops)
        assert (f"verdict     not comparable: {reason}" in out) == drops
        kind = "dropless" if dropless else "by capacity"
        said = f"  dropped     {count} assignments to experts ({kind})\n"
        assert (said in out) == (count > 0)


FULL_DISK = Path(__file__).with_name("full_disk.py")


def on_full_disk(tmp_path, moment):
    """(standard error, what was left) of a recorder whose disk is full at a moment."""
    command = ["env", f"PYTHONPATH={ROOT}", sys.executable, FULL_DISK, tmp_path / "disk", moment]
    status, out, err, left = run_on_disk(tmp_path, 1024, command, ROOT)
    assert status == 0, err
    assert "failed: llama31_8b_bf16, row smoke (smoke): full" in out
    return err, left


@needs_small_disk
def test_a_step_that_cannot_be_recorded_fails_the_run_and_the_record_says_so(tmp_path):
    err, left = on_full_disk(tmp_path, "step")
    folder = tmp_path / "disk"
    assert err == f"step: the record in {folder} cannot be written: No space left on device\n"
    record = json.loads((left / "run.json").read_text())
    assert (record["status"], record["reason"]) == ("failed", "full")
    lines = (left / "steps.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    assert steps == list(range(len(steps)))
    assert 2 <= len(steps) < 50
    assert record["summary"]["window"][1] in (len(steps) - 1, len(steps))


@needs_small_disk
def test_a_record_that_cannot_be_written_leaves_the_one_before(tmp_path):
    err, left = on_full_disk(tmp_path, "finish")
    folder = tmp_path / "disk"
    assert err == f"finish: the record in {folder} cannot be written: No space left on device\n"
    assert "status" not in json.loads((left / "run.json").read_text())


def test_steps_are_not_lost_while_a_resumed_run_keeps_them(tmp_path, monkeypatch):
    """Whatever happens while they are written again: a kill leaves the file before."""
    before = [json.dumps(STEP | {"step": step}) + "\n" for step in range(5)]
    path, run = tmp_path / "steps.jsonl", tiny_run()
    path.write_text("".join(before))

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            Recorder(tmp_path, run, record_of(run), start=3)
    assert path.read_text() == "".join(before)
    recorder = Recorder(tmp_path, run, record_of(run), start=3)
    recorder.finish("failed", "killed again", None)
    assert path.read_text() == "".join(before[:3])


def test_what_a_run_learns_beside_its_steps_is_written_within_a_minute(tmp_path, monkeypatch):
    """As when a save is complete, of which Orbax's thread tells: a kill would lose it."""
    now, run = 0.0, tiny_run()
    clock = SimpleNamespace(monotonic=lambda: now, strftime=time.strftime)
    monkeypatch.setattr(records, "time", clock)
    recorder, saved = Recorder(tmp_path, run, record_of(run)), [{"step": 10}]
    recorder.add(checkpoints=saved)
    known = []
    for step, now in enumerate((1.0, 59.0, 61.0, 62.0, 120.0, 122.0)):
        saved[0] = {"step": 10, "save_s": now}
        recorder.step(STEP | {"step": step})
        known.append(
            json.loads((tmp_path / "run.json").read_text())["checkpoints"][0].get("save_s")
        )
    recorder.finish("failed", "killed", None)
    assert known == [None, None, 61.0, 61.0, 61.0, 122.0]


def test_a_signal_while_the_record_is_written_is_its_end(tmp_path, monkeypatch):
    """The main thread writes what it has compiled while another one ends the run."""
    recorder = Recorder(tmp_path, run := tiny_run(), record_of(run))
    begun, write, inside, together = threading.Event(), ReservedJson.write, [], []

    def slow(self, content):
        inside.append(content)
        begun.set()
        time.sleep(0.2)
        together.append(len(inside))
        write(self, content)
        inside.pop()

    monkeypatch.setattr(ReservedJson, "write", slow)
    with ThreadPoolExecutor() as pool:
        compiled = pool.submit(recorder.add, compile_s=1.0)
        begun.wait()
        pool.submit(recorder.finish, "interrupted", "SIGTERM", None).result()
        compiled.result()
    written = json.loads((tmp_path / "run.json").read_text())
    assert (written["status"], written["compile_s"]) == ("interrupted", 1.0)
    assert together == [1, 1]


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_run_that_cannot_be_recorded_is_one_line(at, tmp_path, monkeypatch, capsys):
    """At the first record, after compiling, and at the end."""
    calls, write = [], ReservedJson.write

    def fail(self, content):
        calls.append(content)
        if len(calls) > at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, content)

    monkeypatch.setattr(ReservedJson, "write", fail)
    tiny = ("layers=1", "embed=64", "mlp.ffn=64", "vocabulary=128")
    arguments = [part for text in tiny for part in ("--set", f"model.{text}")]
    arguments += ["--set", "batch.sequence_length=32", "--steps", "3", "--output", str(tmp_path)]
    assert command.main(["--config", "llama31_8b_bf16", *arguments]) == STATUS["storage"]
    message = f"error: the record in {tmp_path} cannot be written: No space left on device\n"
    assert capsys.readouterr().err == message
