"""Profiles of a run next to the forecast of its program, as `jaxbench plan --profile` stores
them."""

import json
from collections.abc import Iterator
from pathlib import Path

from jaxbench.recipe.build import restored
from jaxbench.report.runs import Compared, quantity

COMPARED = "compared.json"
"""The comparison in the folder of a profile, which is `profile/rank-N` of a run."""


def read(folder: Path) -> list[Compared]:
    """The compared profiles in a run's folder, by rank. A malformed one is left out."""
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
