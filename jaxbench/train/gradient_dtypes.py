"""Dtypes by their names in recipes, and those in which gradients are summed over microbatches and
reduced between devices. The loads of experts are fp32 in both, since bf16 could not count them."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxbench.models.layers import LoadBias
from jaxbench.ops.quantized.scaling import is_variable
from jaxbench.recipe.settings import Precision

DTYPES = {"fp32": jnp.float32, **dict.fromkeys(("bf16", "fp8", "mxfp8", "nvfp4"), jnp.bfloat16)}


def sum_dtype(variable: Any, precision: Precision) -> Any:
    """The dtype in which gradients of a variable are summed over microbatches."""
    return jnp.float32 if isinstance(variable, LoadBias) else DTYPES[precision.accumulate]


def to_reduce(gradients: Any, precision: Precision) -> Any:
    """Gradients in the dtype in which they are reduced between devices."""
    if precision.reduce == "accumulate":
        return gradients
    dtype = DTYPES[precision.reduce]

    def cast(g: Any) -> Any:
        return g if isinstance(g, LoadBias) else jax.tree.map(lambda a: a.astype(dtype), g)

    return jax.tree.map(cast, gradients, is_leaf=is_variable)
