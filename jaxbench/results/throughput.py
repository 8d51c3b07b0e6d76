"""Rates that follow from a step time."""

from typing import Any

from jaxbench.recipe import flops, published
from jaxbench.recipe.settings import Run


def throughput(run: Run, step_time_s: float, peak: float | None) -> dict[str, Any]:
    """Rates that follow from a step time. FLOP rates and MFU are per GPU and by convention. `peak`
    is in TFLOP/s."""
    tokens_per_s = run.tokens_per_step / step_time_s
    sequences_per_gpu = run.batch.global_batch / run.gpus / step_time_s
    rates = {c: sequences_per_gpu * model_flops(run, c) for c in flops.CONVENTIONS}
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": tokens_per_s / run.gpus,
        "tflops_per_gpu": {c: rate / 1e12 for c, rate in rates.items()},
        "mfu": {c: flops.mfu(rate, peak) for c, rate in rates.items()},
        "days_per_1t_tokens": flops.days_per_1t_tokens(tokens_per_s),
    }


def energy(watts: float, tokens_per_s: float) -> dict[str, float]:
    """Energy per token, with the power of all GPUs in W. Hosts, switches and cooling are not
    included."""
    return {
        "joules_per_token": watts / tokens_per_s,
        "tokens_per_kwh": 3.6e6 * tokens_per_s / watts,
    }


def model_flops(run: Run, convention: str) -> float:
    """Training FLOPs of one sequence of the run under a convention of `flops.CONVENTIONS`."""
    if convention == "published":
        return published.source_flops(run.model, run.batch.sequence_length)
    return flops.model_flops(run.model, run.batch.sequence_length, convention)["total"]
