"""The matmul in parts of bf16 against one in double precision, next to XLA's in fp32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on, put

from jaxbench import mesh
from jaxbench.ops import fp32_dot

RNG = np.random.default_rng(3)


def operands(dtype):
    """Activation, weight and output gradient, with numbers of very different sizes."""
    x, w = RNG.normal(size=(2, 96, 256)) ** 3, RNG.normal(size=(256, 24)) ** 3
    dy = 1e-4 * RNG.normal(size=(2, 96, 24))
    return jnp.asarray(x, dtype), jnp.asarray(w, jnp.float32), jnp.asarray(dy, jnp.float32)


def by_dot(x, w, dy):
    """(result, gradient of x, gradient of w)."""
    spec = mesh.spec("batch shard_seq assignment", mesh.ACTIVATION)
    y, vjp = jax.vjp(lambda x, w: fp32_dot.dot(x, w, spec), x, w)
    return y, *vjp(dy)


def plain(x, w, dy):
    exact = jax.lax.Precision.HIGHEST
    x = x.astype(jnp.float32)
    return (
        jnp.einsum("BSD,DE->BSE", x, w, precision=exact),
        jnp.einsum("BSE,DE->BSD", dy, w, precision=exact),
        jnp.einsum("BSD,BSE->DE", x, dy, precision=exact),
    )


def error(got, want):
    return np.sqrt(np.mean((np.asarray(got, np.float64) - want) ** 2))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_matmul_and_its_gradients_are_as_exact_as_in_fp32(compiled):
    arrays = operands(jnp.bfloat16)
    wide = [np.asarray(a, np.float64) for a in arrays]
    want = plain_in_double(*wide)
    with on("one device"):
        got = (jax.jit(by_dot) if compiled else by_dot)(*arrays)
        of_fp32 = plain(*arrays)
    for n in (0, 2):
        assert got[n].dtype == jnp.float32
        # The sums have another order. With two parts the error would be ten times as large.
        assert error(got[n], want[n]) <= 2 * error(of_fp32[n], want[n])
    # bf16 rounds by 2^-8. Of each product the two parts leave out three terms of 2^-16 at most.
    assert got[1].dtype == jnp.bfloat16
    sizes = np.einsum("BSE,DE->BSD", abs(wide[2]), abs(wide[1]))
    wrong = abs(np.asarray(got[1], np.float64) - want[1])
    assert np.all(wrong <= 1.01 * 2**-8 * abs(want[1]) + 3 * 2**-16 * sizes)


def plain_in_double(x, w, dy):
    equations = ("BSD,DE->BSE", x, w), ("BSE,DE->BSD", dy, w), ("BSD,BSE->DE", x, dy)
    return [np.einsum(*each) for each in equations]


def test_sums_over_ranks_are_those_of_one_device():
    x, w, dy = operands(jnp.bfloat16)
    with on("one device"):
        want = by_dot(x, w, dy)
    with on("all"):
        x = put(jnp.tile(x, (2, 1, 1)), "batch shard_seq embed", dtype=x.dtype)
        dy = put(jnp.tile(dy, (2, 1, 1)), "batch shard_seq assignment")
        y, dx, dw = by_dot(x, put(w, "router_embed router", mesh.WEIGHT), dy)
    y, dx, dw, *want = (np.asarray(a, np.float32) for a in (y, dx, dw, *want))
    # Sums in another order. bf16 may round them to a neighbour.
    for got, one, tolerance in ((y[:2], want[0], 1e-6), (dx[2:], want[1], 2**-8),
                                (dw / 2, want[2], 1e-6)):  # fmt: skip
        np.testing.assert_allclose(got, one, rtol=0, atol=tolerance * abs(one).max())


def test_an_activation_in_fp32_is_multiplied_in_fp32():
    arrays = operands(jnp.float32)
    with on("one device"):
        for got, want in zip(by_dot(*arrays), plain(*arrays), strict=True):
            np.testing.assert_array_equal(got, want)
