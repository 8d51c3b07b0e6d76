"""The model families, a file of dimensions for each; `MODELS` is their registry.

Every file of this folder is a family: `MODELS` are its `ModelConfig`s. It has `SOURCE_FLOPS` too
where its source counts model FLOPs otherwise than in full.
"""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

from jaxbench.recipe.model import ModelConfig

FAMILIES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
MODELS: dict[str, ModelConfig] = {
    f"{cfg.family.replace('.', '')}_{cfg.size}": cfg for family in FAMILIES for cfg in family.MODELS
}
SOURCE_FLOPS: dict[str, Callable[[ModelConfig, int], float]] = {
    name: formula
    for family in FAMILIES
    for name, formula in getattr(family, "SOURCE_FLOPS", {}).items()
}
"""By family, the model FLOPs of one sequence of a length by the formula of the source."""
