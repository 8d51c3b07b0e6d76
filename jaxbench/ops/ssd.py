"""State-space duality (Mamba-2; Dao and Gu 2024): the selective scan as matrix products over chunks
of the sequence, and the causal convolution before it.

Pure functions of what one device holds. `context` names the mesh axes over which the sequence is
split into consecutive shards; between shards travel one state per head and the last few tokens.

Dimension letters: B batch, S sequence, K chunks, Q and R tokens of a chunk, H heads of one group
(which share b and c), P head dim, N state, W taps, C channels.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxbench.recipe.model import SSD_CHUNK

Axes = tuple[str, ...]


def causal_conv(
    x: Float[Array, "B S C"],
    taps: Float[Array, "W C"],
    bias: Float[Array, "C"],
    context: Axes = (),
) -> Float[Array, "B S C"]:
    """Depthwise causal convolution in fp32: y[t] = bias + sum over w of taps[w] x[t - W + 1 + w].

    Before the sequence there are zeros, before a shard the last W - 1 tokens of the one before it.
    """
    width, length = len(taps), x.shape[1]
    halo = x[:, length - width + 1 :]
    if context:
        shards = jax.lax.axis_size(context)
        halo = jax.lax.ppermute(halo, context, [(i, i + 1) for i in range(shards - 1)])
    else:
        halo = jnp.zeros_like(halo)
    x = jnp.concatenate([halo, x], axis=1).astype(jnp.float32)
    return bias + sum(taps[w] * x[:, w : w + length] for w in range(width))


def scan(
    x: Float[Array, "B S H P"],
    dt: Float[Array, "B S H"],
    a: Float[Array, "H"],
    b: Float[Array, "B S N"],
    c: Float[Array, "B S N"],
    context: Axes = (),
) -> Float[Array, "B S H P"]:
    """y_t = c_t . s_t with the state s_t = exp(dt_t a) s_(t-1) + dt_t x_t (x) b_t, of one group.

    Four products per chunk, with operands in the dtype of `x` and sums in fp32 (Dao and Gu 2024,
    section 6): c b^T under the decay between its tokens; that times x; the state which a chunk
    leaves behind; and what the state before a chunk adds to its tokens. States are fp32. `dt` and
    `a` are fp32, `a` is negative. The square matrices of all chunks are held at once: call it for
    one group of heads at a time.
    """
    batch, length = dt.shape[:2]
    size = min(SSD_CHUNK, length)
    x, dt, b, c = (z.reshape(batch, length // size, size, *z.shape[2:]) for z in (x, dt, b, c))
    log = jnp.moveaxis(dt * a, 3, 2)  # B K H Q
    total = jnp.cumsum(log, axis=-1)
    to_end = jnp.moveaxis(jnp.exp(total[..., -1:] - total), 2, 3)
    u = x * dt[..., None]

    scores = segment_decay(log) * product("BKQN,BKRN->BKQR", c, b)[:, :, None]
    y = product("BKHQR,BKRHP->BKQHP", scores.astype(x.dtype), u.astype(x.dtype))
    left = product("BKQHP,BKQN->BKHPN", (u * to_end[..., None]).astype(x.dtype), b)
    before = states_before(total[..., -1], left, context)
    from_start = jnp.moveaxis(jnp.exp(total), 2, 3)
    y += from_start[..., None] * product("BKQN,BKHPN->BKQHP", c, before.astype(x.dtype))
    return y.reshape(batch, length, *y.shape[3:])


def states_before(
    log: Float[Array, "B K H"], left: Float[Array, "B K H P N"], context: Axes
) -> Float[Array, "B K H P N"]:
    """The state before each chunk, from what each leaves behind and the logarithm of its decay.

    Chunks of a shard first, as if nothing came before; then the shards among each other by the same
    rule; then what enters a shard decays to each of its chunks.
    """
    states = pass_on(log, left)
    if not context:
        return states[:, :-1]
    shard_log = jnp.sum(log, axis=1)
    shards = (
        jax.lax.all_gather(shard_log, context, axis=1),
        jax.lax.all_gather(states[:, -1], context, axis=1),
    )
    rank = jax.lax.axis_index(context)
    entering = jax.lax.dynamic_index_in_dim(pass_on(*shards), rank, axis=1)
    since_start = jnp.cumsum(log, axis=1) - log
    return states[:, :-1] + jnp.exp(since_start)[..., None, None] * entering


def pass_on(
    log: Float[Array, "B K H"], left: Float[Array, "B K H P N"]
) -> Float[Array, "B L H P N"]:
    """The fp32 states before each of K stretches and after the last (L = K + 1), from zero.

    One product with the decays between stretches instead of K dependent steps: their launches
    would take longer.
    """
    padded = jnp.pad(jnp.moveaxis(log, 1, 2), ((0, 0), (0, 0), (1, 0)))
    decay = segment_decay(padded)[..., 1:]
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("BHLK,BKHPN->BLHPN", decay, left, precision=exact)


def segment_decay(log: Float[Array, "*A Q"]) -> Float[Array, "*A Q Q"]:
    """exp of the sum of `log` over the steps after r up to t, for each pair (t, r); 0 where t < r.

    The difference of sums is masked before exp: a ratio of exponentials would overflow.
    """
    total = jnp.cumsum(log, axis=-1)
    steps = jnp.arange(log.shape[-1])
    causal = steps[:, None] >= steps
    return jnp.exp(jnp.where(causal, total[..., :, None] - total[..., None, :], -jnp.inf))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(equation: str, a: Array, b: Array) -> Array:
    """Einsum of two arrays of one dtype with its sums and result in fp32.

    Its gradients are products in that dtype too; JAX's own rule would multiply fp32 by bf16.
    """
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _product_forward(equation, a, b):
    return product(equation, a, b), (a, b)


def _product_backward(equation, operands, cotangent):
    _, vjp = jax.vjp(partial(jnp.einsum, equation), *operands)
    return vjp(cotangent.astype(operands[0].dtype))


product.defvjp(_product_forward, _product_backward)
