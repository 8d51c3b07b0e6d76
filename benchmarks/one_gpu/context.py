"""Mode and helpers of a check: findings, runs of the training command."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import Gpu
from jaxbench.cluster import nvml
from jaxbench.cluster.telemetry import Sampler
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run
from jaxbench.xla import flags

ROOT = Path(__file__).parents[2]
FAMILIES = (
    "deepseek_v3", "nemotron4_340b", "gpt_oss_120b", "nemotronh_56b", "nemotron3_nano_30b_a3b",
    "llama31_8b", "qwen3_30b_a3b", "grok1_314b",
)  # fmt: skip
"""One model of each family."""

SHARE = 0.28
"""The GPU memory of each of the checks that share the GPU."""

OK, WRONG, MEASURED, NOT_RUN = "ok", "WRONG", "measured", "not run"
"""Verdicts; MEASURED is a figure without pass or fail."""


@dataclass(frozen=True)
class Finding:
    """One line of the table: subject, verdict, figure, context of the figure, and raw numbers."""

    what: str
    verdict: str
    figure: str = ""
    beside: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """How a check runs: on this machine's `gpu`, on its `cpu` at tiny sizes (a rehearsal), or only
    compiled for an `absent` GPU. `folder` is temporary; programs are planned and compiled for
    `gpu`. `rows` are the recipes of the check of that name, all if empty."""

    mode: str
    folder: Path
    gpu: Gpu
    output: Path
    rows: tuple[str, ...] = ()

    @property
    def rehearsal(self) -> bool:
        """Whether this is a CPU, so that all sizes are tiny."""
        return self.mode == "cpu"

    @cached_property
    def recipes(self) -> list[str]:
        """A recipe of each family and precision. A rehearsal takes one family, which is enough to
        test the script."""
        models = ("llama31_8b",) if self.rehearsal else FAMILIES
        every = recipes.names()
        names = (f"{model}_{dtype}" for model in models for dtype in ("fp8", "bf16"))
        return [name for name in names if name in every]

    def lanes(self, count: int) -> ThreadPoolExecutor:
        """Threads for concurrent runs; one in a rehearsal, which needs the cores."""
        return ThreadPoolExecutor(1 if self.rehearsal else count)


@dataclass(frozen=True)
class Trained:
    """A finished run of the training command."""

    folder: Path
    status: int
    output: str

    @cached_property
    def record(self) -> dict[str, Any]:
        """The content of run.json."""
        return json.loads((self.folder / "run.json").read_text())

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of steps.jsonl."""
        return read_lines(self.folder / "steps.jsonl")

    @property
    def losses(self) -> list[float]:
        """Losses of all steps."""
        return [step["loss"] for step in self.steps]

    @property
    def problem(self) -> str:
        """One line on why the run failed; empty if it completed."""
        if self.status == 0:
            return ""
        reason = self.record["reason"] if (self.folder / "run.json").exists() else None
        last = (self.output.strip().splitlines() or ["no output"])[-1]
        return f"status {self.status}: {reason or last}"


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
"""Settings of a rehearsal, which only shows that the checks themselves work."""


def tiny(ctx: Context, recipe: str) -> tuple[str, ...]:
    """Options that turn row `1`, which the command selects here, into the recipe's `smoke` row."""
    if ctx.rehearsal:
        return TINIER
    smoke, one = (asdict(row(recipe, name)) for name in (recipes.SMOKE, 1))
    return tuple(
        f"--set={section}.{name}={json.dumps(value)}"
        for section in recipes.SECTIONS
        for name, value in smoke[section].items()
        if value != one[section][name]
    )


def options(ctx: Context) -> dict[str, Any]:
    """Compiler options of a kernel on its own: on a GPU those of the recipes."""
    return {} if ctx.rehearsal else dict(flags.TUNED)


@contextmanager
def sampled(ctx: Context) -> Iterator[Sampler | None]:
    """Samples this GPU's clock and power; None where NVML reports none."""
    try:
        gpus = [] if ctx.rehearsal else nvml.gpus()
    except RecipeError:
        gpus = []
    if not gpus:
        yield None
        return
    with Sampler(gpus[:1], SAMPLED_S) as sampler:
        yield sampler


SAMPLED_S = 0.1
"""Seconds between two samples of the GPU."""


def small_share(lanes: int) -> dict[str, str]:
    """A share of a check's memory for each of several concurrent tiny runs."""
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{SHARE / lanes:.3f}"}


def largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Largest difference of two loss curves, relative to the second where that is not zero."""
    return max(abs(x - y) / (abs(y) or 1.0) for x, y in zip(a, b, strict=True))
