"""How far to trust a forecast: its 90 % interval, from the errors on programs that others timed.

`docs/design/forecast.md#interval` says why the interval is made this way.
"""

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log, sqrt
from statistics import median

from jaxbench.base.errors import counted
from jaxbench.base.student import student
from jaxbench.forecast.tables import FOLDER

ERRORS = FOLDER / "errors.csv"
"""Forecasts of the programs that others timed (`benchmarks/like_for_like.py` writes it)."""

COVERAGE = 0.90
"""The share of forecasts whose interval should hold the measured step."""

ASSUMED = 0.3
"""The standard deviation of the logarithm of an assumed rate. Forecasts of our grouped matmuls use
the rates of other kernels. For the 14 that we timed on an H100, the root mean square of the
logarithm of expected over measured is 0.31 (docs/design/forecast.md, *Grouped matmuls*)."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A program that others timed, and our forecast of it.

    A `family` are the programs of one model, precision and GPU. `assumed` is the share of the
    forecast that rests on assumed rates. Programs are `weak` if their published step says less than
    others.
    """

    family: str
    gpus: int
    gpu: str
    dtype: str
    experts: bool
    weak: bool
    published_s: float
    forecast_s: float
    assumed: float

    @property
    def error(self) -> float:
        """The error of the forecast, as a share of the published step."""
        return self.forecast_s / self.published_s - 1


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The 90 % interval of a step, in seconds.

    It rests on the errors on so many `programs` of so many `families`, some of them `with_experts`.
    `calibrated_s` is the forecast without the mean of these errors. `assumed` is the share of the
    step that rests on assumed rates, and `assumed_rates` names them.
    """

    low_s: float
    high_s: float
    calibrated_s: float
    programs: int
    families: int
    with_experts: int
    assumed: float
    assumed_rates: list[str]


@cache
def timed_programs() -> list[Timed]:
    """The programs that others timed, except weak ones."""
    return [timed for timed in every_program() if not timed.weak]


def every_program() -> list[Timed]:
    """The programs that others timed, also weak ones."""
    with ERRORS.open() as file:
        return [
            Timed(
                family=line["family"],
                gpus=int(line["GPUs"]),
                gpu=line["GPU"],
                dtype=line["precision"],
                experts=line["experts"] == "yes",
                weak=line["weak"] == "yes",
                published_s=float(line["published s"]),
                forecast_s=float(line["forecast s"]),
                assumed=float(line["assumed"]),
            )
            for line in csv.DictReader(file)
        ]


def interval(
    step_s: float, assumed: float, rates: Sequence[str], programs: Sequence[Timed]
) -> Interval:
    """The interval of a forecast step by the errors on these programs.

    The logarithms of published over forecast are taken as draws from a normal distribution, one
    for each family, so that all families have the same weight. The interval is that of one further
    draw (Student's t), widened by what `ASSUMED` adds.
    """
    sizes = Counter(timed.family for timed in programs)
    draws = [
        (log(t.published_s / t.forecast_s), 1 / (len(sizes) * sizes[t.family])) for t in programs
    ]
    mean = sum(weight * value for value, weight in draws)
    squares = len(sizes) * sum(weight * (value - mean) ** 2 for value, weight in draws)
    freedom = len(sizes) - 1
    variance = squares / freedom * (1 + 1 / len(sizes)) + (ASSUMED * assumed) ** 2
    width = student((1 + COVERAGE) / 2, freedom) * sqrt(variance)
    return Interval(
        low_s=step_s * exp(mean - width),
        high_s=step_s * exp(mean + width),
        calibrated_s=step_s * exp(mean),
        programs=len(programs),
        families=len(sizes),
        with_experts=len({timed.family for timed in programs if timed.experts}),
        assumed=assumed,
        assumed_rates=[*rates],
    )


def accuracy(programs: Sequence[Timed]) -> str:
    """The errors by precision: `6.0 % at the median and 14.7 % at worst in bf16 (7 programs)`."""
    lines = []
    for dtype in dict.fromkeys(timed.dtype for timed in programs):
        sizes = [abs(timed.error) for timed in programs if timed.dtype == dtype]
        name = dtype if dtype == "bf16" else dtype.upper()
        lines.append(
            f"{100 * median(sizes):.1f} % at the median and {100 * max(sizes):.1f} % at worst in "
            f"{name} ({counted(len(sizes), 'program')})"
        )
    return ", ".join(lines)
