"""Routing of tokens to experts: choice of experts, capacity, dispatch and combine, by indices.

An *assignment* is one of the k experts that a token is sent to. The tokens permuted by expert fill
*slots*, some of which stay empty. Two index maps are each other's inverse: from a slot to its
assignment and from an assignment to its slot. So dispatch and combine are gathers, forward and
backward: no one-hot products, no scatter, the same order of sums in every run.

Four tokens a, b, c, d with k = 1, two experts with capacity 2 each; a, b and c are assigned to
expert 0, with gates 0.9, 0.5 and 0.7; d to expert 1. Expert 0 takes its two largest gates and b is
dropped:

    slot                  0  1  2  3          assignment        a     b     c     d
    assignment of slot    a  c  d  NONE       slot of it        0     NONE  1     2

Dropless with blocks of 2 slots: expert 0 has 3 assignments, so 2 blocks, and expert 1 has one
block:

    slot                  0  1  2  3     4  5      assignment   a  b  c  d
    assignment of slot    a  b  c  NONE  d  NONE   slot of it   0  1  2  4

Dimension letters as in `ops`; T tokens of one device, C its assignments (T k), R its slots.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from jaxbench import mesh
from jaxbench.ops.remat import SMALL, save
from jaxbench.recipe.model import ExpertsConfig

BLOCK_SLOTS = 512
"""Slots of a block in dropless mode: enough for an efficient product, few to pad."""


NONE = 2**31 - 1
"""Index of an empty slot or a dropped assignment, beyond every array: gathers fill in zeros."""


class Routes(NamedTuple):
    """The slot of each assignment, and the assignment of each slot; `NONE` where there is none.

    `slot` is `"batch shard_seq assignment"`; `assignment` is `"slots"` and counts a device's local
    assignments. In dropless mode `expert` (`"slots"`) is the expert of each block of slots.
    """

    slot: Any
    assignment: Any
    expert: Any = None


def choose(
    logits: Float[Array, "B S E"], cfg: ExpertsConfig
) -> tuple[Float[Array, "B S k"], Int[Array, "B S k"]]:
    """(gates, experts) of each token's assignments; the gates are fp32 and carry the gradient.

    `topk_softmax`: softmax over the largest logits (Megatron). `softmax_topk`: the largest of the
    softmax over all, not normalised again (Grok-1). Of equal logits the first expert wins. Balanced
    routing assigns experts in turn.
    """
    k = cfg.top_k
    if cfg.routing == "balanced":
        shape = (*logits.shape[:2], k)
        tokens = PartitionSpec(*mesh.partition(logits))
        token, index = (
            jax.lax.broadcasted_iota(jnp.int32, shape, dim, out_sharding=tokens) for dim in (1, 2)
        )
        token += mesh.first_of_seq(shape[1])
        experts = (token * k + index) % cfg.count
    else:
        experts = jax.lax.top_k(jax.lax.stop_gradient(logits), k)[1]
    values = jax.nn.softmax(logits) if cfg.router == "softmax_topk" else logits
    chosen = experts[..., None] == jnp.arange(cfg.count)
    gates = jnp.sum(jnp.where(chosen, values[..., None, :], 0.0), axis=-1)
    return (gates if cfg.router == "softmax_topk" else jax.nn.softmax(gates)), experts


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


def dispatch(
    x: Float[Array, "B S D"],
    gates: Float[Array, "B S k"],
    experts: Int[Array, "B S k"],
    cfg: ExpertsConfig,
) -> tuple[Array, Array, Routes]:
    """(permuted tokens, gate of each, routes).

    With a capacity the permuted tokens are `"experts capacity embed"`, exchanged over the axes of
    the experts; empty slots are zero. Dropless, they stay on their device, `"slots embed"`, in
    blocks of one expert each: no exchange of a fixed size could hold the tokens of an expert, whose
    number is known only at run time, so the weights are gathered instead (`grouped_matmul.mlp`).
    """
    dropless = cfg.capacity is None
    axes = mesh.used(*mesh.EXPERTS)

    def local(x, gates, experts):
        routes = (dropless_routes if dropless else capacity_routes)(gates, experts, cfg)
        routes = jax.tree.map(partial(save, name=SMALL), routes)
        k = cfg.top_k
        slot, assignment = routes.slot, routes.assignment
        permuted = permute(x.reshape(-1, x.shape[-1]), slot.reshape(-1, k), assignment)
        weights = permute(gates.reshape(-1, 1), slot.reshape(-1, 1), assignment)[:, 0]
        if not dropless:
            permuted, weights = (
                y.reshape(cfg.count, -1, *y.shape[1:]) for y in (permuted, weights)
            )
            if axes:
                permuted, weights = (
                    jax.lax.all_to_all(y, axes, 0, 1, tiled=True) for y in (permuted, weights)
                )
        return permuted, save(weights, SMALL), routes

    dims = "slots" if dropless else "experts capacity"
    permuted_spec, weights_spec, slot_spec, slots_spec = (
        mesh.spec(dims, mesh.ACTIVATION)
        for dims in (f"{dims} embed", dims, "batch shard_seq assignment", "slots")
    )
    routes_spec = Routes(slot_spec, slots_spec, slots_spec if dropless else None)
    permuted, weights, routes = mesh.on_each_device(
        local, (permuted_spec, weights_spec, routes_spec)
    )(x, gates, experts)
    return save(permuted, "dispatched"), weights, routes


def combine(permuted: Float[Array, "*R D"], routes: Routes) -> Float[Array, "B S D"]:
    """The inverse exchange of `dispatch`, and the sum over each token's assignments; a dropped one
    adds nothing."""
    axes = mesh.used(*mesh.EXPERTS)

    def local(permuted, slot, assignment):
        if permuted.ndim == 3 and axes:
            permuted = jax.lax.all_to_all(permuted, axes, 1, 0, tiled=True)
        permuted = permuted.reshape(-1, permuted.shape[-1])
        tokens = unpermute(permuted, slot.reshape(-1, slot.shape[-1]), assignment)
        return tokens.reshape(*slot.shape[:2], -1)

    out = mesh.spec("batch shard_seq embed", mesh.ACTIVATION)
    return mesh.on_each_device(local, out)(permuted, routes.slot, routes.assignment)


@jax.custom_vjp
def permute(
    x: Float[Array, "T D"], slot: Int[Array, "T k"], assignment: Int[Array, " R"]
) -> Float[Array, "R D"]:
    """The token of each slot, zeros in empty ones; the transpose of `unpermute`."""
    return jnp.take(x, assignment // slot.shape[1], axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def unpermute(
    permuted: Float[Array, "R D"], slot: Int[Array, "T k"], assignment: Int[Array, " R"]
) -> Float[Array, "T D"]:
    """The sum over each token's slots, in fp32; the transpose of `permute`."""
    parts = jnp.take(permuted, slot, axis=0, mode="fill", fill_value=0)
    return jnp.sum(parts.astype(jnp.float32), axis=1).astype(permuted.dtype)


