"""XLA's Mamba-2 scan and convolution against a sequential recurrence in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import mesh_of, tiny_run

from jaxbench import mesh
from jaxbench.ssd import xla

EPS32 = np.finfo(np.float32).eps
RNG = np.random.default_rng(0)
BATCH, LENGTH, HEADS, DIM, STATE = 2, 32, 3, 4, 5
SHAPES = {
    "x": (BATCH, LENGTH, HEADS, DIM), "dt": (BATCH, LENGTH, HEADS), "a": (HEADS,),
    "b": (BATCH, LENGTH, STATE), "c": (BATCH, LENGTH, STATE),
}  # fmt: skip


def inputs():
    """Random inputs of a scan. Half of the tokens forget within a few steps, half remember all."""
    arrays = {name: RNG.normal(size=shape) for name, shape in SHAPES.items()}
    arrays["dt"] = np.exp(RNG.uniform(np.log(1e-3), 0, size=SHAPES["dt"]))
    arrays["a"] = -RNG.uniform(1, 16, size=HEADS)
    return arrays


def recurrence(x, dt, a, b, c):
    """y_t = c_t . s_t, s_t = exp(dt_t a) s_(t-1) + dt_t x_t (x) b_t, token by token."""
    state, y = np.zeros((BATCH, HEADS, DIM, STATE)), np.zeros_like(x)
    for t in range(x.shape[1]):
        decay = np.exp(dt[:, t] * a)[:, :, None, None]
        state = decay * state + np.einsum("bh,bhp,bn->bhpn", dt[:, t], x[:, t], b[:, t])
        y[:, t] = np.einsum("bhpn,bn->bhp", state, c[:, t])
    return y


def sharded(function, dims):
    """`function(*arrays, context)` in a `shard_map` of the current mesh, arrays split by `dims`."""
    specs = [mesh.spec(d, mesh.ACTIVATION) for d in dims]

    def local(*arrays):
        own = [x if d else mesh.own_copy(x) for x, d in zip(arrays, dims, strict=True)]
        return function(*own, mesh.axes("seq"))

    return lambda *arrays: jax.shard_map(local, in_specs=tuple(specs), out_specs=specs[0])(*arrays)


def on(context: int):
    return mesh_of(tiny_run(f"parallelism.context={context}", devices=context))


def put(x, dims):
    return jax.device_put(jnp.asarray(x, jnp.float32), mesh.spec(dims, mesh.ACTIVATION))


SCAN_DIMS = ("batch seq head_dim head_dim", "batch seq head_dim", "", "batch seq inner",
             "batch seq inner")  # fmt: skip


@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 4, 8, 128])
def test_scan_and_its_gradients(chunk, context, monkeypatch):
    monkeypatch.setattr(xla, "SSD_CHUNK", chunk)
    arrays, cotangent = inputs(), RNG.normal(size=SHAPES["x"])
    with on(context):
        scan = sharded(xla.scan, SCAN_DIMS)
        placed = [put(x, d) for x, d in zip(arrays.values(), SCAN_DIMS, strict=True)]
        out, vjp = jax.vjp(jax.jit(scan), *placed)
        grads = [np.asarray(g, np.float64) for g in vjp(put(cotangent, SCAN_DIMS[0]))]
    expected = recurrence(**arrays)
    # Sums of up to 32 x 5 products in fp32, under decays whose exponents reach 500.
    tolerance = 200 * EPS32 * np.abs(expected).max()
    np.testing.assert_allclose(out, expected, atol=tolerance, rtol=0)
    # The gradient along random directions, one input at a time, against central differences in
    # float64, which are exact to 1e-8.
    for (name, x), grad in zip(arrays.items(), grads, strict=True):
        direction, step = RNG.normal(size=x.shape) * (0.1 * np.abs(x) if name == "dt" else 1), 1e-5
        ends = [
            np.sum(recurrence(**{**arrays, name: x + s * direction}) * cotangent)
            for s in (step, -step)
        ]
        terms = grad * direction
        along = (ends[0] - ends[1]) / (2 * step)
        assert abs(terms.sum() - along) < 100 * EPS32 * np.abs(terms).sum() + 1e-7, name


def test_states_of_long_chunks_neither_overflow_nor_lose_the_recent_past():
    """Decays of e^-1600 within a chunk: as ratios of exponentials they would be 0/0."""
    arrays = inputs()
    arrays["dt"] = np.full(SHAPES["dt"], 10.0)
    arrays["a"] = np.array([-5.0, -1.0, -0.001])
    with on(1):
        out = xla.scan(*(jnp.asarray(x, jnp.float32) for x in arrays.values()))
    expected = recurrence(**arrays)
    tolerance = 50 * EPS32 * np.abs(expected).max()
    np.testing.assert_allclose(out, expected, atol=tolerance, rtol=0)


def test_products_of_bf16_are_summed_in_fp32_and_differentiated_in_bf16():
    a, b = (jnp.asarray(RNG.normal(size=(64, 64)), jnp.bfloat16) for _ in range(2))
    out, vjp = jax.vjp(lambda a, b: xla.product("XY,YZ->XZ", a, b), a, b)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(out, exact, atol=64 * EPS32 * np.abs(exact).max(), rtol=0)
    assert out.dtype == jnp.float32
    backward = jax.jit(vjp).lower(out).as_text().splitlines()
    products = [line for line in backward if "dot_general" in line]
    assert len(products) == 2
    assert all("xf32" not in line for line in products)


@pytest.mark.parametrize("context", [1, 2, 4])
def test_causal_convolution_and_its_gradients(context):
    x, taps, bias = RNG.normal(size=(2, 16, 6)), RNG.normal(size=(4, 6)), RNG.normal(size=6)
    cotangent = RNG.normal(size=x.shape)
    padded = np.pad(x, ((0, 0), (3, 0), (0, 0)))
    expected = bias + sum(taps[w] * padded[:, w : w + 16] for w in range(4))
    dims = ("batch seq inner", "", "")
    with on(context):
        convolve = sharded(xla.causal_conv, dims)
        placed = [put(v, d) for v, d in zip((x, taps, bias), dims, strict=True)]
        out, vjp = jax.vjp(jax.jit(convolve), *placed)
        dx, dtaps, dbias = vjp(put(cotangent, dims[0]))
    np.testing.assert_allclose(out, expected, atol=20 * EPS32, rtol=0)
    after = np.pad(cotangent, ((0, 0), (0, 3), (0, 0)))
    expected_dx = sum(taps[w] * after[:, 3 - w : 19 - w] for w in range(4))
    expected_dtaps = [np.sum(padded[:, w : w + 16] * cotangent, axis=(0, 1)) for w in range(4)]
    np.testing.assert_allclose(dx, expected_dx, atol=20 * EPS32, rtol=0)
    # Sums over 32 tokens.
    np.testing.assert_allclose(dtaps, expected_dtaps, atol=200 * EPS32, rtol=0)
    np.testing.assert_allclose(dbias, cotangent.sum((0, 1)), atol=200 * EPS32, rtol=0)
