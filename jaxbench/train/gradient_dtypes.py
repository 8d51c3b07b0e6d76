"""The dtype in which gradients are summed over microbatches and reduced between devices. The loads
of experts are summed in fp32, since bf16 could not count them."""

from typing import Any

import jax.numpy as jnp

from jaxbench.models.layers import LoadBias
from jaxbench.recipe.settings import Precision

DTYPES = {"fp32": jnp.float32, **dict.fromkeys(("bf16", "fp8", "mxfp8", "nvfp4"), jnp.bfloat16)}


def sum_dtype(variable: Any, precision: Precision) -> Any:
    """The dtype in which gradients of a variable are summed over microbatches."""
    return jnp.float32 if isinstance(variable, LoadBias) else DTYPES[precision.accumulate]
