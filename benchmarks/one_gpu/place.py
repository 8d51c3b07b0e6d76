"""Where a check runs, what it finds, and the command that it runs."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxbench.hardware import Gpu
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run

ROOT = Path(__file__).parents[2]
FAMILIES = ("llama31_8b", "grok1_314b", "nemotronh_56b", "nemotron4_340b")
"""One model of each family, the most used first."""

OK, WRONG, MEASURED, NOT_RUN = "ok", "WRONG", "measured", "not run"
"""Verdicts: as it should be, not so, a figure without a right and wrong, and nothing done."""


@dataclass(frozen=True)
class Finding:
    """One line of the table: what was looked at, the verdict, the figure, what stands beside it;
    and the numbers behind them."""

    what: str
    verdict: str
    figure: str = ""
    beside: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a check runs: on this machine's `gpu`, on its `cpu` at tiny sizes (a rehearsal), or for
    an `absent` GPU that it is only compiled for. `folder` is for files that nobody keeps, `gpu` the
    kind that programs are planned and compiled for."""

    on: str
    folder: Path
    gpu: Gpu

    @property
    def rehearsal(self) -> bool:
        """Whether all sizes are tiny, since this is a CPU."""
        return self.on == "cpu"

    @cached_property
    def recipes(self) -> list[str]:
        """A recipe of each family and precision: FP8 first, of which least is known. A rehearsal
        takes one family: the others would test the script no further."""
        models = FAMILIES[:1] if self.rehearsal else FAMILIES
        return [f"{model}_{dtype}" for model in models for dtype in ("fp8", "bf16")]

    def lanes(self, count: int) -> ThreadPoolExecutor:
        """So many things beside each other; in a rehearsal one, to leave it its cores."""
        return ThreadPoolExecutor(1 if self.rehearsal else count)


@dataclass(frozen=True)
class Trained:
    """A run of the command that has ended."""

    folder: Path
    status: int
    said: str

    @cached_property
    def record(self) -> dict[str, Any]:
        """Its run.json."""
        return json.loads((self.folder / "run.json").read_text())

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """Its steps.jsonl."""
        return read_lines(self.folder / "steps.jsonl")

    @property
    def losses(self) -> list[float]:
        """Of all its steps."""
        return [step["loss"] for step in self.steps]

    @property
    def problem(self) -> str:
        """Why it did not complete, in a line; empty if it did."""
        if self.status == 0:
            return ""
        return f"status {self.status}: {(self.said.strip().splitlines() or ['no word'])[-1]}"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def row(recipe: str, name: int | str = 1, *changes: str) -> Run:
    """A row for one device, with changes."""
    parsed = recipes.parse_overrides([*changes])
    return recipes.resolve(recipes.load(recipe), name, devices=1, overrides=parsed)


def command(recipe: str, folder: Path, *options: str) -> list[str]:
    """The training command of a recipe that writes to a folder."""
    start = [sys.executable, "-m", "jaxbench.train", "--config", f"configs/{recipe}.yaml"]
    return [*start, "--output", str(folder), *options]


def train(recipe: str, folder: Path, *options: str, **variables: str) -> Trained:
    """Runs the command; `variables` are added to the environment."""
    done = subprocess.run(
        command(recipe, folder, *options), cwd=ROOT, env=os.environ | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    print(f"$ {recipe} {' '.join(options)}\n{done.stdout}", flush=True)
    return Trained(folder, done.returncode, done.stdout)


TINIER = ("--set=model.layers=1", "--set=batch.sequence_length=64")
"""Of a rehearsal: its runs only show that the checks themselves work."""


def tiny(place: Place, recipe: str) -> tuple[str, ...]:
    """Options that make the row which the command finds here the recipe's `smoke` row."""
    if place.rehearsal:
        return TINIER
    wanted, found = (asdict(row(recipe, name)) for name in (recipes.SMOKE, 1))
    return tuple(
        f"--set={section}.{name}={json.dumps(value)}"
        for section in recipes.SECTIONS
        for name, value in wanted[section].items()
        if value != found[section][name]
    )


def small_share(lanes: int) -> dict[str, str]:
    """A part of the GPU's memory for each of several tiny runs beside each other."""
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(round(0.8 / lanes, 2))}


def largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Between two curves, relative to the second."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))
