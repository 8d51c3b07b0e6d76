"""The published measurements (configs/published.csv).

A published MFU is B x (model FLOPs) / (step time x GPUs x peak). Sources state peaks (`hardware`:
989 and 1979 TFLOP/s on H100) and their own, often rounded, model FLOPs. If a printed figure does
not follow from what its source states, the row carries an erratum code (`ERRATA`). We keep the
printed figure, and the code says how to reproduce it (`tests/recipe/test_flops.py` does so). If a
source prints TFLOP/s instead of MFU, the MFU is these TFLOP/s over the peak.
"""

import csv
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any

from jaxbench.base import hardware
from jaxbench.base.errors import RecipeError, counted
from jaxbench.recipe import flops, recipes
from jaxbench.recipe.build import differing
from jaxbench.recipe.families import MODELS, SOURCE_FLOPS
from jaxbench.recipe.model import ModelConfig
from jaxbench.recipe.settings import Run

ERRATA = {
    "GA": "printed accumulation differs from global batch / (microbatch x data-parallel ranks)",
    "STEP": "printed step time contradicts the row's own tokens/s and MFU",
    "RND": "tokens/s was computed from a step time with more digits than printed",
    "PEAK": "MFU is reproduced with a peak of 989.5 TFLOP/s (half of 1979), not the stated 989",
    "FLOPS3": "MFU is reproduced only with model FLOPs of 3.94e15, rounded but not stated",
    "GQA16": "MFU is reproduced only with 16 query groups instead of the model's 8",
    "FULL": "MFU follows the full count; the formula of release 24.11 gives 1.17 times as much",
    "HALF": "tokens/s and days are for half the global batch",
    "OVER": "model FLOPs take Nano's Mamba-2 to be 5376 wide instead of 4096",
    "OLD": "MFU follows an older count: experts without a gate, attention without windows",
    "CAUSAL": "MFU counts the causal half of attention",
    "WHOLE": "tokens/s is computed from whole samples/s, MFU is not",
    "RATE": "the source has only tokens/s, some from whole samples/s; we computed the step time",
}


FREE = {"batch.microbatch", "precision.gather", "precision.implementation"}
"""Settings that change speed and memory but not the result, in addition to the mesh and
`execution`."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published measurement. A figure is None if the source does not print it. MFU is in
    percent."""

    workload: str
    size: str
    dtype: str
    gpu_type: str
    gpus: int
    seq_len: int
    layers: int
    gbs: int
    step_time_s: float
    tokens_per_s: float | None
    mfu_pct: float | None
    days_per_1t_tokens: float | None
    source_file: str
    errata: tuple[str, ...]

    @property
    def title(self) -> str:
        """The name of the model, and the GPU unless it is the H100."""
        return titled(f"{self.workload} {self.size}", self.gpu)

    @property
    def model(self) -> str:
        """The name of our model for this work (`families.MODELS`)."""
        return f"{self.workload.replace('.', '')}_{self.size}"

    @property
    def recipe(self) -> str:
        """The name of our recipe for this work."""
        return f"{self.model}_{self.dtype}"

    @property
    def gpu(self) -> hardware.Gpu:
        """The kind of GPU on which it was measured."""
        return hardware.PLANNED[self.gpu_type]

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains on."""
        return self.gbs * self.seq_len

    @property
    def rate(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens_per_step / self.step_time_s / self.gpus

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOPs of a step on one GPU, by the source's formula."""
        cfg = replace(MODELS[self.model], layers=self.layers)
        return source_flops(cfg, self.seq_len) * self.gbs / self.gpus


def titled(model: str, gpu: hardware.Gpu | None) -> str:
    """The name of a model, with the GPU unless it is the H100 of most published rows."""
    return model if gpu in (None, hardware.H100) else f"{model} {gpu.name}"


