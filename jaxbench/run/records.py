"""Records of a run: run.json, steps.jsonl, and a log in the published line formats."""

import json
import sys
import threading
import time
from pathlib import Path
from shlex import quote
from typing import Any

from jaxbench.base.errors import RecipeError, RunFailed
from jaxbench.base.files import Lines, ReservedJson, check_schema, write_whole
from jaxbench.base.hardware import NULL, peak_tflops
from jaxbench.recipe.settings import Run
from jaxbench.results.throughput import energy, throughput
from jaxbench.results.verdict import SMOKE
from jaxbench.run import sampling, summary

RANK_BYTES = 2**10
"""Disk space reserved for what a record says of a process: more than it needs."""

REWRITE_S = 60.0
"""Seconds after which we write run.json again during training."""


def read(path: Path) -> dict[str, Any]:
    """The content of a run.json. Raises RecipeError if the file is not a whole record."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        record |= {key: record[key] for key in ("status", "recipe", "starts")}
        check_schema(record)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RecipeError(
            f"{path} is not a complete record: {error}; start a new run from its checkpoint: "
            f"--restore {path.parent} --output NEW"
        ) from error
    return record


def command_line() -> str:
    """The program as a shell finds it even if the virtual environment is not active."""
    program = Path(sys.executable).with_name("jaxbench")
    return quote(str(program)) if program.exists() else f"{quote(sys.executable)} -m jaxbench"


def steps_before(start: int, path: Path) -> list[dict[str, Any]]:
    """The recorded steps before `start`. A killed run may have recorded later steps, which will be
    repeated."""
    steps = []
    text = path.read_text(errors="replace") if start and path.exists() else ""
    for line in text.splitlines():
        try:
            step = json.loads(line)
            if step["step"] < start:
                steps.append(step)
        except (ValueError, LookupError, TypeError):
            break  # cut off when the process was killed or the disk was full
    return steps


class Recorder:
    """Writes the records of one run into its folder and reports to the terminal. Without a folder,
    as on ranks other than 0, the record stays in memory.

    Every step goes to `steps.jsonl`, in both published formats to `log-<recipe>_<row>.out`, and in
    a short line to the terminal. A run that is resumed at step `start` keeps the recorded steps
    before it.
    """

    def __init__(self, folder: Path | None, run: Run, record: dict[str, Any], start: int = 0):
        self.folder, self.run, self.record = folder, run, record
        self.steps: list[dict[str, Any]] = []
        self._log_error: OSError | None = None
        self._jsonl: Lines | None = None
        # A signal before the first step calls `finish` from another thread.
        self._writing = threading.Lock()
        if folder is None:
            return
        self._json = ReservedJson(folder / "run.json", RANK_BYTES * record["hardware"]["processes"])
        self.begin(start, {})
        self._log = Lines(folder / f"log-{run.recipe}_{run.row}.out")
        if run.label == "smoke":
            self.say(SMOKE)
        if record["hardware"]["null"]:
            self.say(NULL)

    def begin(self, start: int, entries: dict[str, Any]) -> None:
        """Keeps the recorded steps before `start`, and adds entries to run.json."""
        if self.folder is None:
            self.add(**entries)
            return
        if self._jsonl is not None:
            self._jsonl.close()
        path = self.folder / "steps.jsonl"
        self.steps = steps_before(start, path)
        write_whole(path, "".join(json.dumps(step) + "\n" for step in self.steps))
        self.add(**entries)
        self._jsonl = Lines(path)

    def add(self, **entries: Any) -> None:
        """Adds entries to run.json. Raises RunFailed if it cannot be written."""
        with self._writing:
            self.record |= entries
            if self.folder is None:
                return
            try:
                self._json.write(self.record)
            except OSError as error:
                raise self._unwritable(error) from error
            self._written_at = time.monotonic()

    def _unwritable(self, error: OSError) -> RunFailed:
        return RunFailed(
            f"the record in {self.folder} cannot be written: {error.strerror}", "storage"
        )

    def say(self, line: str) -> None:
        """Prints a line to the log and the terminal. If the log cannot be written, the next step
        raises RunFailed."""
        if self.folder is None:
            return
        self._to_log(line)
        print(line, flush=True)

    def phase(self, name: str, detail: str) -> None:
        """Prints the time at which a phase of the run begins."""
        self.say(f"{time.strftime('%H:%M:%S')} {name}: {detail}")

    def _to_log(self, line: str) -> None:
        try:
            self._log.write(line)
        except OSError as error:
            self._log_error = error

    def step(self, values: dict[str, Any]) -> None:
        """Records a step with the figures of `run_steps`. Raises RunFailed if it cannot be
        written."""
        if self.folder is None:
            return
        run = self.run
        rates = throughput(run, values["step_time_s"], None)
        line = {
            **values,
            "start": len(self.record["starts"]) - 1,
            "tokens_per_s_per_gpu": rates["tokens_per_s_per_gpu"],
            "tflops_per_gpu": rates["tflops_per_gpu"]["full"],
            "label": self.record["label"],
        }
        self.steps.append(line)
        assert self._jsonl is not None
        try:
            self._jsonl.write(json.dumps(line))
        except OSError as error:
            raise self._unwritable(error) from error
        for text in (summary.maxtext_line(run, line), summary.nemo_line(run, line)):
            self._to_log(text)
        print(summary.short_line(run, line), flush=True)
        if self._log_error is not None:
            raise self._unwritable(self._log_error)
        if time.monotonic() - self._written_at > REWRITE_S:
            self.add()

    def summary(self) -> dict[str, Any]:
        """The record's `summary` and `loss` of the steps until now."""
        device = self.record["hardware"]["device"]
        peak = peak_tflops(device, self.run.precision.dtype)
        figures = summary.summary(self.run, self.steps, peak, self.record["starts"])
        watts = sampling.watts(self.record.get("ranks", []), self.run.gpus)
        if watts and "summary" in figures:
            figures["summary"] |= energy(watts, figures["summary"]["tokens_per_s"])
        return figures

    def finish(self, status: str, reason: str | None, cause: str | None = None) -> None:
        """Completes run.json and prints the result. Without a folder, prints the reason of a
        failure. If run.json cannot be written, raises RunFailed after printing."""
        if self.folder is None:
            if cause:
                print(f"error: {reason}", file=sys.stderr)
            return
        figures = self.summary()
        reasons = [
            *self.record["not_comparable_because"],
            *summary.dropped(self.run, figures),
            *summary.slow_records(summary.counted_steps(self.steps, self.record["starts"])),
        ]
        figures |= {"comparable": not reasons, "not_comparable_because": reasons}
        try:
            self.add(status=status, reason=reason, cause=cause, **figures)
        finally:
            for line in (
                *summary.lines(self.record, self.steps),
                f"record: {self.folder / 'run.json'}",
                f"report: {command_line()} report {quote(str(self.folder))}",
                "page:   add --format html --output report.html",
            ):
                self.say(line)
            for file in (self._json, self._log, self._jsonl):
                if file is not None:
                    file.close()
