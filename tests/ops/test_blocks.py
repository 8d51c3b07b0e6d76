"""Block-scaled formats against numpy, bit for bit."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxbench.ops import draws
from jaxbench.ops.quantized import hadamard
from jaxbench.ops.quantized.block_formats import FORMATS, dequantized, mxfp8, nvfp4, rounded_e2m1

RNG = np.random.default_rng(7)
TINY = np.finfo(np.float32).tiny


def numpy_mxfp8(x):
    """(e4m3 values, biased exponents) of rows of blocks of 32, by the definition in
    TransformerEngine's ptx_arch_spec.cuh."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    exact = np.abs(blocks).max(-1) * np.float32(1 / 448)
    mantissa, exponent = np.frexp(exact)  # exact = mantissa 2^exponent, mantissa from 0.5 to 1
    power = np.where(mantissa == 0.5, exponent - 1, exponent)  # 2^power >= exact
    power = np.where(exact == 0, -127, np.maximum(power, -127))
    factor = np.ldexp(np.float32(1), -power)[..., None]
    values = np.clip(blocks * factor, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return values.reshape(x.shape), (power + 127).astype(np.uint8)


def numpy_nvfp4(x, amax, square=False):
    """(e2m1 values, e4m3 scales, fp32 inverse) of rows of blocks of 16, or of 16 x 16."""
    f32 = np.float32
    encode = f32(1) if amax == 0 else f32(448 * 6) / f32(amax)
    size = 16 if square else 1
    blocks = x.astype(f32).reshape(x.shape[0] // size, size, x.shape[1] // 16, 16)
    scales = np.minimum(np.abs(blocks).max((1, 3)) * (encode * f32(1 / 6)), f32(448))
    scales = scales.astype(ml_dtypes.float8_e4m3fn)
    divisor = scales.astype(f32)[:, None, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(divisor == 0, f32(0), blocks * (encode / divisor))
    values = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return values.reshape(x.shape), scales, f32(1) / encode


def edge_cases():
    """Rows of 32: every power of two as the largest, with smaller ones next to it; subnormals,
    zeros, 448 and 6 with their neighbours."""
    rows = [np.ldexp(1.0, e - np.arange(32) % 20) for e in range(-126, 120)]
    rows += [np.full(32, TINY / 2**k) for k in (0, 1, 5, 22)]
    for edge in (448.0, 6.0, 464.0, 1.75, 3.5):
        near = [np.nextafter(np.float32(edge), np.float32(to)) for to in (0, 1e9)]
        rows += [np.r_[value, np.linspace(-value, value, 31)] for value in (edge, *near)]
    return np.array([np.zeros(32), *rows, *RNG.normal(size=(50, 32))], np.float32)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_mxfp8_is_the_definition_bit_for_bit(dtype):
    x = edge_cases().astype(dtype)
    values, exponents = numpy_mxfp8(x)
    blocks = jax.jit(partial(mxfp8, axis=1))(x)
    got = np.asarray(blocks.scales).view(np.uint8)
    np.testing.assert_array_equal(got, exponents)
    flushed = np.abs(x.astype(np.float32)) < TINY  # subnormal fp32 numbers are zeros on a CPU
    values = np.where(flushed, 0, values).astype(ml_dtypes.float8_e4m3fn)
    zero = np.asarray(blocks.values) == 0
    np.testing.assert_array_equal(np.asarray(blocks.values)[~zero], values[~zero])
    np.testing.assert_array_equal(values[zero].astype(np.float32), 0)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_nvfp4_is_the_definition_bit_for_bit(dtype, square):
    x = edge_cases().astype(dtype)[: 256 if square else None]
    for amax in (np.abs(x.astype(np.float32)).max(), np.float32(448), np.float32(6), 0):
        values, scales, inverse = numpy_nvfp4(x, amax, square)
        blocks = jax.jit(partial(nvfp4, axes=(0, 1) if square else (1,)))(x, amax=jnp.float32(amax))
        np.testing.assert_array_equal(
            np.asarray(blocks.scales).view(np.uint8), scales.view(np.uint8)
        )
        np.testing.assert_array_equal(
            np.asarray(blocks.values).astype(np.float32), values.astype(np.float32)
        )
        assert np.asarray(blocks.inverse) == inverse


def test_what_is_not_finite_stays_so():
    x = np.ones((3, 32), np.float32)
    x[0, 3], x[1, 5] = np.inf, np.nan
    wide = np.asarray(dequantized(mxfp8(jnp.asarray(x), 1)))
    assert not np.isfinite(wide[:2]).any()
    np.testing.assert_array_equal(wide[2], 1)
    for row in (0, 1):
        amax = jnp.max(jnp.abs(x[row]))
        wide = np.asarray(dequantized(nvfp4(jnp.asarray(x[row : row + 1]), (1,), amax)))
        assert not np.isfinite(wide).any()


@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_along_another_dimension(axis):
    x = RNG.normal(size=(64, 96, 5)).astype(np.float32)
    moved = np.moveaxis(x, axis, -1)
    values, exponents = numpy_mxfp8(np.ascontiguousarray(moved))
    blocks = mxfp8(jnp.asarray(x), axis)
    np.testing.assert_array_equal(np.moveaxis(np.asarray(blocks.values), axis, -1), values)
    scales = np.moveaxis(np.asarray(blocks.scales).view(np.uint8), axis, -1)
    np.testing.assert_array_equal(scales, exponents)


def test_packed_blocks_come_back():
    x = jnp.asarray(RNG.normal(size=(32, 64)), jnp.float32)
    for blocks, of in (
        (mxfp8(x, 0), FORMATS["mxfp8"]), (nvfp4(x, (1,), jnp.max(jnp.abs(x))), FORMATS["nvfp4"])
    ):  # fmt: skip
        packed = blocks.packed()
        assert packed.values.dtype == packed.scales.dtype == jnp.uint8
        np.testing.assert_array_equal(dequantized(packed.unpacked(of)), dequantized(blocks))


def test_stochastic_rounding_is_unbiased():
    """The mean over 4,096 draws is within 4 standard errors of each value; draws are uniform and
    differ with the seed."""
    x = np.r_[np.linspace(-6, 6, 101), 0.1, 0.24, 2.9, 5.99].astype(np.float32)
    draw = draws.uniform(draws.fold(jnp.uint32(0), 3), (4096, x.size))
    rounded = np.asarray(rounded_e2m1(jnp.asarray(x), draw))
    grid = np.unique(np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    assert np.isin(rounded, grid).all()
    error = np.maximum(rounded.std(0), 1e-3) / 64
    np.testing.assert_array_less(np.abs(rounded.mean(0) - x), 4 * error)
    other = draws.uniform(draws.fold(jnp.uint32(0), 4), draw.shape)
    assert abs(np.corrcoef(np.ravel(draw), np.ravel(other))[0, 1]) < 4 / np.sqrt(draw.size)


def test_draws_are_uniform_and_independent_of_their_neighbours():
    draw = np.asarray(draws.uniform(draws.fold(jnp.uint32(5), 1), (512, 512)))
    counts = np.histogram(draw, 64, (0, 1))[0]
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 103  # chi^2 of 63, p 0.001
    for a, b in ((draw[1:], draw[:-1]), (draw[:, 1:], draw[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / 512


def test_the_hadamard_transform_cancels_exactly():
    """H diag(s)^2 H / 16 is the identity: of whole numbers, whose sums are exact, the transformed
    product is the product."""
    matrix, h = np.asarray(hadamard.matrix()), np.ones((1, 1))
    while len(h) < hadamard.SIZE:
        h = np.block([[h, h], [h, -h]])
    np.testing.assert_array_equal(matrix, np.diag(hadamard.SIGNS) @ h / 4)
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(16))
    a, b = (RNG.integers(-8, 9, size=(48, n)).astype(np.float32) for n in (3, 5))
    left, right = (np.asarray(hadamard.transformed(jnp.asarray(m), 0)) for m in (a, b))
    np.testing.assert_array_equal(left.T @ right, a.T @ b)


@pytest.mark.parametrize("largest", [1e-34, 1e-36, 1e-38])
def test_tiny_numbers_in_nvfp4_are_finite(largest):
    """A factor of 1e39 would be infinite, and zeros times infinity NaN."""
    x = jnp.asarray([[largest] * 8 + [0] * 8 + [1e-38 * largest] * 16], jnp.float32)
    found = np.asarray(dequantized(nvfp4(x, (1,), jnp.max(x))))
    assert np.isfinite(found).all()
    assert not found[0, 8:].any()
