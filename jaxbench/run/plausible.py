"""Checks for implausible figures: of a device that computes nothing, or something else."""

import math
from typing import Any

from jaxbench.recipe.settings import Run

ROUNDING = 0.5
"""Nats by which bf16 and FP8 may change a mean loss; no change above 0.01 was measured."""

SIGMAS = 6
"""Standard deviations of a mean over random tokens that are allowed."""


def first_loss(run: Run) -> tuple[float, float]:
    """The least and the largest plausible loss of the initial weights.

    Targets are uniform and independent of the weights, so the expected loss is at least
    ln(vocabulary). A normalized hidden state times a random head gives normal logits of variance v,
    whose expected loss is at most ln(vocabulary) + v / 2, and deviates by sqrt(v) between tokens.
    """
    m, tokens = run.model, run.tokens_per_step
    variance = m.logit_scale**2 * (1 if m.init_std is None else m.init_std**2 * m.embed)
    least, margin = math.log(m.vocabulary), ROUNDING + SIGMAS * math.sqrt(variance / tokens)
    return least - margin, least + variance / 2 + margin


def problem(run: Run, step: dict[str, Any], initial: bool) -> str | None:
    """Reason why the figures of a step cannot be right; None if they may be. `initial` is the first
    step from the initial weights."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(step[name]):
            return f"{name} is {step[name]} at step {step['step']}"
    if step["grad_norm"] == 0:
        return f"grad_norm is 0 at step {step['step']}: nothing was computed"
    least, largest = first_loss(run)
    if initial and not least <= step["loss"] <= largest:
        return (
            f"the first loss is {step['loss']:.4f}; random tokens and initial weights give "
            f"{least:.2f} to {largest:.2f}"
        )
    return None


def rate_problem(summary: dict[str, Any]) -> str | None:
    """Reason why a run's rate cannot be right; None if it may be, or if the device's peak is
    unknown. It takes the causal count: a kernel need not compute the masked scores of the others.
    """
    mfu = summary.get("summary", {}).get("mfu", {}).get("causal")
    if mfu is None or mfu <= 1:
        return None
    return f"the step time means {100 * mfu:.0f} % of the device's peak: nothing was computed"
