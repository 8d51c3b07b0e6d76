"""What a run leaves behind: run.json, steps.jsonl, the log with its published line formats, and the
summary."""

import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from jaxbench import flops, published
from jaxbench.config import Run

PUBLISHED_WINDOW = (11, 44)
"""First and last step (0-based) of the published parser's average; older documents quote the last
step instead."""

WARNING = (
    "SMOKE RUN: tiny dims on this machine's CPU. Not a benchmark result; compare it with nothing."
)


def window(steps: int) -> tuple[int, int]:
    """First and last step of the summary: the published window, or the last half of a run too short
    for it."""
    first, last = PUBLISHED_WINDOW
    return (first, last) if steps > last else (steps // 2, steps - 1)


def spread(samples: list[float]) -> dict[str, float]:
    """Mean, population standard deviation, median and 95th percentile (nearest rank)."""
    ordered = sorted(samples)
    return {
        "mean": statistics.fmean(ordered),
        "std": statistics.pstdev(ordered),
        "median": statistics.median(ordered),
        "p95": ordered[math.ceil(0.95 * len(ordered)) - 1],
    }


def throughput(run: Run, step_time_s: float, peak: float | None) -> dict[str, Any]:
    """Rates that follow from a step time; FLOP rates and MFU by convention, per GPU, against a peak
    in TFLOP/s."""
    tokens_per_s = run.tokens_per_step / step_time_s
    sequences_per_gpu = run.batch.global_batch / run.gpus / step_time_s
    rates = {c: sequences_per_gpu * model_flops(run, c) for c in flops.CONVENTIONS}
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": tokens_per_s / run.gpus,
        "tflops_per_gpu": {c: rate / 1e12 for c, rate in rates.items()},
        "mfu": {c: flops.mfu(rate, peak) for c, rate in rates.items()},
        "days_per_1t_tokens": flops.days_per_1t_tokens(tokens_per_s),
    }


def model_flops(run: Run, convention: str) -> float:
    """Training FLOPs of one sequence of the run under a convention of `flops.CONVENTIONS`."""
    if convention == "published":
        return published.source_flops(run.model, run.batch.sequence_length)
    return flops.model_flops(run.model, run.batch.sequence_length, convention)["total"]


def write_json(path: Path, content: dict) -> None:
    """Replaces a JSON file whole: a reader sees the old or the new one, never half of one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)


class StepClock:
    """Step times from one completed step to the next, taken while the next step is already queued
    on the device."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def tick(self) -> float:
        """Seconds since the last tick."""
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


def steps_before(start: int, path: Path) -> list[dict[str, Any]]:
    """The recorded steps up to `start`; those that a killed run recorded beyond are to be
    repeated."""
    steps = []
    for line in path.read_text().splitlines() if start and path.exists() else ():
        if not line.endswith("}"):
            break  # cut off by the end of the process or of the disk
        step = json.loads(line)
        if step["step"] < start:
            steps.append(step)
    return steps


class Silent:
    """The recorder of every process but the first: does nothing."""

    def say(self, line: str) -> None: ...
    def start_steps(self) -> None: ...
    def step(self, values: dict[str, Any]) -> None: ...
    def finish(self, status: str, reason: str | None, peak: float | None) -> None: ...


