"""Every implementation of a mixer against the recurrence in float64, values and all gradients; the
Pallas kernels in Pallas's interpreter."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrence import Case, errors

from jaxbench.ops import ssd
from jaxbench.ops.ssd import pallas, xla
from jaxbench.ops.ssd.pallas import conv

TUNING = pallas.Tuning(chunk=32, part=16, columns=64)
MIXERS = {"xla": xla.mixer, "pallas": partial(pallas.mixer, tuning=TUNING)}
SEVERAL_CHUNKS = Case(2, 96, 2, ssd.Dims(4, 16, 32, eps=1e-5))
ONE_CHUNK = Case(1, 32, 8, ssd.Dims(2, 16, 256, eps=1e-5))
"""With fewer features than state, and several programs for the columns of one state."""

EPS32 = np.finfo(np.float32).eps


@dataclass(frozen=True)
class LongSteps(Case):
    """Time steps of about 10: decays of e^-1600 within a chunk, whose ratios would be 0/0, next to
    heads that forget next to nothing."""

    def inputs(self):
        projected, parameters, cotangent = super().inputs()
        rates = np.resize([5.0, 1.0, 0.001], parameters.a_log.shape)
        dt_bias = np.full_like(parameters.dt_bias, 10.0)
        return projected, parameters._replace(dt_bias=dt_bias, a_log=np.log(rates)), cotangent


CASES = {
    "several": SEVERAL_CHUNKS,
    "one": ONE_CHUNK,
    "long steps": LongSteps(2, 96, 2, ssd.Dims(4, 16, 32, eps=1e-5)),
}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(xla, "SSD_CHUNK", 32)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_in_float32(name, case):
    # Sums of 32 to 256 products under decays: some roundings each, next to none of them alike; of
    # terms of both signs in the gradients of time steps and decays.
    distances = errors(partial(MIXERS[name], case.dims), case, jnp.float32)
    assert max(distances.values()) < 50 * EPS32, distances


@pytest.mark.parametrize("name", MIXERS)
def test_in_bfloat16(name):
    # A rounding to bf16 is a relative error of 2^-9 / sqrt(3) = 0.0011; several go into each sum.
    distances = errors(partial(MIXERS[name], SEVERAL_CHUNKS.dims), SEVERAL_CHUNKS, jnp.bfloat16)
    assert max(distances.values()) < 6 * 2**-9 / np.sqrt(3), distances


def test_products_of_bf16_are_summed_in_fp32_and_differentiated_in_bf16():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(64, 64)), jnp.bfloat16) for _ in range(2))
    out, vjp = jax.vjp(partial(xla.product, "XY,YZ->XZ"), a, b)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(out, exact, atol=64 * EPS32 * np.abs(exact).max(), rtol=0)
    assert out.dtype == jnp.float32
    backward = jax.jit(vjp).lower(out).as_text().splitlines()
    products = [line for line in backward if "dot_general" in line]
    assert len(products) == 2
    assert all("xf32" not in line for line in products)


def convolved(dims, length, monkeypatch):
    """The tokens that the two passes of a convolution read of its input, by every program."""
    read, reads = conv._at, []

    def noted(x, at):
        jax.debug.callback(lambda at: reads.append(np.ravel(at)), at)
        return read(x, at)

    monkeypatch.setattr(conv, "_at", noted)
    projected = jnp.ones((1, length, 1, dims.columns), jnp.bfloat16)
    taps, bias = jnp.ones((1, 4, dims.channels)), jnp.ones((1, dims.channels))
    convolve = partial(conv.conv_silu, dims)
    out, gradient = jax.block_until_ready(jax.vjp(convolve, projected, taps, bias))
    jax.effects_barrier()
    forward = len(reads)
    jax.block_until_ready(gradient(out))
    jax.effects_barrier()
    return np.concatenate(reads[:forward]), np.concatenate(reads[forward:])


def test_the_convolution_reads_no_token_beyond_the_sequence(monkeypatch):
    """On a GPU memory behind an array may be NaN, and NaN times zero is NaN; an interpreter clamps
    the index."""
    for tokens in convolved(ssd.Dims(2, 16, 16, eps=1e-5), 64, monkeypatch):
        assert max(tokens) == 63


def test_the_gradient_of_the_convolution_reads_each_token_once(monkeypatch):
    """A program reads three more tokens on both sides of those that it walks through."""
    dims, length = ssd.Dims(2, 16, 16, eps=1e-5), 512
    _, tokens = convolved(dims, length, monkeypatch)
    tiles, walks = dims.channels // 16, length // 256
    assert len(tokens) == tiles * (length + 6 * walks)
