"""Grouped matmuls in plain XLA: `jax.lax.ragged_dot` of permuted copies. The reference, and what
CPUs run; on GPUs XLA multiplies every row with the weights of all groups."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxbench.ops.grouped.groups import BLOCK, Groups

SUMMED_OVER_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def to_permuted(
    x: Float[Array, "A D"], w: Float[Array, "E D N"], groups: Groups
) -> Float[Array, "R N"]:
    """`Implementation.to_permuted`."""
    return jax.lax.ragged_dot(_take(x, groups.row), w, _sizes(groups))


def from_permuted(
    y: Float[Array, "R N"], w: Float[Array, "E D N"], groups: Groups
) -> Float[Array, "A D"]:
    """`Implementation.from_permuted`."""
    return _take(jax.lax.ragged_dot(y, jnp.swapaxes(w, 1, 2), _sizes(groups)), groups.place)


def weights(
    x: Float[Array, "A D"], y: Float[Array, "R N"], groups: Groups
) -> Float[Array, "E D N"]:
    """`Implementation.weights`."""
    return jax.lax.ragged_dot_general(_take(x, groups.row), y, _sizes(groups), SUMMED_OVER_ROWS)


def _take(x: Array, index: Int[Array, " R"]) -> Array:
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def _sizes(groups: Groups) -> Int[Array, " E"]:
    """Rows of each group with their padding."""
    return jnp.diff(groups.ends, prepend=0) * BLOCK
