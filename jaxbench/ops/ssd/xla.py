"""The mixer in plain JAX, for any hardware and shape. It is the reference for the other
implementations."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxbench.base.scopes import SCAN
from jaxbench.ops.ssd.parts import Dims, Parameters
from jaxbench.recipe.mixers import SSD_CHUNK


def mixer(
    dims: Dims, projected: Float[Array, "B S G I"], parameters: Parameters
) -> Float[Array, "B S G F"]:
    """`ops.ssd.Implementation.mixer`, vectorised over groups, so that each kernel computes all of
    them.

    Only the inputs are saved for the backward pass, which recomputes the rest. The square matrices
    and states of the scan therefore exist for only one layer at a time.
    """

    groups = jax.vmap(partial(group, dims), in_axes=(2, 0), out_axes=2)
    return jax.checkpoint(groups, prevent_cse=False)(projected, parameters)


def group(
    dims: Dims, projected: Float[Array, "B S I"], parameters: Parameters
) -> Float[Array, "B S F"]:
    """The features of one group. The gate comes before the norm. Everything except the matmuls of
    the scan is in fp32."""
    z, dt = projected[..., : dims.inner], projected[..., -dims.heads :]
    convolved = conv_silu(dims, projected, parameters)
    x, b, c = jnp.split(convolved, [dims.inner, dims.inner + dims.state], axis=-1)
    x = x.reshape(*x.shape[:2], dims.heads, dims.head_dim)
    dt = jax.nn.softplus(dt.astype(jnp.float32) + parameters.dt_bias)
    with jax.named_scope(SCAN):
        y = scan(x, dt, -jnp.exp(parameters.a_log), b, c)
    y += parameters.d[:, None] * x
    y = y.reshape(z.shape) * jax.nn.silu(z.astype(jnp.float32))
    y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + dims.eps)
    return (y * parameters.gain).astype(projected.dtype)


def conv_silu(
    dims: Dims, projected: Float[Array, "B S I"], parameters: Parameters
) -> Float[Array, "B S C"]:
    """The inputs x, b and c of the scan: convolved and activated in fp32."""
    columns = projected[..., dims.inner : dims.inner + dims.channels]
    convolved = causal_conv(columns, parameters.taps, parameters.bias)
    return jax.nn.silu(convolved).astype(projected.dtype)


def causal_conv(
    x: Float[Array, "B S C"],
    taps: Float[Array, "W C"],
    bias: Float[Array, "C"],
) -> Float[Array, "B S C"]:
    """Depthwise causal convolution in fp32: y[t] = bias + sum over w of taps[w] x[t - W + 1 + w].

    The tokens before the sequence are zeros.
    """
    width, (batch, length, channels) = len(taps), x.shape
    before = jnp.zeros((batch, width - 1, channels), x.dtype)
    x = jnp.concatenate([before, x], axis=1).astype(jnp.float32)
    return bias + sum(taps[w] * x[:, w : w + length] for w in range(width))


def scan(
    x: Float[Array, "B S H P"],
    dt: Float[Array, "B S H"],
    a: Float[Array, "H"],
    b: Float[Array, "B S N"],
    c: Float[Array, "B S N"],
) -> Float[Array, "B S H P"]:
    """Scan of one group: y_t = c_t . s_t with the state s_t = exp(dt_t a) s_(t-1) + dt_t x_t (x)
    b_t.

    Each chunk takes four matmuls, with operands in the dtype of `x` and sums in fp32 (Dao and Gu
    2024, section 6). The first is c b^T, which we multiply by the decay between its tokens. The
    second multiplies the result by x. The third gives the state at the end of a chunk that starts
    from zero. The fourth gives the contribution of the state before a chunk to its tokens.

    Their results, including the states, are in the dtype of `x` too, except c b^T, which is fp32.
    In bf16 that halves their bytes. They are rounded once more, as the operands of the next matmul
    would be (errors: `docs/design/scan.md`). `dt` and `a` are fp32, and `a` is negative.
    """
    batch, length = dt.shape[:2]
    size = min(SSD_CHUNK, length)
    x, dt, b, c = (z.reshape(batch, length // size, size, *z.shape[2:]) for z in (x, dt, b, c))
    log = jnp.moveaxis(dt * a, 3, 2)  # B K H Q
    total = jnp.cumsum(log, axis=-1)
    weight = segment_decay(log) * jnp.moveaxis(dt, 3, 2)[..., None, :]
    scores = weight * product("BKQN,BKRN->BKQR", c, b)[:, :, None]
    y = jnp.einsum("BKHQR,BKRHP->BKQHP", scores.astype(x.dtype), x)

    to_end = jnp.moveaxis(jnp.exp(total[..., -1:] - total), 2, 3)
    kept = (x * (dt * to_end)[..., None]).astype(x.dtype)
    left = jnp.einsum("BKQHP,BKQN->BKHPN", kept, b)
    before = states_before(total[..., -1], left).astype(x.dtype)
    from_start = jnp.moveaxis(jnp.exp(total), 2, 3)
    y = y + from_start[..., None] * jnp.einsum("BKQN,BKHPN->BKQHP", c, before)
    return y.reshape(batch, length, *y.shape[3:])


def states_before(
    log: Float[Array, "B K H"], left: Float[Array, "B K H P N"]
) -> Float[Array, "B K H P N"]:
    """The state before each chunk; it is zero before the first one. `left` is the state at the end
    of a chunk that starts from zero. `log` is the logarithm of the chunk's total decay.

    This is a single matmul with the decays between chunks. K dependent steps would take longer to
    launch. Each chunk's contribution to a state is rounded once, however far apart they are.
    """
    padded = jnp.pad(jnp.moveaxis(log, 1, 2), ((0, 0), (0, 0), (1, 0)))
    decay = segment_decay(padded)[..., :-1, 1:].astype(left.dtype)
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("BHLK,BKHPN->BLHPN", decay, left, precision=exact)


def segment_decay(log: Float[Array, "*A Q"]) -> Float[Array, "*A Q Q"]:
    """exp of the sum of `log` over the steps after r up to t, for each pair (t, r); 0 where t < r.

    The difference of sums is masked before exp, because a ratio of exponentials would overflow.
    """
    total = jnp.cumsum(log, axis=-1)
    steps = jnp.arange(log.shape[-1])
    causal = steps[:, None] >= steps
    return jnp.exp(jnp.where(causal, total[..., :, None] - total[..., None, :], -jnp.inf))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(equation: str, a: Array, b: Array) -> Array:
    """Einsum of two arrays of one dtype, with its sums and result in fp32.

    Its gradients are matmuls in that dtype too. JAX's own rule would multiply fp32 by bf16.
    """
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _product_backward(equation, operands, cotangent):
    _, vjp = jax.vjp(partial(jnp.einsum, equation), *operands)
    return vjp(cotangent.astype(operands[0].dtype))


product.defvjp(lambda equation, a, b: (product(equation, a, b), (a, b)), _product_backward)