class Recorder:
    """Writes the records of one run into its folder and reports to the terminal.

    Every step goes to `steps.jsonl` and, in both published formats, to `log-<recipe>_<row>.out`. On
    a terminal a progress bar shows the last step; elsewhere the log lines are printed too. A run
    that is resumed at step `start` keeps what is recorded of the steps before.
    """

    def __init__(self, folder: Path, run: Run, record: dict[str, Any], start: int = 0):
        self.folder, self.run, self.record = folder, run, record
        self.steps = steps_before(start, folder / "steps.jsonl")
        write_json(folder / "run.json", record)
        self._log: TextIO = (folder / f"log-{run.recipe}_{run.row}.out").open("a", buffering=1)
        self._jsonl: TextIO = (folder / "steps.jsonl").open("w", buffering=1)
        self._jsonl.writelines(json.dumps(step) + "\n" for step in self.steps)
        self._bar: Any = None
        if run.label == "smoke":
            self.say(WARNING)

    def say(self, line: str) -> None:
        """A line for the log and the terminal."""
        self._log.write(line + "\n")
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, flush=True)

    def start_steps(self) -> None:
        """Opens the progress bar when the output is a terminal."""
        if sys.stdout.isatty():
            from rich.progress import MofNCompleteColumn, Progress

            self._bar = Progress(MofNCompleteColumn(), *Progress.get_default_columns())
            self._bar.start()
            self._bar.add_task("training", total=self.run.steps, completed=len(self.steps))

    def step(self, values: dict[str, Any]) -> None:
        """Records a completed step: number, loss, gradient norm, learning rate, time, memory."""
        run = self.run
        rates = throughput(run, values["step_time_s"], None)
        line = {
            **values,
            "tokens_per_s_per_gpu": rates["tokens_per_s_per_gpu"],
            "tflops_per_gpu": rates["tflops_per_gpu"]["full"],
            "label": run.label,
        }
        self.steps.append(line)
        self._jsonl.write(json.dumps(line) + "\n")
        lines = maxtext_line(run, line), nemo_line(run, line)
        if self._bar is None:
            for text in lines:
                self.say(text)
        else:
            self._log.write("\n".join(lines) + "\n")
            status = f"{line['step_time_s']:.3f} s per step, loss {line['loss']:.3f}"
            self._bar.update(self._bar.task_ids[0], advance=1, description=status)

    def finish(self, status: str, reason: str | None, peak: float | None) -> None:
        """Completes run.json with the steps there are, and prints the result."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self.record |= {"status": status, "reason": reason}
        if len(self.steps) > 1:
            self.record |= self._summary(peak)
        write_json(self.folder / "run.json", self.record)
        for line in summary_lines(self.record):
            self.say(line)
        self.say(f"record: {self.folder / 'run.json'}")
        self._log.close()
        self._jsonl.close()

    def _summary(self, peak: float | None) -> dict[str, Any]:
        first, last = window(len(self.steps))
        times = [step["step_time_s"] for step in self.steps]
        statistics = spread(times[first : last + 1])
        losses = [step["loss"] for step in self.steps]
        summary = {
            "window": [first, last],
            "step_time_s": {**statistics, "last": times[-1]},
            **throughput(self.run, statistics["mean"], peak),
            "peak_memory_bytes": max(step["peak_memory_bytes"] for step in self.steps),
        }
        loss = {
            "first": losses[0],
            "last": losses[-1],
            "ln_vocabulary": math.log(self.run.model.vocabulary),
        }
        return {"summary": summary, "loss": loss}


def maxtext_line(run: Run, step: dict[str, Any]) -> str:
    """The step in MaxText's format, which the Llama 2 document greps for."""
    return (
        f"completed step: {step['step']}, seconds: {step['step_time_s']:.3f}, "
        f"TFLOP/s/device: {step['tflops_per_gpu']:.3f}, "
        f"Tokens/s/device: {step['tokens_per_s_per_gpu']:.3f}, "
        f"total_weights: {run.tokens_per_step}, loss: {step['loss']:.3f}"
    )


def nemo_line(run: Run, step: dict[str, Any]) -> str:
    """The step in NeMo's format, which the Llama 3.1 and later documents and their parser read."""
    n, batch = step["step"], run.batch.global_batch
    return (
        f"Training epoch 0, iteration {n}/{run.steps - 1} | lr: {step['learning_rate']:.4g} | "
        f"global_batch_size: {batch} | global_step: {n} | "
        f"peak_memory_usage: {step['peak_memory_bytes']} | "
        f"memory_allocated: {step['memory_bytes']} | reduced_train_loss: {step['loss']:.4g} | "
        f"train_step_timing in s: {step['step_time_s']:.4g} | "
        f"TFLOPS_per_GPU: {step['tflops_per_gpu']:.4g} | consumed_samples: {(n + 1) * batch}"
    )


def summary_lines(record: dict[str, Any]) -> list[str]:
    """The record's result in a few lines for people."""
    recipe = record["recipe"]
    lines = [f"{record['status']}: {recipe['recipe']}, row {recipe['row']} ({record['label']})"]
    if record["reason"]:
        lines[0] += f": {record['reason']}"
    if s := record.get("summary"):
        t, loss = s["step_time_s"], record["loss"]
        lines += [
            f"  step time   {t['mean']:.4g} s, mean of steps {s['window'][0]} to {s['window'][1]} "
            f"(std {t['std']:.2g}, median {t['median']:.4g}, p95 {t['p95']:.4g}, "
            f"last step {t['last']:.4g})",
            f"  throughput  {s['tokens_per_s_per_gpu']:.1f} tokens/s per device, "
            f"{s['tokens_per_s']:.1f} in all",
            *(_rate_line(s, convention) for convention in flops.CONVENTIONS),
            f"  loss        {loss['first']:.4f} first, {loss['last']:.4f} last "
            f"(ln vocabulary is {loss['ln_vocabulary']:.4f})",
        ]
        if pgle := record.get("pgle"):
            lines.append(f"  PGLE        {pgle['step_time_before_s']:.4g} s before")
    if row := record["published"]:
        lines.append(
            f"  published   {row['step_time_s']} s, {row['mfu_pct']} % MFU, {row['gpus']} H100"
        )
    if not record["comparable"]:
        reasons = "; ".join(record["not_comparable_because"])
        lines.append(f"  not comparable with published rows: {reasons}")
    return lines


def _rate_line(summary: dict[str, Any], convention: str) -> str:
    rate, mfu = summary["tflops_per_gpu"][convention], summary["mfu"][convention]
    percent = "" if mfu is None else f", MFU {100 * mfu:.2f} %"
    return f"  FLOPs       {rate:.4g} TFLOP/s per device{percent} ({convention})"
