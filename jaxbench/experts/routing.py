"""Routing of tokens to experts: choice, capacity, dispatch and combine, all by indices.

Tokens reach their experts through two index maps that are each other's inverse: from a row of an
expert to the choice that fills it, and from a choice to its row. So dispatch and combine are
gathers, forward and backward: no one-hot products, no scatter, the same sums in every run.

Dimension letters as in `ops`; T tokens of one device, C its choices (T x experts per token), R the
rows it fills for all experts.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from jaxbench import mesh
from jaxbench.ops.remat import SMALL, save
from jaxbench.recipe.model import ModelConfig

BLOCK_ROWS = 512
"""Rows of one product in `blocks`: enough for an efficient one, few to pad."""


NONE = 2**31 - 1
"""An index beyond every array: a gather fills in zeros."""


class Routes(NamedTuple):
    """Which row each choice has, and which choice each row; `NONE` where there is none.

    `row` is `"batch shard_seq choice"`, `choice` is `"slots"` and counts a device's own choices. In
    dropless mode `expert` (`"slots"`) names the expert of each block of rows.
    """

    row: Any
    choice: Any
    expert: Any = None


def choose(
    logits: Float[Array, "B S E"], cfg: ModelConfig
) -> tuple[Float[Array, "B S k"], Int[Array, "B S k"]]:
    """(gates, experts) of each token's choices; the gates are fp32 and carry the gradient.

    `topk_softmax`: softmax over the largest logits (Megatron). `softmax_topk`: the largest of the
    softmax over all, as they are (Grok-1). Of equal logits the first expert wins. With balanced
    routing the choices go to the experts in turn.
    """
    k = cfg.experts_per_token
    if cfg.routing == "balanced":
        shape = (*logits.shape[:2], k)
        tokens = PartitionSpec(*mesh.partition(logits))
        turn, choice = (
            jax.lax.broadcasted_iota(jnp.int32, shape, dim, out_sharding=tokens) for dim in (1, 2)
        )
        turn += mesh.first_of_seq(shape[1])
        experts = (turn * k + choice) % cfg.experts
    else:
        experts = jax.lax.top_k(jax.lax.stop_gradient(logits), k)[1]
    values = jax.nn.softmax(logits) if cfg.router == "softmax_topk" else logits
    chosen = experts[..., None] == jnp.arange(cfg.experts)
    gates = jnp.sum(jnp.where(chosen, values[..., None, :], 0.0), axis=-1)
    return (gates if cfg.router == "softmax_topk" else jax.nn.softmax(gates)), experts


def balance_loss(
    logits: Float[Array, "B S E"], experts: Int[Array, "B S k"]
) -> tuple[Float[Array, " B"], Int[Array, "B E"]]:
    """(load-balance loss, choices of each expert) of each sequence, before anything is dropped.

    The loss is E sum_e F_e P_e, with F_e the share of the choices that fall on e and P_e the mean
    of the softmax over all experts (Fedus et al. 2021; Megatron takes it for each sequence). It is
    1 when both are even; only P carries a gradient.
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
    cfg: ModelConfig,
) -> tuple[Array, Array, Routes]:
    """(rows, gate of each row, routes): the tokens as rows of their experts.

    With a capacity, rows are `"experts rows embed"`, exchanged over the axes of the experts; rows
    that nobody fills are zero. Without one, rows stay on their device, `"slots embed"`, in blocks
    of one expert each: how many an expert gets is known only at run time, no exchange of fixed size
    could hold them, and so the weights come to the tokens instead (`grouped.mlp`).
    """
    dropless = cfg.expert_capacity is None
    axes = mesh.used(*mesh.EXPERTS)

    def local(x, gates, experts):
        routes = (dropless_routes if dropless else capacity_routes)(gates, experts, cfg)
        routes = jax.tree.map(partial(save, name=SMALL), routes)
        k = cfg.experts_per_token
        rows = take_rows(x.reshape(-1, x.shape[-1]), routes.row.reshape(-1, k), routes.choice)
        weights = take_rows(gates.reshape(-1, 1), routes.row.reshape(-1, 1), routes.choice)[:, 0]
        if not dropless:
            rows, weights = (y.reshape(cfg.experts, -1, *y.shape[1:]) for y in (rows, weights))
            if axes:
                rows, weights = (
                    jax.lax.all_to_all(y, axes, 0, 1, tiled=True) for y in (rows, weights)
                )
        return rows, save(weights, SMALL), routes

    places = "slots" if dropless else "experts rows"
    rows, weights, row, slots = (
        mesh.spec(dims, mesh.ACTIVATION)
        for dims in (f"{places} embed", places, "batch shard_seq choice", "slots")
    )
    out_specs = rows, weights, Routes(row, slots, slots if dropless else None)
    rows, weights, routes = mesh.on_each_device(local, out_specs)(x, gates, experts)
    return save(rows, "dispatched"), weights, routes


