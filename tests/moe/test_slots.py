"""Slots of dropless experts in every row with random routing."""

import math
from functools import cache

import numpy as np
import pytest

from jaxbench.base.hardware import PLANNED
from jaxbench.ops.moe.dispatch import rank_slots
from jaxbench.recipe import recipes
from jaxbench.recipe.mixers import ExpertsConfig
from jaxbench.results.window import PUBLISHED

RUNS = {
    f"{recipe.name}, {row}, {gpu or 'h100'}": recipes.resolve(recipe.on(PLANNED.get(gpu)), row)
    for recipe in recipes.load_all()
    for gpu in (None, *recipe.gpu_rows)
    for row in recipe.on(PLANNED.get(gpu)).rows
    if row != "smoke"
}
RANDOM = {
    name: run
    for name, run in RUNS.items()
    if run.model.dropless and run.model.experts.routing == "random"
}


@cache
def variance(count, top_k, groups, top_groups, ranks):
    """Of the number of a token's experts that are on one rank, from 20000 tokens."""
    scores = np.random.default_rng(0).normal(size=(20_000, groups, count // groups))
    best = np.sort(scores, axis=-1)[..., -(top_k // top_groups) :].sum(axis=-1)
    kept = best >= np.sort(best, axis=-1)[:, -top_groups, None]
    scores = np.where(kept[..., None], scores, -np.inf).reshape(-1, count)
    chosen = scores >= np.sort(scores, axis=-1)[:, -top_k, None]
    return chosen[:, : count // ranks].sum(axis=1).var()


@pytest.mark.parametrize("name", RANDOM)
def test_a_window_has_no_token_without_a_slot(name):
    """Fewer than one window in 1000 is expected to lose a token: on its way, among those of one
    device for the experts of one rank, or where it arrives, among those of all ranks for one
    expert. Sums over thousands of tokens follow the normal distribution to a few percent of the
    margin. A run that drops any is not comparable."""
    run = RANDOM[name]
    e, p, b = run.model.experts, run.parallelism, run.batch
    ranks, parts = p.expert * p.tensor, run.execution.expert_parts
    tokens = run.microbatch * b.sequence_length // (p.context * p.tensor * parts)
    layers = len(run.model.each(ExpertsConfig)) + sum(
        run.model.prediction.depth for m in run.model.predicting if isinstance(m, ExpertsConfig)
    )
    devices = run.gpus // p.pipeline
    draws = layers * run.accumulation * parts * devices * (PUBLISHED[1] - PUBLISHED[0] + 1)

    def lost(tokens, among, slots):
        """Draws without a slot, if tokens choose one of so many places with these slots."""
        margin = slots - tokens * e.top_k / among
        if among == 1:
            assert margin >= 0  # slots for all
            return 0
        deviation = math.sqrt(tokens * variance(e.count, e.top_k, e.groups, e.top_groups, among))
        return draws * among * math.erfc(margin / deviation / math.sqrt(2)) / 2

    expected = lost(tokens, ranks, rank_slots(tokens, e, ranks))
    if e.slots == "own":
        expected += lost(ranks * tokens, e.count, e.capacity(ranks * tokens)) / ranks
    assert expected < 1e-3
