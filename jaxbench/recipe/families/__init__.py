"""The model families, a file of dimensions for each; `MODELS` is their registry.

A new family is a file with its `ModelConfig`s and a line here. It has `SOURCE_FLOPS` too where its
source counts model FLOPs otherwise than in full.
"""

from collections.abc import Callable

from jaxbench.recipe.families import deepseek, gpt_oss, grok, llama, nemotron, qwen
from jaxbench.recipe.model import ModelConfig

FAMILIES = (llama, grok, nemotron, qwen, deepseek, gpt_oss)
MODELS = {
    f"{cfg.family.replace('.', '')}_{cfg.size}": cfg for family in FAMILIES for cfg in family.MODELS
}
SOURCE_FLOPS: dict[str, Callable[[ModelConfig, int], float]] = {
    name: formula
    for family in FAMILIES
    for name, formula in getattr(family, "SOURCE_FLOPS", {}).items()
}
"""By family, the model FLOPs of one sequence of a length by the formula of the source."""