def combine(rows: Float[Array, "*R D"], routes: Routes) -> Float[Array, "B S D"]:
    """Brings the rows of `dispatch` back, and sums those of each token; a dropped choice adds
    nothing."""
    axes = mesh.used(*mesh.EXPERTS)

    def local(rows, row, choice):
        if rows.ndim == 3 and axes:
            rows = jax.lax.all_to_all(rows, axes, 1, 0, tiled=True)
        rows = rows.reshape(-1, rows.shape[-1])
        tokens = sum_rows(rows, row.reshape(-1, row.shape[-1]), choice)
        return tokens.reshape(*row.shape[:2], -1)

    out = mesh.spec("batch shard_seq embed", mesh.ACTIVATION)
    return mesh.on_each_device(local, out)(rows, routes.row, routes.choice)


@jax.custom_vjp
def take_rows(
    x: Float[Array, "T D"], row: Int[Array, "T k"], choice: Int[Array, " R"]
) -> Float[Array, "R D"]:
    """The token of each row, zeros where there is none; the transpose of `sum_rows`."""
    return jnp.take(x, choice // row.shape[1], axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def sum_rows(
    rows: Float[Array, "R D"], row: Int[Array, "T k"], choice: Int[Array, " R"]
) -> Float[Array, "T D"]:
    """The sum of each token's rows, in fp32; the transpose of `take_rows`."""
    parts = jnp.take(rows, row, axis=0, mode="fill", fill_value=0)
    return jnp.sum(parts.astype(jnp.float32), axis=1).astype(rows.dtype)


take_rows.defvjp(
    lambda x, *maps: (take_rows(x, *maps), maps),
    lambda maps, cotangent: (sum_rows(cotangent, *maps), None, None),
)
sum_rows.defvjp(
    lambda rows, *maps: (sum_rows(rows, *maps), maps),
    lambda maps, cotangent: (take_rows(cotangent, *maps), None, None),
)


