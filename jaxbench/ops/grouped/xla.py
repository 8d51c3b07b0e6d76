"""Grouped matmuls in plain XLA: a batch of matmuls, one for each block of rows, each with a copy of
its weight. This is the reference, and CPUs use it.

(`jax.lax.ragged_dot` multiplies every row by the weights of all groups. For 8 groups that is 12
times the FLOPs on H100 and B200.)
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxbench.ops.grouped.groups import BLOCK, Groups, Scales, product_of, result_dtype, take
from jaxbench.ops.implementations import Task
from jaxbench.recipe.settings import BLOCKS


def refusal(task: Task) -> str | None:
    """Why this implementation cannot multiply; None if it can."""
    if task.platform == "gpu" and task.dtype in ("fp8", *BLOCKS):
        return f"multiplies in bf16 on a GPU, not in {task.dtype.upper()}"
    return None


def to_permuted(
    x: Float[Array, "A D"], w: Float[Array, "E D N"], groups: Groups, scales: Scales | None = None
) -> Float[Array, "R N"]:
    """`Implementation.to_permuted`."""
    return _rows("bRD,bDN->bRN", _blocks(take(x, groups.source)), _copies(w, groups), scales)


def from_permuted(
    y: Float[Array, "R N"], w: Float[Array, "E D N"], groups: Groups, scales: Scales | None = None
) -> Float[Array, "R D"]:
    """`Implementation.from_permuted`."""
    return _rows("bRN,bDN->bRD", _blocks(y), _copies(w, groups), scales)


def weights(
    x: Float[Array, "A D"], y: Float[Array, "R N"], groups: Groups, scales: Scales | None = None
) -> Float[Array, "E D N"]:
    """`Implementation.weights`."""
    blocks = _multiply("bRD,bRN->bDN", _blocks(take(x, groups.source)), _blocks(y), scales)
    total = jax.ops.segment_sum(blocks, groups.group, groups.ends.size)
    return total.astype(result_dtype(x))


def _multiply(equation: str, a: Array, b: Array, scales: Scales | None) -> Array:
    """A matmul in fp32. FP8 operands are first converted to bf16, which is exact."""
    a, b = (x.astype(result_dtype(x)) for x in (a, b))
    y = jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
    scale = product_of(scales)
    return y if scale is None else y * scale


def _rows(equation: str, x: Array, w: Array, scales: Scales | None) -> Array:
    y = _multiply(equation, x, w, scales).astype(result_dtype(x))
    return y.reshape(-1, y.shape[-1])


def _blocks(x: Float[Array, "R D"]) -> Float[Array, "blocks rows D"]:
    return x.reshape(-1, BLOCK, x.shape[1])


def _copies(w: Float[Array, "E D N"], groups: Groups) -> Float[Array, "blocks D N"]:
    return jnp.take(w, groups.group, axis=0, mode="clip")
