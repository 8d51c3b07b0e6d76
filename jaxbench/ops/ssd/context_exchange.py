"""Exchange between ranks that hold consecutive shards of a sequence. They exchange the last tokens
before a convolution, and one state per head."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxbench.ops.ssd.parts import Axes


def tokens_before(x: Float[Array, "B S C"], count: int, context: Axes) -> Float[Array, "B s C"]:
    """The last `count` tokens of the shard before this one. Before the sequence they are zeros."""
    last = x[:, x.shape[1] - count :]
    if not context:
        return jnp.zeros_like(last)
    shards = jax.lax.axis_size(context)
    return jax.lax.ppermute(last, context, [(i, i + 1) for i in range(shards - 1)])


def entering(
    log: Float[Array, "B H"], left: Float[Array, "B H P N"], context: Axes
) -> Float[Array, "B H P N"]:
    """The state before the first token of this rank's shard. `left` is the state at the end of the
    shard if the shard started from zero. `log` is the logarithm of the shard's total decay."""
    shards = (jax.lax.all_gather(z, context, axis=1) for z in (log, left))
    rank = jax.lax.axis_index(context)
    return jax.lax.dynamic_index_in_dim(scan_states(*shards), rank, axis=1, keepdims=False)


def scan_states(
    log: Float[Array, "B K H"], left: Float[Array, "B K H P N"]
) -> Float[Array, "B K H P N"]:
    """The state before each of K consecutive parts of a sequence; it is zero before the first part.
    `log` and `left` of each part are as in `entering`.

    This is a single matmul with the decays between parts. K dependent steps would take longer to
    launch. Each part's contribution to a state is rounded once, however far apart they are.
    """
    padded = jnp.pad(jnp.moveaxis(log, 1, 2), ((0, 0), (0, 0), (1, 0)))
    decay = segment_decay(padded)[..., :-1, 1:].astype(left.dtype)
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("BHLK,BKHPN->BLHPN", decay, left, precision=exact)


def end_state(
    log: Float[Array, "B K H"], left: Float[Array, "B K H P N"]
) -> tuple[Float[Array, "B H"], Float[Array, "B H P N"]]:
    """(logarithm of the total decay, end state) of K parts that start from a zero state."""
    total = jnp.cumsum(log, axis=1)
    to_end = jnp.exp(total[:, -1:] - total).astype(left.dtype)
    exact = jax.lax.Precision.HIGHEST
    return total[:, -1], jnp.einsum("BKH,BKHPN->BHPN", to_end, left, precision=exact)


def segment_decay(log: Float[Array, "*A Q"]) -> Float[Array, "*A Q Q"]:
    """exp of the sum of `log` over the steps after r up to t, for each pair (t, r); 0 where t < r.

    The difference of sums is masked before exp, because a ratio of exponentials would overflow.
    """
    total = jnp.cumsum(log, axis=-1)
    steps = jnp.arange(log.shape[-1])
    causal = steps[:, None] >= steps
    return jnp.exp(jnp.where(causal, total[..., :, None] - total[..., None, :], -jnp.inf))
