"""Profiles of a run next to the forecast of its program. `jaxbench plan --profile` stores them, and
reports read them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxbench.base.quantity import quantity
from jaxbench.base.untrusted import read_json
from jaxbench.recipe.build import restored

COMPARED = "compared.json"
"""The comparison in the folder of a profile, which is `profile/rank-N` of a run."""


WAITS = "waits for collectives and copies"
"""The part of a step in which kernels wait for collectives and copies."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The seconds per step of things that belong together: kernels of a kind, collectives of a kind
    over the same mesh axes, or copies from and to the host."""

    name: str
    measured_s: float
    forecast_s: float

    @property
    def longer_s(self) -> float:
        """The measured seconds minus the forecast seconds."""
        return self.measured_s - self.forecast_s


@dataclass(frozen=True, kw_only=True)
class Difference(Part):
    """A kernel or collective of the program. `name` is the name of its instruction, `source` its
    JAX operation, and `sizes` the sizes of a matmul or attention. It has `runs` in a step."""

    source: str
    sizes: str
    runs: int

    @property
    def what(self) -> str:
        """Its JAX operation and sizes."""
        return ", ".join(filter(None, [self.source, self.sizes]))


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A profile of `steps` steps next to the forecast.

    `kernels` has kernels, waits and gaps, which follow each other and add up to a step; only slices
    on a second stream may overlap with them. `links` has collectives and copies, which run at the
    same time. `found` is the share of the forecast's kernel seconds whose instructions are in the
    profile. If the figures are no measurement, `remark` says why.
    """

    profile: str
    gpu: str
    devices: int
    steps: int
    measured_s: float
    forecast_s: float
    kernels: list[Part]
    links: list[Part]
    largest: list[Difference]
    found: float
    remark: str = ""

    @property
    def rank(self) -> str:
        """The process that was profiled."""
        return Path(self.profile).name.replace("-", " ")

    @property
    def waits(self) -> Part | None:
        """The part of the step in which kernels wait."""
        return next((part for part in self.kernels if part.name == WAITS), None)


def read(folder: Path) -> list[Compared]:
    """The compared profiles in a run's folder, by rank. A malformed one is left out."""
    return sorted(_read(folder), key=lambda compared: (len(compared.rank), compared.rank))


def _read(folder: Path) -> Iterator[Compared]:
    for path in folder.glob(f"profile/rank-*/{COMPARED}"):
        try:
            compared: Compared = restored(Compared, read_json(path))
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
