"""Grouped matmuls as one batched matmul of a library, for groups of one size (`equal_groups`).

The padding is multiplied too. A plain matmul is so much faster than a grouped one on some GPUs that
this pays (docs/design/experts.md). Rows are gathered into the slots of their group beforehand, FP8
rows after they are quantized, and block-scaled rows by the kernel that quantizes them. That kernel
is slower than a gather, so rows that have several uses on average are quantized once each, and then
gathered, where this saves time.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxbench import mesh
from jaxbench.ops.dense import contract
from jaxbench.ops.grouped.groups import Groups, Scales, result_dtype, take, take_bytes
from jaxbench.ops.quantized.block_formats import Blocks
from jaxbench.ops.quantized.block_scaled import Matmuls, multiply, quantize_activation
from jaxbench.ops.quantized.kernels import BOTH, SPAN, Rows
from jaxbench.ops.quantized.operand import multiply as multiply_fp8
from jaxbench.recipe.settings import Precision

FEWER = 0.75
"""Quantizing arriving rows and gathering the results is faster than doing both at once with
permuted rows if the arriving ones are fewer than this share: by the forecast's rates of about 2.5
and 6.5 TB/s for a quantization and a gather."""


def to_permuted(
    x: Float[Array, "A D"], w: Float[Array, "E D N"], groups: Groups, scales: Scales | None = None
) -> Float[Array, "R N"]:
    """`Implementation.to_permuted`."""
    return _merged(_multiply("ERD,EDN->ERN", _permuted(x, groups), w, scales))


def from_permuted(
    y: Float[Array, "R N"], w: Float[Array, "E D N"], groups: Groups, scales: Scales | None = None
) -> Float[Array, "R D"]:
    """`Implementation.from_permuted`."""
    return _merged(_multiply("ERN,EDN->ERD", _split(y, groups), w, scales))


def weights(
    x: Float[Array, "A D"], y: Float[Array, "R N"], groups: Groups, scales: Scales | None = None
) -> Float[Array, "E D N"]:
    """`Implementation.weights`."""
    return _multiply("ERD,ERN->EDN", _permuted(x, groups), _split(y, groups), scales)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockMatmuls(Matmuls):
    """`Matmuls` of the weights of groups, by XLA's block-scaled matmul."""

    groups: Groups

    def quantize(
        self,
        x: Array,
        precision: Precision,
        side: str,
        draw: Array | None = None,
        wanted: tuple[bool, bool] = BOTH,
    ) -> tuple[Blocks, ...]:
        """`Matmuls.quantize`. Blocks along tokens have to be made of gathered rows, and the kernel
        that makes them makes those along features too if both are wanted."""
        few = x.shape[1] < FEWER * self.groups.row.size
        if side == "last" or not few or wanted != (True, False):
            return super().quantize(x, precision, side, draw, wanted)
        (blocks,) = quantize_activation(x, precision, None, draw, wanted)
        take = partial(take_bytes, index=self.groups.source)
        return (blocks.map(lambda part: _split(take(part[0]), self.groups)),)

    def rows(self, x: Array, side: str) -> tuple[Array, Rows | None]:
        groups = self.groups
        if side == "last":
            return _split(x[0], groups), None
        spans = jnp.ones(groups.row.size // SPAN, jnp.int32)
        return x, Rows(groups.source, spans, groups.expected, groups.ends.size)

    def by_weight(self, rows: Blocks, w: Blocks, side: str) -> Array:
        y = _merged(multiply(rows, w))
        return y if side == "first" else self.groups.arriving(y)


def _multiply(equation: str, a: Array, b: Array, scales: Scales | None) -> Array:
    """A matmul in bf16. On a GPU XLA makes an FP8 matmul of FP8 operands, with the first scale.

    The second one multiplies the result there. With a scale on both operands XLA (jax 0.11.2) makes
    bf16 matmuls of two of the three. The product of both is no bf16 number, so its rounding would
    be in every element.
    """
    if scales is None:
        return contract(equation, a, b)
    if mesh.platform() != "gpu":
        return multiply_fp8(equation, a, scales[0], b, scales[1])
    a, b = (x.astype(result_dtype(x)) for x in (a, b))
    y = contract(equation, a * scales[0].astype(a.dtype), b)
    return (y.astype(jnp.float32) * scales[1]).astype(y.dtype)


def _permuted(x: Float[Array, "A D"], groups: Groups) -> Float[Array, "E rows D"]:
    return _split(take(x, groups.source), groups)


def _split(x: Shaped[Array, "R D"], groups: Groups) -> Shaped[Array, "E rows D"]:
    return x.reshape(groups.ends.size, -1, x.shape[1])


def _merged(x: Float[Array, "E rows D"]) -> Float[Array, "R D"]:
    return x.reshape(-1, x.shape[2])
