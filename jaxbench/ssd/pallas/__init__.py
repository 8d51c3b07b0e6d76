"""The mixer in Pallas kernels for NVIDIA GPUs from Hopper on: convolution, scan, gate and norm,
each with a backward pass; XLA makes the time steps, which are small.

Start with `mixer`; `call` says how kernels are called, `scan` and `gradients` are the scan's.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxbench.recipe.model import Mamba
from jaxbench.ssd import xla
from jaxbench.ssd.context import entering
from jaxbench.ssd.pallas.call import TARGET, Tuning, undeprecated, work
from jaxbench.ssd.pallas.conv import conv_silu
from jaxbench.ssd.pallas.gate import gate_norm
from jaxbench.ssd.pallas.scan import scan
from jaxbench.ssd.parts import Axes, Dims, Parameters

__all__ = ["RULES", "Tuning", "mixer", "refusal", "undeprecated"]

RULES = {TARGET: work}

TUNED = Tuning()

LEAST, MOST = 16, 64 * 256
"""Sides of a product in a Triton kernel; elements of a state that fit a program's registers, with
what is around them its shared memory (213 of 227 KiB)."""


def refusal(mamba: Mamba, dtype: str, length: int) -> str | None:
    """Why the kernels cannot compute mixers in a dtype, on `length` tokens of a sequence; None if
    they can."""
    for name in ("head_dim", "state"):
        size = getattr(mamba, name)
        if size < LEAST or not _power_of_two(size):
            return f"model.mamba.{name} = {size}: a power of two from {LEAST} on"
    if not _power_of_two(mamba.inner):
        return f"model.mamba: {mamba.inner} features of a group, no power of two"
    if (elements := mamba.head_dim * mamba.state) > MOST:
        return f"model.mamba: head_dim x state = {elements}, more than {MOST}"
    if dtype == "fp32":
        return "precision.dtype = fp32, which takes twice a program's shared memory"
    if length % (chunk := TUNED.chunk):
        return f"{length} tokens of a sequence on a rank, no multiple of {chunk}"
    return None


def _power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def mixer(
    dims: Dims,
    context: Axes,
    projected: Float[Array, "B S G I"],
    own: Parameters,
    tuning: Tuning = TUNED,
) -> Float[Array, "B S G F"]:
    """`ssd.Implementation.mixer`. The backward pass is left with the inputs, and computes the rest
    again; what the scan keeps for its gradients is written only then."""
    return _recomputed(tuning, dims, context, projected, own)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _recomputed(tuning, dims, context, projected, own):
    return _mixer(tuning, dims, context, projected, own)


def _forward(tuning, dims, context, projected, own):
    return _mixer(tuning, dims, context, projected, own), (projected, own)


def _backward(tuning, dims, context, inputs, cotangent):
    _, vjp = jax.vjp(partial(_mixer, tuning, dims, context), *inputs)
    return vjp(cotangent)


_recomputed.defvjp(_forward, _backward)


def _mixer(tuning: Tuning, dims: Dims, context: Axes, projected, own: Parameters):
    if context:
        one = partial(xla.conv_silu, dims, context)
        u = jax.vmap(one, in_axes=(2, 0), out_axes=2)(projected, own)
    else:
        u = conv_silu(tuning, dims, projected, own.taps, own.bias)
    with jax.named_scope("ssd.scan"):  # for profiles and plans
        dt, a = _times(dims, projected, own)
        state = _entering(dims, context, u, dt, a) if context else None
        y = scan(tuning, dims, u, dt, a, own.d.reshape(-1), state)
    return gate_norm(tuning, dims, y, projected, own.gain)


def _times(dims: Dims, projected, own: Parameters):
    """(dt `B A S`, a `A`), fp32."""
    raw = projected[..., -dims.heads :].astype(jnp.float32)
    dt = jax.nn.softplus(raw + own.dt_bias)
    dt = jnp.moveaxis(dt.reshape(*dt.shape[:2], -1), 1, 2)
    return dt, -jnp.exp(own.a_log).reshape(-1)


def _entering(dims: Dims, context: Axes, u, dt, a) -> Float[Array, "B A N P"]:
    """The state that enters this shard of the sequence. What each shard leaves behind, if nothing
    enters it, is one product over its tokens."""
    batch, length, groups, _ = u.shape
    total = jnp.cumsum(dt * a[:, None], axis=-1)
    weight = dt * jnp.exp(total[..., -1:] - total)
    weight = jnp.moveaxis(weight.reshape(batch, groups, dims.heads, length), 3, 1)
    x, b, _ = jnp.split(u, [dims.inner, dims.inner + dims.state], axis=-1)
    x = x.reshape(batch, length, groups, dims.heads, dims.head_dim) * weight[..., None]
    left = xla.product("BSGHP,BSGN->BGHPN", x.astype(u.dtype), b)
    left = left.reshape(batch, -1, dims.head_dim, dims.state)
    return jnp.swapaxes(entering(total[..., -1], left, context), 2, 3)
