"""How many slots experts need so that random routing drops no token.

The number of tokens that choose an expert, or a rank of experts, is a sum over thousands of
independent tokens, so it is normally distributed, except for a small skew. The fewer tokens go to
their experts at a time, the more slots they need, relative to a fair share.
"""

import math

DEVIATIONS = 7.0
"""There are slots for so many standard deviations above the mean. One number of tokens in 8e11 is
larger. In the steps that count, a run on hundreds of GPUs draws at most 1e9 of them, so fewer than
one run in 700 drops a token."""

SKEW = (DEVIATIONS**2 - 1) / 6
"""Further slots, for the skew of the distribution: the first term of the expansion of Cornish and
Fisher, for a Poisson distribution."""


def enough(tokens: int, mean: float, variance: float) -> int:
    """The slots for so many tokens, if one token needs `mean` slots with this variance."""
    return math.ceil(tokens * mean + DEVIATIONS * math.sqrt(tokens * variance) + SKEW)


def reach(count: int, top_k: int, groups: int, top_groups: int, ranks: int) -> float:
    """The probability that at least one of a token's experts is on one of so many ranks.

    A token chooses `top_groups` of `groups`, and then equally many experts of each chosen group,
    both without replacement and each with the same probability. Real tokens choose a little less
    evenly among the experts of their groups, so this is an upper bound, by up to 8 %. Without
    groups it is exact. If ranks do not hold whole groups or equal parts of one, it is the bound of
    a token that has no two experts on one rank.
    """
    if groups % ranks and ranks % groups:
        return min(1.0, top_k / ranks)
    on_rank, size = max(1, groups // ranks), count // groups
    in_group = count // ranks // on_rank  # the rank's experts of each of its groups
    chosen = top_k // top_groups
    no_group = math.comb(groups - on_rank, top_groups) / math.comb(groups, top_groups)
    no_expert = math.comb(size - in_group, chosen) / math.comb(size, chosen)
    return (1 - no_group) * (1 - no_expert)


def variance(count: int, top_k: int, groups: int, top_groups: int, ranks: int) -> float:
    """The variance of the number of a token's experts that are on one of so many ranks.

    A token chooses `top_groups` of `groups` and then `top_k` of their experts, both without
    replacement and each with the same probability, which gives hypergeometric distributions. If
    there are groups, real tokens choose a little more evenly, because the best groups have several
    good experts each; so this is an upper bound, by up to 30 % if each rank holds whole groups or
    an equal part of one.
    """
    candidates = count * top_groups // groups
    on_rank = max(1, groups // ranks)  # of a single group, a rank may have only a part
    chosen = on_rank * top_groups / groups
    spread = chosen * (1 - on_rank / groups) * (groups - top_groups) / max(1, groups - 1)
    # The mean square of the rank's share of the candidates. The mean is 1 / ranks.
    square = (1 + spread / chosen**2) / ranks**2
    without_replacement = (candidates - top_k) / max(1, candidates - 1)
    return top_k * without_replacement * (1 / ranks - square) + top_k**2 * (square - 1 / ranks**2)
