"""The layers of a model as repeating blocks. Each block is compiled once, and the weights of its
repeats are stacked."""

from functools import cache
from itertools import accumulate

from jaxbench.recipe.model import ModelConfig


def repeating_blocks(cfg: ModelConfig) -> list[tuple[str, int]]:
    """Blocks as (layer pattern, number of repeats). In a pipeline the stages are made of the last
    one."""
    return cut(cfg.layer_patterns)


def stacks(cfg: ModelConfig) -> list[tuple[str, int]]:
    """The blocks of all stacks of weights: the repeating blocks, and the block of multi-token
    prediction."""
    further = [(cfg.prediction.pattern, 1)] if cfg.prediction else []
    return repeating_blocks(cfg) + further


def first_layers(cfg: ModelConfig) -> list[range] | list[None]:
    """The numbers of the first layers of each stack's blocks, for draws of routing. Layers count
    through all stacks. None for each stack unless routing is random."""
    blocks = stacks(cfg)
    if cfg.experts is None or cfg.experts.routing != "random":
        return [None] * len(blocks)
    ends = list(accumulate(len(pattern) * times for pattern, times in blocks))
    return [
        range(end - len(pattern) * times, end, len(pattern))
        for (pattern, times), end in zip(blocks, ends, strict=True)
    ]


@cache
def cut(layers: tuple[str, ...]) -> list[tuple[str, int]]:
    """Splits layer patterns into repeating blocks, (pattern, repeats).

    Each block is compiled once. So we choose a split with the fewest layers in all of its blocks,
    and among these one with the fewest blocks. For the 118 layers of Nemotron-H 56B this is
    `M-M-M-M*-M-` ten times, then `M-` four times.
    """
    pattern, size = "".join(layers), len(layers[0])
    best: dict[int, tuple[int, list[tuple[str, int]]]] = {len(pattern): (0, [])}
    for start in reversed(range(0, len(pattern), size)):
        cuts = []
        for length in range(size, len(pattern) - start + 1, size):
            block, stop = pattern[start : start + length], start
            while pattern.startswith(block, stop):
                stop += length
                compiled, rest = best[stop]
                cuts.append((compiled + length, [(block, (stop - start) // length), *rest]))
        best[start] = min(cuts, key=lambda cut: (cut[0], len(cut[1])))
    return best[0][1]
