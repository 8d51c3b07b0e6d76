"""The published figures by model and GPU, for somebody who compares GPUs."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxbench.base import hardware
from jaxbench.recipe import flops
from jaxbench.recipe.published import ERRATA
from jaxbench.report.named import NamedRun


class PublishedFigure(NamedTuple):
    """A published figure. `rate` is in tokens/s/GPU. `days` are for 1e12 tokens on its GPUs; a
    model with fewer layers than the published models of its name is `shortened` and has none."""

    gpu: str
    dtype: str
    gpus: int
    layers: int
    shortened: bool
    rate: float
    mfu_pct: float | None
    days: float | None
    errata: tuple[str, ...]


def models(runs: Sequence[NamedRun]) -> list[tuple[str, list[PublishedFigure]]]:
    """The figures of each model: by GPU, as in `hardware`, then by precision and GPUs."""
    rows = [(run, row) for run in runs if (row := run.result.run.published)]
    full: dict[str, int] = {}
    for _, row in rows:
        model = f"{row['workload']} {row['size']}"
        full[model] = max(full.get(model, 0), row["layers"])
    found: dict[str, list[PublishedFigure]] = {model: [] for model in full}
    for run, row in rows:
        model = f"{row['workload']} {row['size']}"
        rate = run.line["tokens_per_s_per_gpu"]
        whole = row["layers"] == full[model]
        found[model].append(PublishedFigure(
            gpu=hardware.PLANNED[row["gpu_type"]].name, dtype=row["dtype"], gpus=row["gpus"],
            layers=row["layers"], shortened=not whole, rate=rate, mfu_pct=run.line["mfu_pct"],
            days=flops.days_per_1t_tokens(rate * row["gpus"]) if whole else None,
            errata=row["errata"],
        ))  # fmt: skip
    order = [gpu.name for gpu in hardware.GPUS]
    return [
        (model, sorted(figures, key=lambda f: (order.index(f.gpu), f.dtype, f.gpus)))
        for model, figures in found.items()
    ]


def footnotes(runs: Sequence[NamedRun]) -> dict[str, str]:
    """The errata of the runs' published figures, by code."""
    used = {code for run in runs for code in (run.result.run.published or {}).get("errata") or ()}
    return {code: text for code, text in ERRATA.items() if code in used}
