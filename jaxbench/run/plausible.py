"""Checks for implausible figures: the device computed nothing, or something else."""

import math
from typing import Any

from jaxbench.recipe.settings import Run

ROUNDING = 0.5
"""Nats by which bf16 and FP8 may change a mean loss. We measured no change above 0.01."""

SIGMAS = 6
"""Standard deviations that we allow for a mean over random tokens."""


def first_loss(run: Run) -> tuple[float, float]:
    """The least and the largest plausible loss of the initial weights.

    Targets are independent of the weights, so the expected loss is at least ln(vocabulary). A
    normalized hidden state times a random head gives normal logits of variance v. Their expected
    loss is at most ln(vocabulary) + v / 2, and it deviates by sqrt(v) between tokens. Equal tokens
    with equal targets deviate together. Two `zipf` ones are equal with a probability of about
    1 / ln(vocabulary)^2.
    """
    m, n = run.model, run.tokens_per_step
    variance = 1 if m.init_std is None else m.init_std**2 * m.embed
    least = math.log(m.vocabulary)
    if run.batch.tokens == "zipf":
        n = min(n, int(least**2))
    margin = ROUNDING + SIGMAS * math.sqrt(variance / n)
    return least - margin, least + variance / 2 + margin


def problem(run: Run, step: dict[str, Any], initial: bool) -> str | None:
    """The reason why the figures of a step cannot be right; None if they may be right. `initial`
    says that it is the first step from the initial weights."""
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
    """The reason why a run's rate cannot be right. None if it may be right, or if the device's peak
    is unknown. The check uses the causal count of FLOPs, since a kernel need not compute the masked
    scores that the other counts include."""
    mfu = summary.get("summary", {}).get("mfu", {}).get("causal")
    if mfu is None or mfu <= 1:
        return None
    return f"the step time means {100 * mfu:.0f} % of the device's peak: nothing was computed"
