"""Finds the plan of a program that ran, among the plan.json files of `jaxbench plan --dump`."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jaxbench.base import hardware
from jaxbench.base.quantity import figure
from jaxbench.base.untrusted import read_json

PLAN = "plan.json"
PROGRAM = ("model", "parallelism", "precision", "batch", "execution")
"""The sections of a resolved recipe that decide what is compiled."""

NAMES = {
    "compute": "matmuls and attention", "memory": "other kernels", "launches": "kernel launches",
    "exposed": "waiting for collectives and copies", "products": "matmuls",
    "slowed": "slowed by collectives",
}  # fmt: skip

MINIMUM_S = 5e-4
"""Shorter parts of a step are not shown, since figures have three digits."""


def part_name(part: str) -> str:
    """The name of a plan's part for people, such as `waiting for fsdp` for `exposed: fsdp`."""
    if part.startswith("exposed: "):
        return f"waiting for {part.removeprefix('exposed: ')}"
    return NAMES.get(part, part)


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """The forecast of the step by a plan of the same program, and the bound, which no step can
    beat. `parts` are seconds by name, `at_peak_s` the seconds of the arithmetic at the GPU's peak.
    `peak_memory` is in bytes of one GPU."""

    path: Path
    step_s: float
    parts: dict[str, float]
    bound_s: float | None
    at_peak_s: float | None
    peak_memory: float | None


def find_plan(folder: Path, recipe: dict[str, Any], device: str) -> PlannedStep | None:
    """The plan of a recorded recipe on the same kind of GPU. It may be in a run's folder or in a
    folder next to it."""
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
            return _planned_step(path, values)
    return None


@cache
def _plans(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    plans = []
    for path in (folder / PLAN, *sorted(folder.glob(f"*/{PLAN}"))):
        try:
            values = read_json(path)
        except (OSError, ValueError):
            continue
        if isinstance(values, dict):
            plans.append((path, values))
    return plans


def _planned_step(path: Path, values: dict[str, Any]) -> PlannedStep | None:
    """The forecast of a plan. None if it is malformed."""
    forecast, step_s = values.get("forecast"), figure(values, "forecast", "step_s")
    parts = forecast.get("parts_s") if isinstance(forecast, dict) else None
    if step_s is None or not isinstance(parts, dict):
        return None
    return PlannedStep(
        path=path,
        step_s=step_s,
        parts={
            part_name(str(name).replace("_", " ")): seconds
            for name, value in parts.items()
            if (seconds := figure(value)) is not None
        },
        bound_s=figure(values, "bound_step_s"),
        at_peak_s=figure(values, "bound_parts_s", "compute"),
        peak_memory=figure(values, "bytes_per_device", "peak"),
    )
