"""Block-scaled formats: each block of consecutive elements along the contraction has one scale.

MXFP8 (OCP Microscaling 1.0, but scales are rounded up as in NVIDIA's Transformer Engine): a block
is 32 e4m3 values with one e8m0 scale, a power of two. NVFP4 (NVIDIA 2025, arXiv 2509.25149): a
block is 16 e2m1 values with an e4m3 scale, and the whole tensor has one fp32 scale. Both follow the
definitions of NVIDIA/TransformerEngine (common/cast/mxfp8, common/cast/nvfp4).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxbench import mesh
from jaxbench.recipe.settings import BLOCKS

F32, U32 = jnp.float32, jnp.uint32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """A quantized tensor. An element is value x scale x inverse.

    `values` have the shape of the tensor. `scales` have the same shape, except that quantized
    dimensions count blocks. `inverse` is the fp32 scale of the whole tensor; it is None in MXFP8.
    """

    values: Any
    scales: Any
    inverse: Any = None

    @property
    def format(self) -> str:
        """The name of its format in `FORMATS`. The tensor must not be packed."""
        return next(name for name, of in FORMATS.items() if of.values == self.values.dtype)

    def map(self, function: Callable[[Array], Array]) -> "Blocks":
        """Applies a function, such as a gather or a transposition, to both values and scales."""
        return Blocks(function(self.values), function(self.scales), self.inverse)

    def packed(self) -> "Blocks":
        """The tensor as bytes, which every collective and slice can move. Pairs of 4-bit values
        along the last dimension share a byte."""
        values = (_pairs if self.format == "nvfp4" else as_bytes)(self.values)
        return Blocks(values, as_bytes(self.scales), self.inverse)

    def unpacked(self, of: "Format") -> "Blocks":
        """The inverse of `packed`."""
        values = _unpaired(self.values) if of is NVFP4 else _as(self.values, of.values)
        return Blocks(values, _as(self.scales, of.scales), self.inverse)


@dataclass(frozen=True)
class Format:
    """A block-scaled format: the number of elements in a block, and the dtypes of values and
    scales."""

    size: int
    values: Any
    scales: Any


MXFP8 = Format(BLOCKS["mxfp8"], jnp.float8_e4m3fn, jnp.float8_e8m0fnu)
NVFP4 = Format(BLOCKS["nvfp4"], jnp.float4_e2m1fn, jnp.float8_e4m3fn)
FORMATS = {"mxfp8": MXFP8, "nvfp4": NVFP4}
"""The formats, by their names in `settings.Precision.dtype`."""

E4M3_MAX, E2M1_MAX = 448.0, 6.0
LARGEST = float(jnp.finfo(jnp.float32).max)
"""The largest factor of a tensor. That of tiny numbers would be infinite, and of zeros NaN."""


def mxfp8(x: Array, axis: int) -> Blocks:
    """Quantizes `x` to MXFP8 with blocks along `axis`, whose size is a multiple of 32."""
    values, exponents = mxfp8_parts(x, axis)
    return Blocks(values, _as(exponents, MXFP8.scales))


def mxfp8_parts(x: Array, axis: int) -> tuple[Array, Array]:
    """(values, biased exponents of the scales) of `mxfp8`. Kernels call it too."""
    wide = split(x.astype(F32), axis, MXFP8.size)
    exponents = exponents_of(jnp.max(jnp.abs(wide), axis + 1))
    # We make 2^(127 - e) from its bits. e is at most 247, or 255 if the amax is not finite.
    factor = jax.lax.bitcast_convert_type((254 - exponents).astype(U32) << 23, F32)
    factor = jnp.where(exponents == 255, jnp.nan, factor)
    values = jnp.clip(wide * jnp.expand_dims(factor, axis + 1), -E4M3_MAX, E4M3_MAX)
    return values.astype(MXFP8.values).reshape(x.shape), exponents.astype(jnp.uint8)


def exponents_of(amax: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """The biased exponents of MXFP8's scales: amax / 448 rounded up to a power of two. The exponent
    is 0 for zeros and 255 if the amax is not finite.

    We work on the bits of the amax, since CPUs flush a subnormal quotient to zero. 448 is 1.75 x
    2^8.
    """
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)  # not negative
    exponent, above = bits >> 23, ((bits & 0x7FFFFF) > 0x600000).astype(jnp.int32)
    return jnp.where(exponent == 255, 255, jnp.maximum(exponent - 8 + above, 0))


def nvfp4(
    x: Array,
    axes: tuple[int, ...],
    amax: Float[Array, ""],
    uniform: Callable[[tuple[int, ...]], Array] | None = None,
) -> Blocks:
    """Quantizes `x` to NVFP4 with the `amax` of the whole tensor. Blocks have 16 elements along one
    axis, or 16 x 16 along two. Values are rounded to nearest even, or stochastically if `uniform`
    is given, which draws from [0, 1)."""
    encode = encode_of(amax)
    values, scales = nvfp4_parts(x, axes, encode, uniform and uniform(x.shape))
    return Blocks(values.astype(NVFP4.values), scales, 1 / encode)


def encode_of(amax: Array) -> Array:
    """The factor that a tensor in NVFP4 is multiplied by, given its amax."""
    encode = jnp.minimum(jnp.where(amax == 0, 1.0, E4M3_MAX * E2M1_MAX / amax), LARGEST)
    # Without the barrier XLA would divide once by a product instead of twice, which rounds
    # differently.
    return jax.lax.optimization_barrier(encode)


def nvfp4_parts(
    x: Array, axes: tuple[int, ...], encode: Array, uniform: Array | None
) -> tuple[Array, Array]:
    """(values in fp32, scales in e4m3) of `nvfp4`. Kernels call it too."""
    wide = x.astype(F32)
    in_block: list[int] = []
    for axis in sorted(axes):
        wide = split(wide, axis + len(in_block), NVFP4.size)
        in_block.append(axis + len(in_block) + 1)
    of_block = jnp.abs(wide)
    for axis in reversed(in_block):
        of_block = jnp.max(of_block, axis)
    scales = jnp.minimum(of_block * (encode * F32(1 / E2M1_MAX)), E4M3_MAX).astype(NVFP4.scales)
    divisor = scales.astype(F32)
    for axis in in_block:
        divisor = jnp.expand_dims(divisor, axis)
    values = jnp.where(divisor == 0, 0.0, wide * jnp.minimum(encode / divisor, LARGEST))
    return rounded_e2m1(values.reshape(x.shape), uniform), scales


def rounded_e2m1(x: Array, uniform: Array | None = None) -> Array:
    """Rounds values to e2m1 and keeps their dtype. Absolute values are at most 6. Without `uniform`
    it rounds to nearest even. With `uniform`, from [0, 1), it rounds to one of the two neighbours,
    to the nearer one more often, so that the mean is x.

    It computes in fp32, because XLA's own conversion first rounds to fp16.
    """
    size = jnp.minimum(jnp.abs(x), E2M1_MAX)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    exact = size / step
    if uniform is None:  # kernels in Pallas cannot round to even
        steps = jnp.floor(exact + 0.5)
        odd = steps - 2 * jnp.floor(steps / 2)
        steps -= jnp.where(steps - exact == 0.5, odd, 0.0)
    else:
        steps = jnp.floor(exact + uniform)
    return jnp.sign(x) * jnp.minimum(steps * step, E2M1_MAX)


def e2m1_bits(x: Array) -> Int[Array, "*D"]:
    """The bits of fp32 values that e2m1 can represent."""
    size = jnp.abs(x)
    steps = jnp.where(size < 2, 2 * size, jnp.where(size < 4, size + 2, size / 2 + 4))
    negative = jax.lax.bitcast_convert_type(x, jnp.int32) < 0  # of zeros too
    return steps.astype(jnp.int32) + jnp.where(negative, 8, 0)


def dequantized(x: Blocks) -> Array:
    """The represented tensor, in fp32."""
    scales = x.scales.astype(F32)
    for axis, (whole, blocks) in enumerate(zip(x.values.shape, x.scales.shape, strict=True)):
        scales = jnp.repeat(scales, whole // blocks, axis)
    exact = x.values.astype(F32) * scales
    return exact if x.inverse is None else exact * x.inverse


def _as(x: Array, dtype: Any) -> Array:
    return jax.lax.bitcast_convert_type(x, dtype)


def as_bytes(x: Array) -> Array:
    """The bytes of an array of 8-bit numbers. On a GPU it also takes 4-bit numbers, two per
    byte."""
    return _as(x.reshape(*x.shape[:-1], -1, 2) if x.dtype == NVFP4.values else x, jnp.uint8)


def _pairs(x: Array) -> Array:
    """Packs pairs of 4-bit values into bytes, with the first of a pair in the low bits. A GPU uses
    this too, because XLA fuses it with whatever computes the values; it does not fuse a bitcast."""
    bits = e2m1_bits(x.astype(F32)).astype(jnp.uint8).reshape(*x.shape[:-1], -1, 2)
    return bits[..., 0] | bits[..., 1] << 4


def _unpaired(x: Array) -> Array:
    """The inverse of `_pairs`. On a GPU this is a bitcast, which moves nothing. XLA's compiler for
    CPUs has no bitcast between bytes and 4-bit types."""
    shape = *x.shape[:-1], 2 * x.shape[-1]
    if mesh.platform() == "gpu":
        return _as(x, NVFP4.values).reshape(shape)
    bits = jnp.stack([x & 15, x >> 4], -1).reshape(shape).astype(jnp.int32)
    code = bits & 7
    size = jnp.where(code < 4, code / 2, jnp.where(code < 6, code - 2, 2 * code - 8))
    return jnp.where(bits > 7, -size, size).astype(NVFP4.values)


def split(x: Array, axis: int, size: int) -> Array:
    """Splits the dimension `axis` into two: blocks, and the elements of each block."""
    return x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
