"""Plans that lie beside runs: what `python -m jaxbench.plan --dump` left for the same program."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from jaxbench import hardware
from jaxbench.report.found import Plan, figure

PLAN = "plan.json"
PROGRAM = ("model", "parallelism", "precision", "batch", "execution")
"""Sections of a resolved recipe that decide what is compiled."""

LABELS = {
    "compute": "products and attention", "memory": "other kernels",
    "exposed": "exposed collectives", "products": "matrix products",
    "slowed": "slowed by collectives",
}  # fmt: skip
"""Of a plan's parts, for people; others are called by their own names."""


def beside(folder: Path, recipe: dict[str, Any], device: str) -> Plan | None:
    """The plan of the same program on the same kind of GPU, in a run's folder or beside it; None
    where there is none. `recipe` is that of the record."""
    gpu = hardware.identify(device)
    for path, values in (*_plans(folder), *_plans(folder.parent)):
        settings = values.get("settings")
        if (
            gpu is not None
            and values.get("target") == gpu.name.lower()
            and values.get("gpus") == recipe["gpus"]
            and isinstance(settings, dict)
            and all(settings.get(part) == recipe.get(part) for part in PROGRAM)
        ):
            return _plan(path, values)
    return None


@cache
def _plans(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    return [*_found(folder)]


def _found(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in (folder / PLAN, *sorted(folder.glob(f"*/{PLAN}"))):
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(values, dict):
            yield path, values


def _plan(path: Path, values: dict[str, Any]) -> Plan | None:
    """The forecast of a plan, or its bound; None where it has neither."""
    forecast = values.get("forecast")
    if isinstance(forecast, dict):
        kind, total, parts = "forecast", forecast.get("step_s"), forecast.get("parts_s")
    else:
        kind, total, parts = "bound", values.get("bound_step_s"), values.get("bound_parts_s")
    if (step_s := _number(total)) is None or not isinstance(parts, dict):
        return None
    sizes = values.get("bytes_per_device")
    return Plan(
        path=path,
        kind=kind,
        step_s=step_s,
        parts={
            LABELS.get(name, str(name).replace("_", " ")): seconds
            for name, value in parts.items()
            if (seconds := _number(value)) is not None
        },
        peak_memory=_number(sizes.get("peak")) if isinstance(sizes, dict) else None,
    )


def _number(value: Any) -> float | None:
    try:
        return figure(value)
    except TypeError:
        return None