def capacity_routes(
    gates: Float[Array, "B S k"], experts: Int[Array, "B S k"], cfg: ModelConfig
) -> Routes:
    """One device's routes, in which each expert keeps, of every `capacity_tokens` tokens, those
    with the largest gates (Megatron's policy `probs`); of equal gates the first tokens.

    Rows are ordered by expert, group of tokens, and gate.
    """
    k, capacity = cfg.experts_per_token, cfg.expert_capacity
    assert capacity is not None
    chosen = experts.reshape(-1, cfg.capacity_tokens, k, 1) == jnp.arange(cfg.experts)
    gate = gates.reshape(-1, cfg.capacity_tokens, k, 1)
    score = jnp.max(jnp.where(chosen, gate, -1.0), axis=2).swapaxes(1, 2)
    groups = score.shape[0]
    order = jnp.argsort(-score, axis=-1)
    place = jnp.argsort(order, axis=-1)

    expert = experts.reshape(groups, cfg.capacity_tokens * k)
    group = jnp.arange(groups)[:, None]
    place = place[group, expert, jnp.arange(expert.shape[1]) // k]
    row = (expert * groups + group) * capacity + place
    row = jnp.where(place < capacity, row, NONE)

    order = order[..., :capacity]
    which = jnp.argmax(chosen, axis=2)[group[..., None], order, jnp.arange(cfg.experts)[:, None]]
    choice = (group[..., None] * cfg.capacity_tokens + order) * k + which
    filled = jnp.take_along_axis(score, order, axis=-1) >= 0
    choice = jnp.where(filled, choice, NONE)
    return Routes(row.reshape(experts.shape), choice.swapaxes(0, 1).reshape(-1))


def dropless_routes(
    gates: Float[Array, "B S k"], experts: Int[Array, "B S k"], cfg: ModelConfig
) -> Routes:
    """One device's routes, in which every choice has a row, sorted by expert.

    Each expert's rows are padded to whole blocks, so that a block belongs to one expert. Their
    number is the most that any routing needs: C + E (block - 1) rows at most.
    """
    count, block = experts.size, block_rows(experts.size, cfg)
    blocks = (count + cfg.experts * (block - 1)) // block
    expert = experts.reshape(-1)
    order = jnp.argsort(expert)
    load = jnp.sum(expert[:, None] == jnp.arange(cfg.experts), axis=0, dtype=jnp.int32)
    end = jnp.cumsum(-(-load // block) * block)
    # Rows of an expert run ahead of its places in the sorted order by the padding before them.
    ahead = (end - -(-load // block) * block) - (jnp.cumsum(load) - load)

    row = jnp.argsort(order) + ahead[expert]
    starts = jnp.arange(blocks) * block
    of_block = jnp.minimum(jnp.sum(starts[:, None] >= end, axis=1), cfg.experts - 1)
    of_row = jnp.repeat(of_block, block)
    sorted_place = jnp.arange(blocks * block) - ahead[of_row]
    filled = sorted_place < jnp.cumsum(load)[of_row]
    choice = jnp.where(filled, jnp.take(order, sorted_place, mode="clip"), NONE)
    return Routes(row.reshape(experts.shape), choice, of_block)


def block_rows(choices: int, cfg: ModelConfig) -> int:
    """Rows of a block in dropless mode: `BLOCK_ROWS`, or an expert's fair share of few choices."""
    return min(BLOCK_ROWS, -(-choices // cfg.experts))


Figures = dict[str, Array]
"""Of a step: the mean balance loss; the load of each expert over a fair share, and that of the
busiest expert of any layer; the share of choices dropped. Without experts there are none."""


def with_balance_loss(
    loss: Array, routed: list, coefficient: float
) -> tuple[Float[Array, ""], Figures]:
    """The loss with the gradient of the load-balance losses of all layers, but without their value;
    and the figures of a step.

    `routed` holds, for each stretch of layers, (balance loss `"L B"`, load `"L B E"`, dropped
    choices `"L B"`).
    """
    layers = [stack for stretch in routed for stack in stretch]
    if not layers:
        return loss, {}
    losses, load, dropped = (jnp.concatenate(parts) for parts in zip(*layers, strict=True))
    total = coefficient * jnp.sum(jnp.mean(losses, axis=1))
    found = figures(losses, load, dropped)
    return loss + (total - jax.lax.stop_gradient(total)), jax.lax.stop_gradient(found)


def figures(
    losses: Float[Array, "L B"], load: Num[Array, "L B E"], dropped: Num[Array, "L B"]
) -> Figures:
    """`Figures` of a pass."""
    load = jnp.sum(load, axis=1)
    share = load / jnp.mean(load, axis=1, keepdims=True)
    return {
        "balance_loss": jnp.mean(losses),
        "expert_load": jnp.mean(share, axis=0),
        "expert_load_max": jnp.max(share),
        "tokens_dropped": jnp.sum(dropped) / jnp.sum(load),
    }
