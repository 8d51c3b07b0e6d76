"""Our own results: a folder with run.json and steps.jsonl."""

import json
from pathlib import Path
from typing import Any

from jaxbench import hardware
from jaxbench.report.found import Found, Steps

RECORD, STEPS, ENVIRONMENT = "run.json", "steps.jsonl", "environment.json"


def read(folder: Path) -> Found:
    """The run in a folder. A record that cannot be read is a failed run, with the reason."""
    try:
        record = json.loads((folder / RECORD).read_text())
        found = _found(folder, record)
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = f"{RECORD} cannot be read: {' '.join(str(error).split())}"
        return Found(
            path=folder, source="jaxbench", recipe=folder.name, gpus=None, dtype=None, label="",
            steps=Steps(), failed=reason,
        )  # fmt: skip
    found.record["environment"] = _environment(folder / ENVIRONMENT)
    steps = folder / STEPS
    if steps.exists():
        with steps.open(errors="replace") as lines:
            for line in lines:
                _add(found, line)
    return found


def _found(folder: Path, record: dict[str, Any]) -> Found:
    recipe, status = record["recipe"], record["status"]
    batch, dtype = recipe["batch"], recipe["precision"]["dtype"]
    failed = record["reason"] or status if status not in ("completed", "running") else None
    summary = record.get("summary") or {}
    mean = (summary.get("step_time_s") or {}).get("mean", 0.0)
    rates = summary.get("tflops_per_gpu") or {}
    peak = hardware.peak_tflops(record["hardware"]["device"], dtype)
    return Found(
        path=folder,
        source="jaxbench",
        recipe=f"{recipe['recipe']}:{recipe['row']}",
        gpus=recipe["gpus"],
        dtype=dtype,
        label=record["label"],
        steps=Steps(expected=recipe["steps"]),
        tokens=batch["global_batch"] * batch["sequence_length"],
        flops={name: rate * mean * 1e12 for name, rate in rates.items()},
        peak_tflops=peak,
        published=record["published"],
        failed=failed,
        unfinished=["it still runs, or was killed"] if status == "running" else [],
        not_comparable=record["not_comparable_because"],
        record=record,
    )


def _environment(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _add(found: Found, line: str) -> None:
    """A line of steps.jsonl; one that was cut off while it was written is no step."""
    try:
        step = json.loads(line)
        found.steps.add(int(step["step"]), float(step["step_time_s"]), float(step["loss"]))
    except (ValueError, LookupError, TypeError):
        return
    if "full" not in found.flops:
        found.flops["full"] = step.get("tflops_per_gpu", 0.0) * step["step_time_s"] * 1e12
