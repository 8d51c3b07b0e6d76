"""Reads result folders of `python -m jaxbench.train`: run.json and steps.jsonl."""

import json
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from jaxbench.base import hardware
from jaxbench.base.files import RECORDS, recorded
from jaxbench.base.quantity import quantity
from jaxbench.base.untrusted import printable, read_json
from jaxbench.recipe.published import titled
from jaxbench.report.logs import lines
from jaxbench.report.runs import RunData, Steps, Window
from jaxbench.results import plans, profiled
from jaxbench.results.window import first_of_program

STEPS, ENVIRONMENT = "steps.jsonl", "environment.json"

DONE = ("completed", "running", "interrupted")
"""States of a record that are not failures."""

MOST_STEPS = 10**9
"""Steps of a run have smaller numbers."""

MALFORMED = (
    OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
"""Exceptions that reading a malformed record can raise."""


def is_run(folder: Path) -> bool:
    """True for a folder that holds a run, complete or not."""
    return any((folder / name).is_file() for name in (*RECORDS, STEPS))


def read(folder: Path) -> RunData:
    """The run in a folder. If its record cannot be read, it is a failed run, with the reason."""
    try:
        record = recorded(folder)
        run = _run(folder, record)
    except MALFORMED as error:
        reason = f"its record cannot be read: {' '.join(str(error).split())}"
        return unreadable(folder, reason)
    try:
        record["environment"] = read_json(folder / ENVIRONMENT)
    except MALFORMED:
        record["environment"] = None
    run.profiles = profiled.read(folder)
    run.plan = plans.find_plan(folder, record["recipe"], record["hardware"]["device"])
    try:
        for line in lines(folder / STEPS):
            _add_step(run, line)
    except FileNotFoundError:
        pass  # no step yet: an incomplete run
    except OSError as error:
        run.failed = f"{STEPS} cannot be read: {error.strerror}"
    return run


def unreadable(path: Path, reason: str) -> RunData:
    """A run of which we know only why it cannot be read."""
    started, name = file_time(path), printable(path.name)
    return RunData(path=path, recipe=name, failed=reason, started=started, dated="file time")


def _run(folder: Path, record: dict[str, Any]) -> RunData:
    recipe, status, device = record["recipe"], record["status"], record["hardware"]["device"]
    batch, dtype = recipe["batch"], str(recipe["precision"]["dtype"])
    window, counted_flops = _summarized(record.get("summary"))
    published, positive = record["published"], partial(quantity, zero=False)
    if published is not None:
        published["step_time_s"] = positive(published["step_time_s"])
        published["errata"] = [str(code) for code in published.get("errata") or []]
    gpu = hardware.identify(device)
    begins = [int(step) for step in (record.get("first_step", 0), *record.get("resumed_at", ()))]
    program = first_of_program(record.get("starts", [{}]))
    if program >= len(begins):
        raise ValueError(f"resumed_at has {len(begins) - 1} steps, and starts has more")
    limit = record["hardware"].get("device_memory_bytes") or (gpu.memory if gpu else 0)
    started: datetime | None
    if dated := "started" in record:
        started = datetime.fromisoformat(record["started"]).astimezone(UTC)
    else:  # of a job that has not begun
        started = file_time(next(p for name in RECORDS if (p := folder / name).is_file()))
    return RunData(
        path=folder,
        recipe=f"{recipe['recipe']}:{recipe['row']}",
        gpus=int(positive(recipe["gpus"])),
        dtype=dtype,
        label=str(record["label"]),
        steps=Steps(expected=int(recipe["steps"]), first=int(record.get("first_step", 0))),
        model=titled(f"{recipe['model']['family']} {recipe['model']['size']}", gpu),
        tokens=int(positive(batch["global_batch"]) * positive(batch["sequence_length"])),
        flops=counted_flops,
        peak_tflops=hardware.peak_tflops(device, dtype),
        published=published,
        failed=None if status in DONE else str(record["reason"] or status),
        interrupted=str(record["reason"] or status) if status == "interrupted" else None,
        unfinished=["it still runs, or was killed"] if status == "running" else [],
        not_comparable=[str(reason) for reason in record["not_comparable_because"]],
        memory_limit=quantity(limit) or None,
        started=started,
        dated="record" if dated else "file time",
        record=record,
        begins=begins,
        program=program,
        recorded_window=window,
    )


def file_time(path: Path) -> datetime | None:
    """The date of a run whose record has none. None if the file system does not tell it."""
    try:
        return datetime.fromtimestamp(path.lstat().st_mtime, UTC)
    except (OSError, OverflowError, ValueError):
        return None


def _summarized(summary: Any) -> tuple[Window | None, dict[str, float]]:
    """The window of a summary, and the FLOPs of one GPU and step by convention, from its rates."""
    if not summary:
        return None, {}
    first, last = summary["window"]
    mean, rates = quantity(summary["step_time_s"]["mean"]), summary["tflops_per_gpu"]
    counts = {name: quantity(rate) * mean * 1e12 for name, rate in rates.items()}
    return (int(first), int(last)), counts


def _add_step(run: RunData, line: str) -> None:
    """Adds a line of steps.jsonl. Skips a line that was cut off while it was written, and a line
    with an impossible number."""
    try:
        step = json.loads(line)
        number, seconds = int(step["step"]), float(step["step_time_s"])
        if not 0 <= number < MOST_STEPS:
            return
        run.steps.add(number, seconds, float(step["loss"]))
        if not run.record.get("summary"):  # the last step ran the recorded program
            run.flops["full"] = quantity(step["tflops_per_gpu"]) * seconds * 1e12
        run.peak_memory = max(run.peak_memory or 0.0, quantity(step["peak_memory_bytes"]))
        if "host_s" in step:
            host = quantity(step["host_s"]), quantity(step.get("compiled_s", 0.0))
            run.host_s[number] = host
        if "layer_load_max" in step:
            loads = [quantity(load, zero=False) for load in step["layer_load_max"]]
            if loads:
                run.layer_loads[number] = loads
    except MALFORMED:
        return
