"""Profiles of a run beside the forecast of its program, as `jaxbench plan --profile` keeps them."""

import json
from collections.abc import Iterator
from pathlib import Path

from jaxbench.recipe.build import restored
from jaxbench.report.runs import Compared, quantity

COMPARED = "compared.json"
"""The comparison in the folder of a profile, `profile/rank-N` of a run."""


def read(folder: Path) -> list[Compared]:
    """The compared profiles of a run's folder, by rank; a malformed one is left out."""
    return sorted(_read(folder), key=lambda compared: (len(compared.rank), compared.rank))


def _read(folder: Path) -> Iterator[Compared]:
    for path in folder.glob(f"profile/rank-*/{COMPARED}"):
        try:
            compared: Compared = restored(Compared, json.loads(path.read_text()))
            parts = [*compared.kernels, *compared.links, *compared.largest]
            times = [s for part in parts for s in (part.measured_s, part.forecast_s)]
            counts = [compared.devices, compared.steps, *(part.runs for part in compared.largest)]
            for figure in (
                compared.measured_s, compared.forecast_s, compared.found, *times, *counts,
            ):  # fmt: skip
                quantity(figure)
            yield compared
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue
