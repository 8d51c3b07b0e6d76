"""Profiles of a run beside the forecast of its program, as `jaxbench plan --profile` keeps them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxbench.report.runs import quantity

COMPARED = "compared.json"
"""The comparison in the folder of a profile, `profile/rank-N` of a run."""

WAITS = "waits for collectives and copies"
"""The part of a step in which kernels wait for what runs beside them."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Seconds per step of what belongs together: kernels of a kind, collectives of a kind over the
    same mesh axes, or copies from and to the host."""

    name: str
    measured_s: float
    forecast_s: float

    @property
    def longer_s(self) -> float:
        """Seconds by which the measured one is longer."""
        return self.measured_s - self.forecast_s


@dataclass(frozen=True, kw_only=True)
class Difference(Part):
    """A kernel or collective of the program: `name` is its instruction's, `source` its JAX
    operation, `sizes` those of a product or attention; it has `runs` in a step."""

    source: str
    sizes: str
    runs: int

    @property
    def what(self) -> str:
        """Its operation and sizes."""
        return ", ".join(filter(None, [self.source, self.sizes]))


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A profile of `steps` steps beside the forecast: `kernels`, waits and gaps add up to a step of
    one stream of kernels, and collectives and copies are on `links` beside it. `found` is the share
    of the forecast's kernel seconds whose instructions the profile has, `remark` what makes its
    figures none."""

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
        """What kernels wait for."""
        return next((part for part in self.kernels if part.name == WAITS), None)


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
