"""Runs as people see them: each with a name and its figures, and what they say together."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxbench.base.hardware import NULL
from jaxbench.base.untrusted import printable
from jaxbench.report import formats
from jaxbench.report.gap import explain
from jaxbench.report.runs import Result, RunData
from jaxbench.results.verdict import PASS, percent

NO_RESULT = "smoke run: no result"


@dataclass(frozen=True, kw_only=True)
class NamedRun:
    """A run with its number, its line of figures (`formats.line`) and its name."""

    number: int
    result: Result
    line: dict[str, Any]
    name: str

    @property
    def smoke(self) -> bool:
        """True for a smoke run, which is no benchmark at all."""
        return self.line["label"] == "smoke"

    @property
    def watermark(self) -> str:
        """The text above the charts of a run that is no benchmark."""
        return NO_RESULT if self.smoke else NULL if self.result.run.null else ""

    @property
    def measured(self) -> bool:
        """True if the step time is from a benchmark that ran here."""
        return self.result.complete and not self.watermark

    @property
    def comparable(self) -> bool:
        """True if the step time may be compared with the published one."""
        return self.result.verdict.ratio is not None

    @property
    def wrong(self) -> str:
        """What is wrong with a bad run, and why. Empty for any other run."""
        verdict = self.result.verdict
        found = explain(self.result) if verdict.name == "slow" else None
        return found.text() if found else verdict.reason if verdict.bad else ""

    def cell(self, key: str) -> str:
        """A figure of the line for people. Ratios are percentages, rounded down as in the verdict's
        reason."""
        value = self.line[key]
        shares = "ratio", "of_forecast"
        return percent(value) if key in shares and value else formats.cell(key, value)


def named(results: Sequence[Result], convention: str) -> list[NamedRun]:
    """The runs, numbered and named, smoke runs last. If several runs have the same recipe, their
    names include the run's folder, with as many of its parents as tell the runs apart."""
    results = sorted(results, key=lambda result: result.run.label == "smoke")
    paths = [result.run.path for result in results]
    parts = [(path if path.is_dir() else path.parent).parts for path in paths]
    recipes = [_name(result.run) for result in results]
    names = recipes
    for parents in range(1, 1 + max(map(len, parts), default=0)):
        same = Counter(names)
        names = [
            f"{recipe} · {printable('/'.join(folder[-parents:]))}" if same[name] > 1 else name
            for recipe, folder, name in zip(recipes, parts, names, strict=True)
        ]
    return [
        NamedRun(number=n, result=result, line=formats.line(result, convention), name=name)
        for n, (result, name) in enumerate(zip(results, names, strict=True), 1)
    ]


def _name(run: RunData) -> str:
    """A run by its recipe and row, or by its workload and GPUs."""
    gpus = "" if ":" in run.recipe or not run.gpus else f" on {run.gpus}"
    return "".join((run.recipe, *run.suffixes, gpus))


def windows(runs: Sequence[NamedRun]) -> list[str]:
    """The windows of the step times."""
    return sorted({run.line["window"] for run in runs if run.line["step_time_s"]})


def headline(runs: Sequence[NamedRun]) -> str:
    """The conclusion in a sentence: is this cluster as fast as it should be?"""
    compared = [run for run in runs if run.comparable]
    if runs and all(run.smoke for run in runs):
        return "Smoke runs only. Nothing here is a benchmark result."
    if not compared:
        return "No run here is comparable with a published figure."
    good = sum(run.line["verdict"] == "pass" for run in compared)
    return (
        f"{good} of {len(compared)} comparable runs reach {100 * PASS:.0f} % of the published "
        "throughput."
    )