@cache
def rows() -> tuple[Row, ...]:
    """All rows of published.csv. Raises RecipeError for a line that is no row, and for an unknown
    model, GPU or dtype."""
    path = recipes.config_folder() / "published.csv"
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.DictReader(file)
            table = tuple(_row(line, number) for number, line in enumerate(lines, 2))
    except (OSError, ValueError, csv.Error) as error:
        raise RecipeError(f"{path}: not a table of published figures: {error}") from error
    for row in table:
        if row.gpu_type not in hardware.PLANNED:
            raise RecipeError(f"{path}: unknown GPU: {row.gpu_type}")
        if row.model not in MODELS or row.dtype not in row.gpu.tflops:
            raise RecipeError(f"{path}: unknown work: {row.workload} {row.size} {row.dtype}")
    return table


def _row(line: dict[str, str], number: int) -> Row:
    values: dict = {}
    for f in fields(Row):
        text = line.get(f.name)
        if text is None:
            raise ValueError(f"line {number} has no {f.name}; expected commas between the columns")
        if f.name == "errata":
            values[f.name] = tuple(text.split(";")) if text else ()
        elif f.type is str:
            values[f.name] = text
        else:
            try:
                values[f.name] = (int if f.type is int else float)(text) if text else None
            except ValueError as error:
                raise ValueError(f"line {number}: {f.name} is {text!r}") from error
    return Row(**values)


def lookup(run: Run, gpu: hardware.Gpu | None = hardware.H100) -> Row | None:
    """The published row with the run's model, batch, dtype and number of GPUs. A row that was
    measured on `gpu` comes before rows of other GPUs. None if nothing is published for this
    work."""
    if run.label == "derived":
        return None
    m, b = run.model, run.batch
    work = (m.layers, b.sequence_length, b.global_batch)
    matches = (
        r
        for r in _candidates(run, gpu)
        if work == (r.layers, r.seq_len, r.gbs)
        and m.without_slots == replace(_recipe_run(r).model.without_slots, layers=m.layers)
    )
    return next(matches, None)


@cache
def _recipe_run(row: Row) -> Run:
    """The row of our recipe that does the work of a published row."""
    return recipes.resolve(recipes.load(row.recipe).on(row.gpu), row.gpus)


def _candidates(run: Run, gpu: hardware.Gpu | None) -> list[Row]:
    """Rows with the run's model name, dtype and number of GPUs. Rows for `gpu` come first."""
    wanted = (run.model.family, run.model.size, run.precision.dtype, run.gpus)
    candidates = [r for r in rows() if wanted == (r.workload, r.size, r.dtype, r.gpus)]
    return sorted(candidates, key=lambda row: gpu is not None and row.gpu.name != gpu.name)


def differences(run: Run, device: str) -> list[str]:
    """Reasons why the run's figures are not comparable with published ones; empty if they are
    comparable.

    Every setting that changes the work or its numerics must be the same as in the recipe of the
    published row. The mesh, remat, compiler flags, implementations of operators and the slots of
    dropless experts are free.
    """
    if run.label == "smoke":
        return ["smoke row on a CPU"]
    if run.label == "derived":
        return [f"its row is derived: the recipe has none for {counted(run.gpus)}"]
    gpu = hardware.identify(device)
    row = lookup(run, gpu) or next(iter(_candidates(run, gpu)), None)
    if row is None:
        return [f"nothing is published for this work on {counted(run.gpus)}"]
    expected = _work(_recipe_run(row))
    reasons = [
        f"{setting} is {value}, the row has {other}"
        for setting, value, other in differing(_work(run), expected)
        if setting not in FREE
    ]
    if gpu is not row.gpu:
        reasons.append(f"the hardware is {device}, the published one is {row.gpu.name}")
    return reasons


def _work(run: Run) -> dict[str, Any]:
    """The sections that decide what is computed, as plain values."""
    return {"model": asdict(run.model.without_slots)} | {
        section: asdict(getattr(run, section)) for section in ("precision", "batch", "optimizer")
    }


def source_flops(cfg: ModelConfig, length: int) -> float:
    """Model FLOPs of one sequence by the formula of the model's source, unrounded: the family's own
    formula, or the full count."""
    formula = SOURCE_FLOPS.get(cfg.family)
    return formula(cfg, length) if formula else flops.model_flops(cfg, length, "full")["total"]
