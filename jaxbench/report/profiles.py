"""Profiles of a run beside the forecast of its program, as `jaxbench plan --profile` keeps them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxbench.report.runs import Compared, Difference, Part, quantity

COMPARED = "compared.json"
"""The comparison in the folder of a profile, `profile/rank-N` of a run."""


def read(folder: Path) -> list[Compared]:
    """The compared profiles of a run's folder, by rank; a malformed one is left out."""
    return sorted(_read(folder), key=lambda compared: (len(compared.rank), compared.rank))


def _read(folder: Path) -> Iterator[Compared]:
    for path in folder.glob(f"profile/rank-*/{COMPARED}"):
        try:
            values = json.loads(path.read_text())
            for name, kind in (("kernels", Part), ("links", Part), ("largest", Difference)):
                values[name] = [_part(kind, each) for each in values[name]]
            for name in ("devices", "steps", "measured_s", "forecast_s", "found"):
                quantity(values[name])
            yield Compared(**values)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue


def _part(kind: type, values: Any) -> Any:
    """A part from its fields. Raises TypeError for other ones, and for what is no figure."""
    for name in ("measured_s", "forecast_s", *(["runs"] if kind is Difference else [])):
        quantity(values[name])
    return kind(**values)
