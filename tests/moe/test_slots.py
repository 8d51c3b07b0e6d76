"""Slots of dropless experts: how many random routing needs."""

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxbench.base.hardware import PLANNED
from jaxbench.recipe import recipes
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.mixers import SLOTS, ExpertsConfig
from jaxbench.recipe.slots import DEVIATIONS, SKEW, enough, reach, variance

ROUTED = {
    "DeepSeek-V3": (256, 8, 8, 4),
    "Kimi K2": (384, 8, 1, 1),
    "GPT-OSS": (128, 4, 1, 1),
    "Nemotron 3 Super": (512, 22, 1, 1),
}
"""Experts, chosen ones, groups and chosen groups of models."""


def chosen(tokens, count, top_k, groups, top_groups):
    """The experts of random tokens, as a router finds them (docs/design/experts.md)."""
    scores = np.random.default_rng(0).normal(size=(tokens, groups, count // groups))
    best = np.sort(scores, axis=-1)[..., -(top_k // top_groups) :].sum(axis=-1)
    kept = best >= np.sort(best, axis=-1)[:, -top_groups, None]
    scores = np.where(kept[..., None], scores, -np.inf).reshape(-1, count)
    return scores >= np.sort(scores, axis=-1)[:, -top_k, None]


@pytest.mark.parametrize("model", ROUTED)
def test_the_variance_is_that_of_random_tokens_or_a_little_more(model):
    """Only groups of experts make it larger than needed. 8,000 tokens estimate it to 2 to 4 %, and
    all ranks together to less."""
    on_expert = chosen(8_000, *ROUTED[model])
    groups = ROUTED[model][2]
    for ranks in (2, 8, 16, 64):
        on_rank = on_expert.reshape(len(on_expert), ranks, -1).sum(axis=-1)
        least = 0.7 if groups > 1 else 0.97
        assert least < on_rank.var(axis=0).mean() / variance(*ROUTED[model], ranks) < 1.03
    p = ROUTED[model][1] / ROUTED[model][0]
    assert math.isclose(variance(*ROUTED[model], ROUTED[model][0]), p * (1 - p))


@pytest.mark.parametrize("model", ROUTED)
def test_a_token_reaches_as_many_ranks_as_random_tokens_or_a_few_more(model):
    """The mean of 8,000 tokens and all ranks is exact to 1 %. Only groups of experts make the
    probability larger than needed."""
    on_expert = chosen(8_000, *ROUTED[model])
    groups = ROUTED[model][2]
    for ranks in (2, 8, 16, 64):
        reached = on_expert.reshape(len(on_expert), ranks, -1).any(axis=-1).mean()
        least = 0.92 if groups > 1 else 0.99
        assert least < reached / reach(*ROUTED[model], ranks) < 1.01
    count, top_k = ROUTED[model][:2]
    assert math.isclose(reach(*ROUTED[model], count), top_k / count)
    assert reach(*ROUTED[model], 1) == 1


def test_ranks_that_hold_uneven_parts_of_groups_have_slots_for_more():
    on_rank = chosen(8_000, 24, 2, 6, 2).reshape(8_000, 4, 6).any(axis=-1).mean()
    assert on_rank <= reach(24, 2, 6, 2, 4) == 0.5


def test_tokens_need_fewer_slots_than_their_assignments():
    """A token of DeepSeek-V3 has eight experts in four of eight groups."""
    experts = MODELS["deepseek_v3"].experts
    random = replace(experts, routing="random")
    assert 0.5 < random.token_slots(32_768, 8) / 32_768 < 0.52
    assert 1.0 < random.rank_slots(32_768, 8) / 32_768 < 1.06
    # Any choice of experts finds slots with a factor of as many ranks.
    every = replace(experts, routing="learned", rank_capacity_factor=8)
    assert every.token_slots(1_000, 8) == 1_000
    assert replace(every, rank_capacity_factor=None).token_slots(1_000, 8) == 752  # a multiple of 8


def test_one_number_of_tokens_in_a_trillion_is_above_the_slots():
    """By the exact binomial distribution, for few tokens of an expert and for many."""
    for tokens, p in ((2_000, 1 / 32), (16_384, 1 / 32), (262_144, 1 / 128)):
        slots = enough(tokens, p, p * (1 - p))
        terms = np.arange(slots + 1, min(tokens, 2 * slots) + 1)
        logs = [
            math.lgamma(tokens + 1) - math.lgamma(n + 1) - math.lgamma(tokens - n + 1)
            + n * math.log(p) + (tokens - n) * math.log1p(-p) for n in terms
        ]  # fmt: skip
        normal = math.erfc(DEVIATIONS / math.sqrt(2)) / 2
        assert 0.3 * normal < np.exp(logs).sum() < 3 * normal
        assert SKEW == 8


def test_fewer_tokens_need_more_slots_for_each():
    recipe = recipes.load("gpt_oss_120b_mxfp8").on(PLANNED["gb200"])
    experts = recipes.resolve(recipe, 64).model.experts
    padding = [
        experts.rank_slots(tokens, 64) * 64 / (4 * tokens) for tokens in (4_096, 16_384, 81_920)
    ]
    assert padding == sorted(padding, reverse=True)
    assert padding[0] > 1.2 > 1.1 > padding[-1]
    assert experts.capacity(64 * 81_920) % SLOTS == 0


def test_other_routing_has_half_as_many_again():
    experts = ExpertsConfig(count=8, top_k=2, ffn=8, routing="learned")
    assert experts.rank_slots(800, 4) == 1.5 * 400
    assert replace(experts, routing="random").rank_slots(800, 4) < 1.5 * 400
    assert replace(experts, rank_capacity_factor=1.25).rank_slots(800, 4) == 1.25 * 400
