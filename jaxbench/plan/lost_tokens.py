"""How many tokens random routing leaves without a slot at their experts.

The numbers of tokens that choose an expert, or a rank of experts, are sums over thousands of
tokens, so they follow the normal distribution to a few percent of the margin. The fewer tokens go
to their experts at a time, the more slots they need, relative to a fair share.
"""

import math
from dataclasses import replace
from functools import cache

import numpy as np

from jaxbench.recipe.mixers import ExpertsConfig
from jaxbench.recipe.settings import Run
from jaxbench.results.window import PUBLISHED

NONE = 1e-3
"""Expected losses of a run that count as none: fewer than one run in a thousand loses a token."""

SAMPLED = 20_000
"""Tokens from which we estimate how unevenly a token's experts are spread over the ranks."""

STEP = 0.005
"""The step in which `least_factor` tries larger factors."""


def can_happen(run: Run) -> bool:
    """True for dropless experts and random routing."""
    experts = run.model.experts
    return experts is not None and experts.dropless and experts.routing == "random"


def expected(run: Run) -> float:
    """How often, in the steps that count, some expert or rank of experts gets more tokens than it
    has slots. 0 if that cannot happen. A run that loses a token is not comparable.

    A token needs a slot twice: on its way, among the tokens of one device for one rank of experts,
    and where it arrives, among those of all ranks for one expert.
    """
    e, p, b = run.model.experts, run.parallelism, run.batch
    if e is None or not can_happen(run):
        return 0.0
    ranks, parts = p.expert * p.tensor, run.execution.expert_parts
    tokens = run.microbatch * b.sequence_length // (p.context * p.tensor * parts)
    depth = run.model.prediction.depth if run.model.prediction else 0
    predicting = sum(isinstance(mixer, ExpertsConfig) for mixer in run.model.predicting)
    layers = len(run.model.each(ExpertsConfig)) + depth * predicting
    steps = PUBLISHED[1] - PUBLISHED[0] + 1
    draws = layers * run.accumulation * parts * run.gpus // p.pipeline * steps

    def lost(tokens: int, among: int, slots: int) -> float:
        """Draws without a slot, if tokens choose one of so many places with these slots."""
        margin = slots - tokens * e.top_k / among
        if among == 1:
            return 0.0 if margin >= 0 else float(draws)
        spread = _variance(e.count, e.top_k, e.groups, e.top_groups, among)
        deviation = math.sqrt(tokens * spread)
        return draws * among * math.erfc(margin / deviation / math.sqrt(2)) / 2

    result = lost(tokens, ranks, e.rank_slots(tokens, ranks))
    if e.slots == "own":
        result += lost(ranks * tokens, e.count, e.capacity(ranks * tokens)) / ranks
    return result


def least_factor(run: Run) -> float:
    """The least `rank_capacity_factor`, in steps of `STEP`, with which a run loses no token."""
    steps = 0
    while expected(_with_factor(run, factor := 1 + STEP * steps)) >= NONE:
        steps += 1
    return round(factor, 3)


def warning(run: Run) -> list[str]:
    """A line for the plan of a run that loses tokens, with the factor that it needs."""
    if expected(run) < NONE:
        return []
    setting = f"model.experts.rank_capacity_factor={least_factor(run)}"
    return [f"  experts    lose tokens, so a run could not be compared; enough is --set {setting}"]


def _with_factor(run: Run, factor: float) -> Run:
    assert run.model.experts
    experts = replace(run.model.experts, rank_capacity_factor=factor)
    return replace(run, model=replace(run.model, experts=experts))


@cache
def _variance(count: int, top_k: int, groups: int, top_groups: int, ranks: int) -> float:
    """The variance of the number of a token's experts that are on one of so many ranks."""
    scores = np.random.default_rng(0).normal(size=(SAMPLED, groups, count // groups))
    best = np.sort(scores, axis=-1)[..., -(top_k // top_groups) :].sum(axis=-1)
    kept = best >= np.sort(best, axis=-1)[:, -top_groups, None]
    scores = np.where(kept[..., None], scores, -np.inf).reshape(-1, count)
    chosen = scores >= np.sort(scores, axis=-1)[:, -top_k, None]
    return float(chosen[:, : count // ranks].sum(axis=1).var())
