"""Our own results: a folder with run.json and steps.jsonl."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from jaxbench import hardware
from jaxbench.recipe.published import titled
from jaxbench.report import plans
from jaxbench.report.found import Found, Steps, figure
from jaxbench.report.lines import lines

RECORD, STEPS, ENVIRONMENT = "run.json", "steps.jsonl", "environment.json"

BROKEN = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What reading a file that is no record of ours can raise."""

T = TypeVar("T")


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, whole or not."""
    return any((folder / name).is_file() for name in (RECORD, STEPS))


def read(folder: Path) -> Found:
    """The run in a folder. A record that cannot be read is a failed run, with the reason."""
    try:
        record = json.loads((folder / RECORD).read_text())
        found = _found(folder, record)
    except BROKEN as error:
        reason = f"{RECORD} cannot be read: {' '.join(str(error).split())}"
        return Found(
            path=folder, source="jaxbench", recipe=folder.name, gpus=None, dtype=None, label="",
            steps=Steps(), failed=reason,
        )  # fmt: skip
    found.record["environment"] = _environment(folder / ENVIRONMENT)
    found.plan = plans.beside(folder, found.record["recipe"], found.record["hardware"]["device"])
    if (folder / STEPS).is_file():
        for line in lines(folder / STEPS):
            _add(found, line)
    return found


def _typed(values: dict[str, Any], name: str, kind: type[T]) -> T:
    value = values[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}")
    return value


def _positive(value: Any) -> float:
    if not figure(value):
        raise TypeError(f"{value} is no figure")
    return figure(value)


def _found(folder: Path, record: dict[str, Any]) -> Found:
    recipe, status = _typed(record, "recipe", dict), _typed(record, "status", str)
    batch = _typed(recipe, "batch", dict)
    dtype = _typed(_typed(recipe, "precision", dict), "dtype", str)
    reason = record["reason"]
    failed = str(reason or status) if status not in ("completed", "running") else None
    published = record["published"]
    if published is not None:
        published["step_time_s"] = _positive(published["step_time_s"])
        published["errata"] = [str(code) for code in published.get("errata") or []]
    devices = _typed(record, "hardware", dict)
    device = _typed(devices, "device", str)
    gpu, limit = hardware.identify(device), devices.get("device_memory_bytes")
    model = recipe["model"]
    started, dated = _started(folder, record)
    return Found(
        path=folder,
        source="jaxbench",
        recipe=f"{recipe['recipe']}:{recipe['row']}",
        gpus=int(_positive(recipe["gpus"])),
        dtype=dtype,
        label=_typed(record, "label", str),
        steps=Steps(expected=_typed(recipe, "steps", int)),
        model=titled(f"{model['family']} {model['size']}", gpu),
        tokens=int(_positive(batch["global_batch"]) * _positive(batch["sequence_length"])),
        flops=_flops(record.get("summary")),
        peak_tflops=hardware.peak_tflops(device, dtype),
        published=published,
        failed=failed,
        unfinished=["it still runs, or was killed"] if status == "running" else [],
        not_comparable=[str(each) for each in _typed(record, "not_comparable_because", list)],
        memory_limit=figure(limit or (gpu.memory if gpu else 0)) or None,
        started=started,
        dated=dated,
        record=record,
    )


def _started(folder: Path, record: dict[str, Any]) -> tuple[datetime, str]:
    """When a run began: by its record, which older ones do not say, or by the file's time."""
    if "started" in record:
        return datetime.fromisoformat(record["started"]).astimezone(UTC), "record"
    return datetime.fromtimestamp((folder / RECORD).stat().st_mtime, UTC), "file time"


def _flops(summary: dict[str, Any] | None) -> dict[str, float]:
    """Of one GPU and step by convention, from the rates of a summary; none without one."""
    if not summary:
        return {}
    mean, rates = figure(summary["step_time_s"]["mean"]), summary["tflops_per_gpu"]
    return {name: figure(rate) * mean * 1e12 for name, rate in rates.items()}


def _environment(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except BROKEN:
        return None


def _add(found: Found, line: str) -> None:
    """A line of steps.jsonl; one that was cut off while it was written is no step."""
    try:
        step = json.loads(line)
        seconds = float(step["step_time_s"])
        found.steps.add(int(step["step"]), seconds, float(step["loss"]))
        found.flops.setdefault("full", figure(step["tflops_per_gpu"]) * seconds * 1e12)
        found.peak_memory = max(found.peak_memory or 0.0, figure(step["peak_memory_bytes"]))
    except BROKEN:
        return
