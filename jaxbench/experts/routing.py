"""Routing of tokens to experts: the choice, the load-balance loss, and the figures of a step.

An *assignment* is one of the k experts that a token is sent to; `experts.dispatch` sends it.
Dimension letters as in `ops`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from jaxbench import mesh
from jaxbench.recipe.model import ExpertsConfig


def choose(
    logits: Float[Array, "B S E"], cfg: ExpertsConfig
) -> tuple[Float[Array, "B S k"], Int[Array, "B S k"]]:
    """(gates, experts) of each token's assignments; the gates are fp32 and carry the gradient.

    `topk_softmax`: softmax over the largest logits (Megatron). `softmax_topk`: the largest of the
    softmax over all, not normalised again (Grok-1). Of equal logits the first expert wins. Balanced
    routing assigns experts in turn.
    """

    def in_turn(logits):
        assignments = mesh.indices("shard_seq", logits.shape[1])[:, None] * cfg.top_k
        assignments += jnp.arange(cfg.top_k)
        return jnp.broadcast_to(assignments % cfg.count, (*logits.shape[:2], cfg.top_k))

    if cfg.routing == "balanced":
        experts = mesh.on_each_device(in_turn, PartitionSpec(*mesh.partition(logits)))(logits)
    else:
        experts = jax.lax.top_k(jax.lax.stop_gradient(logits), cfg.top_k)[1]
    values = jax.nn.softmax(logits) if cfg.router == "softmax_topk" else logits
    chosen = experts[..., None] == jnp.arange(cfg.count)
    gates = jnp.sum(jnp.where(chosen, values[..., None, :], 0.0), axis=-1)
    return (gates if cfg.router == "softmax_topk" else jax.nn.softmax(gates)), experts


def random_logits(
    logits: Float[Array, "B S E"], router: Float[Array, "D E"]
) -> Float[Array, "B S E"]:
    """Standard normal numbers in place of the logits, with the gradient of the logits: what
    Megatron calls forced load balancing (`RandomSTE`, megatron/core/transformer/moe/moe_utils.py).
    The loads of experts are multinomial.

    The numbers depend on the token's position and sequence in the microbatch, on any mesh alike,
    and on the layer and step by the bits of the router's weights.
    """

    def local(logits, router):
        bits = jax.lax.bitcast_convert_type(router[0, :2], jnp.uint32)
        key = jax.random.wrap_key_data(bits, impl="threefry2x32")
        sequences, tokens = map(mesh.indices, ("batch", "shard_seq"), logits.shape[:2])

        def draw(sequence, token):
            of_token = jax.random.fold_in(jax.random.fold_in(key, sequence), token)
            return jax.random.normal(of_token, logits.shape[2:])

        return jax.vmap(lambda s: jax.vmap(lambda t: draw(s, t))(tokens))(sequences)

    spec = PartitionSpec(*mesh.partition(logits))
    drawn = mesh.on_each_device(local, spec, check_vma=False)(logits, jax.lax.stop_gradient(router))
    return drawn + (logits - jax.lax.stop_gradient(logits))


def balance_loss(
    logits: Float[Array, "B S E"], experts: Int[Array, "B S k"]
) -> tuple[Float[Array, " B"], Int[Array, "B E"]]:
    """(load-balance loss, assignments of each expert) of each sequence, before any are dropped.

    The loss is E sum_e F_e P_e, with F_e expert e's share of the assignments and P_e its mean
    softmax over all experts (Fedus et al. 2021; Megatron takes it for each sequence). It is 1 when
    both are uniform; only P carries a gradient.
    """
    count, length = logits.shape[-1], mesh.whole_seq(experts.shape[1])
    chosen = experts[..., None] == jnp.arange(count)
    load = mesh.sum_seq(chosen.astype(jnp.int32), axis=(1, 2))
    share = load / (length * experts.shape[2])
    mean = mesh.sum_seq(jax.nn.softmax(logits)) / length
    return count * jnp.sum(share * mean, axis=-1), load


Figures = dict[str, Array]
"""Routing figures of a step: mean balance loss; load of each expert over a fair share, and that of
the busiest expert of any layer; share of assignments dropped. Empty without experts."""


def with_balance_loss(
    loss: Array, segments: list, coefficient: float
) -> tuple[Float[Array, ""], Figures]:
    """(the loss with the gradient, but not the value, of all layers' load-balance losses, figures).

    `segments` has for each segment of layers (balance loss `"L B"`, load `"L B E"`, dropped
    assignments `"L B"`).
    """
    layers = [figures for segment in segments for figures in segment]
    if not layers:
        return loss, {}
    losses, load, dropped = (jnp.concatenate(parts) for parts in zip(*layers, strict=True))
    total = coefficient * jnp.sum(jnp.mean(losses, axis=1))
    step_figures = jax.lax.stop_gradient(figures(losses, load, dropped))
    return loss + (total - jax.lax.stop_gradient(total)), step_figures


def figures(
    losses: Float[Array, "L B"], load: Num[Array, "L B E"], dropped: Num[Array, "L B"]
) -> Figures:
    """`Figures` of one forward pass."""
    load = jnp.sum(load, axis=1)
    share = load / jnp.mean(load, axis=1, keepdims=True)
    return {
        "balance_loss": jnp.mean(losses),
        "expert_load": jnp.mean(share, axis=0),
        "expert_load_max": jnp.max(share),
        "tokens_dropped": jnp.sum(dropped) / jnp.sum(load),
    }