permute.defvjp(
    lambda x, *maps: (permute(x, *maps), maps),
    lambda maps, cotangent: (unpermute(cotangent, *maps), None, None),
)
unpermute.defvjp(
    lambda permuted, *maps: (unpermute(permuted, *maps), maps),
    lambda maps, cotangent: (permute(cotangent, *maps), None, None),
)


def capacity_routes(
    gates: Float[Array, "B S k"], experts: Int[Array, "B S k"], cfg: ExpertsConfig
) -> Routes:
    """A device's routes with a capacity: of every group of `capacity_tokens` tokens, each expert
    takes those with the largest gates (Megatron's policy `probs`); of equal gates the first.

    Slots are ordered by expert, group of tokens, and gate.
    """
    k, capacity = cfg.top_k, cfg.capacity
    assert capacity is not None
    chosen = experts.reshape(-1, cfg.capacity_tokens, k, 1) == jnp.arange(cfg.count)
    gate = gates.reshape(-1, cfg.capacity_tokens, k, 1)
    score = jnp.max(jnp.where(chosen, gate, -1.0), axis=2).swapaxes(1, 2)
    groups = score.shape[0]
    order = jnp.argsort(-score, axis=-1)
    rank = jnp.argsort(order, axis=-1)  # of each token among those of an expert, by gate

    expert = experts.reshape(groups, cfg.capacity_tokens * k)
    group = jnp.arange(groups)[:, None]
    rank = rank[group, expert, jnp.arange(expert.shape[1]) // k]
    slot = (expert * groups + group) * capacity + rank
    slot = jnp.where(rank < capacity, slot, NONE)

    order = order[..., :capacity]
    which = jnp.argmax(chosen, axis=2)[group[..., None], order, jnp.arange(cfg.count)[:, None]]
    assignment = (group[..., None] * cfg.capacity_tokens + order) * k + which
    filled = jnp.take_along_axis(score, order, axis=-1) >= 0
    assignment = jnp.where(filled, assignment, NONE)
    return Routes(slot.reshape(experts.shape), assignment.swapaxes(0, 1).reshape(-1))


def dropless_routes(
    gates: Float[Array, "B S k"], experts: Int[Array, "B S k"], cfg: ExpertsConfig
) -> Routes:
    """A device's routes without a capacity: every assignment has a slot, sorted by expert.

    Each expert's slots are padded to whole blocks, so that a block belongs to one expert. Their
    number is static, the most that any routing needs: C + E (block - 1) at most.
    """
    count, block = experts.size, block_slots(experts.size, cfg)
    blocks = (count + cfg.count * (block - 1)) // block
    expert = experts.reshape(-1)
    order = jnp.argsort(expert)
    load = jnp.sum(expert[:, None] == jnp.arange(cfg.count), axis=0, dtype=jnp.int32)
    end = jnp.cumsum(-(-load // block) * block)
    # Padding slots before each expert: its first slot minus its first position in sorted order.
    padding = (end - -(-load // block) * block) - (jnp.cumsum(load) - load)

    slot = jnp.argsort(order) + padding[expert]
    starts = jnp.arange(blocks) * block
    expert_of_block = jnp.minimum(jnp.sum(starts[:, None] >= end, axis=1), cfg.count - 1)
    expert_of_slot = jnp.repeat(expert_of_block, block)
    position = jnp.arange(blocks * block) - padding[expert_of_slot]  # in the sorted order
    filled = position < jnp.cumsum(load)[expert_of_slot]
    assignment = jnp.where(filled, jnp.take(order, position, mode="clip"), NONE)
    return Routes(slot.reshape(experts.shape), assignment, expert_of_block)


def block_slots(assignments: int, cfg: ExpertsConfig) -> int:
    """Slots of a block in dropless mode: `BLOCK_SLOTS`, or an expert's fair share of few
    assignments."""
    return min(BLOCK_SLOTS, -(-assignments // cfg.count))


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
