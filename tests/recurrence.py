"""The recurrence of a Mamba-2 mixer between its projections, token by token in float64, and the
errors of an implementation."""

from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxbench.ops import ssd

RESULTS = ("out", "d projected", *(f"d {name}" for name in ssd.Parameters._fields))


@dataclass(frozen=True)
class Case:
    """Random inputs of a mixer, drawn as a model's are."""

    batch: int
    length: int
    groups: int
    dims: ssd.Dims

    def inputs(self) -> tuple[np.ndarray, ssd.Parameters, np.ndarray]:
        """(input projection, parameters, cotangent of the result)."""
        rng, dims, groups, heads = np.random.default_rng(0), self.dims, self.groups, self.dims.heads
        tokens = self.batch, self.length, groups
        dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), (groups, heads)))
        parameters = ssd.Parameters(
            taps=rng.uniform(-0.5, 0.5, (groups, 4, dims.channels)),
            bias=rng.uniform(-0.5, 0.5, (groups, dims.channels)),
            dt_bias=dt + np.log(-np.expm1(-dt)),
            a_log=np.log(rng.uniform(1, 16, (groups, heads))),
            d=rng.normal(size=(groups, heads)),
            gain=rng.normal(size=(groups, dims.inner)),
        )
        return (rng.normal(size=(*tokens, dims.columns)), parameters,
                rng.normal(size=(*tokens, dims.inner)))  # fmt: skip


def mixer(dims: ssd.Dims, projected: jax.Array, parameters: ssd.Parameters) -> jax.Array:
    """`ops.ssd.Implementation.mixer` without its chunks."""
    batch, length, groups, _ = projected.shape
    z, convolved, dt = jnp.split(projected, [dims.inner, dims.inner + dims.channels], axis=-1)
    padded = jnp.pad(convolved, ((0, 0), (3, 0), (0, 0), (0, 0)))
    convolved = parameters.bias + sum(
        parameters.taps[:, w] * padded[:, w : w + length] for w in range(4)
    )
    x, b, c = jnp.split(
        convolved * jax.nn.sigmoid(convolved), [dims.inner, dims.inner + dims.state], axis=-1
    )
    x = x.reshape(batch, length, groups, dims.heads, dims.head_dim)
    dt = jnp.logaddexp(dt + parameters.dt_bias, 0)

    def token(state, operands):
        x, dt, b, c = operands
        decay = jnp.exp(-dt * jnp.exp(parameters.a_log))
        state = decay[..., None, None] * state + jnp.einsum("bgh,bghp,bgn->bghpn", dt, x, b)
        return state, jnp.einsum("bghpn,bgn->bghp", state, c) + parameters.d[..., None] * x

    start = jnp.zeros((*x.shape[:1], *x.shape[2:], dims.state), x.dtype)
    _, y = jax.lax.scan(token, start, [jnp.moveaxis(v, 1, 0) for v in (x, dt, b, c)])
    v = jnp.moveaxis(y, 0, 1).reshape(z.shape) * z * jax.nn.sigmoid(z)
    return v / jnp.sqrt(jnp.mean(v * v, axis=-1, keepdims=True) + dims.eps) * parameters.gain


def results(mix, projected, parameters, cotangent) -> list[np.ndarray]:
    """The result and all gradients of a mixer, by `RESULTS`."""

    def run(projected, parameters, cotangent):
        out, vjp = jax.vjp(mix, projected, parameters)
        return out, vjp(cotangent.astype(out.dtype))

    return [
        np.asarray(x).astype(np.float64)
        for x in jax.tree.leaves(jax.jit(run)(projected, parameters, cotangent))
    ]


@cache
def expected(case: Case, dtype) -> list[np.ndarray]:
    """The `results` of the recurrence, for inputs rounded to `dtype`."""
    projected, parameters, cotangent = case.inputs()
    with jax.enable_x64(True):
        rounded = (np.asarray(x.astype(dtype).astype(np.float64)) for x in (projected, cotangent))
        parameters = jax.tree.map(lambda x: x.astype(np.float32).astype(np.float64), parameters)
        projected, cotangent = rounded
        return results(partial(mixer, case.dims), projected, parameters, cotangent)


def errors(mix, case: Case, dtype) -> dict[str, float]:
    """Relative errors of a mixer to the recurrence by `RESULTS`, in the Euclidean norm, for inputs
    rounded to `dtype`."""
    projected, parameters, cotangent = case.inputs()
    parameters = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), parameters)
    projected, cotangent = (jnp.asarray(x, dtype) for x in (projected, cotangent))
    pairs = zip(results(mix, projected, parameters, cotangent), expected(case, dtype), strict=True)
    distances = [float(np.linalg.norm(a - e) / np.linalg.norm(e)) for a, e in pairs]
    return dict(zip(RESULTS, distances, strict=True))
