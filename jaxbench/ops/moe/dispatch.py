"""Dispatch of tokens to the ranks of their experts, and combine. Both are exchanges of static size
that use index maps.

The tokens that a device sends are permuted by expert and fill *slots*; some slots stay empty. There
are two index maps, each the inverse of the other: from a slot to its assignment, and from an
assignment to its slot. Dispatch and combine are therefore gathers, forward and backward. They need
no one-hot matmuls and no scatter, and they sum in the same order in every run.

Example with a capacity: four tokens a, b, c, d with k = 1, and two experts with capacity 2 each.
Tokens a, b and c are assigned to expert 0, with gates 0.9, 0.5 and 0.7, and d to expert 1. Expert 0
takes the two largest gates, so b is dropped:

    slot                  0  1  2  3          assignment        a     b     c     d
    assignment of slot    a  c  d  NONE       slot of it        0     NONE  1     2

The same tokens dropless, with two ranks that hold one expert each, and 3 slots for each rank:

    slot                  0  1  2  3  4     5          assignment   a  b  c  d
    assignment of slot    a  b  c  d  NONE  NONE       slot of it   0  1  2  3

Dimension letters are as in `ops`; T tokens of one device, R its slots.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxbench import mesh
from jaxbench.ops.grouped import NONE, Groups, equal_groups, group
from jaxbench.ops.moe.routing import busiest_share
from jaxbench.ops.remat import ALWAYS, save
from jaxbench.recipe.mixers import ExpertsConfig


class Routes(NamedTuple):
    """The slot of each assignment, and the assignment of each slot. `NONE` means that there is
    none.

    `slot` is `"batch shard_seq assignment"`. `assignment` is `"slots"` and counts a device's local
    assignments. In dropless mode `groups` are the arriving tokens, by local expert. Within one rank
    nothing is sent: `slot` is then the row among those that are permuted by expert, and
    `assignment` is None.
    """

    slot: Any
    assignment: Any
    groups: Any = None


def dispatch(
    x: Float[Array, "B S D"],
    gates: Float[Array, "B S k"],
    experts: Int[Array, "B S k"],
    cfg: ExpertsConfig,
) -> tuple[Array, Array, Routes]:
    """Sends tokens to the ranks of their experts. Returns (arrived tokens, their gates, routes).

    With a capacity, tokens and gates are `"experts capacity .."`, and empty slots are zero.
    Dropless, both are `"slots .."`. Tokens are then in the order in which they arrive, at most
    `cfg.rank_slots` from each rank; gates are permuted by expert, as the results of the matmuls are
    (`ops.grouped`). Within one rank all tokens have arrived already, each for `top_k` uses.

    Dropless tokens for the experts of a rank share slots on their way, even if each expert has
    slots of its own: what one sender has for one expert is little, so it would need far more
    padding.
    """
    ranks = mesh.ranks("experts")

    def in_slots(x, gates, routes):
        slot, assignment = routes.slot, routes.assignment
        tokens = permute(x.reshape(-1, x.shape[-1]), slot.reshape(-1, cfg.top_k), assignment)
        return tokens, permute(gates.reshape(-1, 1), slot.reshape(-1, 1), assignment)

    def with_capacity(x, gates, experts):
        routes = _kept(expert_routes(gates, experts, cfg))
        arrays = [y.reshape(cfg.count, -1, y.shape[-1]) for y in in_slots(x, gates, routes)]
        tokens, slot_gates = _exchange(arrays, 0, 1)
        return tokens, save(slot_gates[..., 0], ALWAYS), routes

    def dropless(x, gates, experts):
        routes, sent = rank_routes(experts, cfg)
        received, slots = _exchange(sent, 0, 0), routes.assignment.size // ranks
        capacity = cfg.capacity(ranks * experts.size // cfg.top_k)
        if cfg.slots == "own":
            groups = equal_groups(received, slots, capacity)
        else:
            groups = group(received, slots, _expected(experts.size, cfg, ranks * slots))
        if ranks == 1:
            groups = _from_tokens(groups, routes, cfg.top_k)
            routes = Routes(groups.place.reshape(experts.shape), None)
            tokens, slot_gates = x.reshape(-1, x.shape[-1]), gates.reshape(-1, 1)
        elif cfg.slots == "own":
            before = _exchange(jnp.cumsum(received, axis=0) - received, 0, 0)
            slot = _with_room(routes.slot, experts, sent, capacity - before, slots)
            routes = routes._replace(slot=slot)
        routes, groups = _kept((routes, groups))
        if ranks > 1:
            tokens, slot_gates = _exchange(in_slots(x, gates, routes), 0, 0)
        slot_gates = permute(slot_gates, groups.place[:, None], groups.row)
        return tokens, save(slot_gates[:, 0], ALWAYS), routes._replace(groups=groups)

    def spec(dims: str) -> PartitionSpec:
        return mesh.spec(dims, mesh.ACTIVATION)

    local = dropless if cfg.dropless else with_capacity
    dims = "slots" if cfg.dropless else "experts capacity"
    routes_spec = Routes(
        slot=spec("batch shard_seq assignment"),
        assignment=None if cfg.dropless and ranks == 1 else spec("slots"),
        groups=spec("slots") if cfg.dropless else None,
    )
    out_specs = spec(f"{dims} embed"), spec(dims), routes_spec
    tokens, slot_gates, routes = mesh.on_each_device(local, out_specs)(x, gates, experts)
    return save(tokens, "dispatched"), slot_gates, routes


def _kept(maps: Any) -> Any:
    """Index maps that the backward pass does not compute again."""
    return jax.tree.map(partial(save, name=ALWAYS), maps)


def _from_tokens(groups: Groups, routes: Routes, top_k: int) -> Groups:
    """Groups of a device's tokens, each with `top_k` uses, from the groups of the slots of
    `routes`."""
    row = jnp.take(routes.assignment, groups.row, mode="fill", fill_value=NONE)
    place = jnp.take(groups.place, routes.slot.reshape(-1), mode="fill", fill_value=NONE)
    return replace(groups, row=row, place=place, uses=top_k)


def _with_room(
    slot: Int[Array, "B S k"],
    experts: Int[Array, "B S k"],
    sent: Int[Array, "n e"],
    room: Int[Array, "n e"],
    slots: int,
) -> Int[Array, "B S k"]:
    """The slots of assignments for which their expert has room; `NONE` for the others. `sent` is
    the number of tokens for each expert of each rank, which are in this order in the `slots` of the
    rank. `room` says how many of them the expert takes."""
    first = (jnp.cumsum(sent, axis=1) - sent).reshape(-1)
    index = slot % slots - first[experts]
    return jnp.where(index < room.reshape(-1)[experts], slot, NONE)


def combine(outputs: Float[Array, "*R D"], routes: Routes) -> Float[Array, "B S D"]:
    """Sends the outputs back, as the inverse of `dispatch`, and sums them over each token's
    assignments. A dropped assignment adds nothing."""

    def local(outputs, slot, assignment):
        if assignment is None:
            return outputs.reshape(*slot.shape[:2], -1)
        outputs = _exchange(outputs, outputs.ndim - 2, 0).reshape(-1, outputs.shape[-1])
        tokens = unpermute(outputs, slot.reshape(-1, slot.shape[-1]), assignment)
        return tokens.reshape(*slot.shape[:2], -1)

    out = mesh.spec("batch shard_seq embed", mesh.ACTIVATION)
    return mesh.on_each_device(local, out)(outputs, routes.slot, routes.assignment)


def split_batch(arrays: Any, parts: int) -> list:
    """Splits arrays into `parts` trees, each with a share of every device's sequences."""
    if parts == 1:
        return [arrays]
    flat, structure = jax.tree.flatten(arrays)
    specs = [parts * [mesh.spec_of(x)] for x in flat]
    split = mesh.on_each_device(lambda arrays: [jnp.split(x, parts) for x in arrays], specs)(flat)
    return [jax.tree.unflatten(structure, part) for part in zip(*split, strict=True)]


def join_batch(parts: list) -> Any:
    """The inverse of `split_batch`."""
    if len(parts) == 1:
        return parts[0]
    specs = jax.tree.map(mesh.spec_of, parts[0])
    join = mesh.on_each_device(
        lambda parts: jax.tree.map(lambda *shares: jnp.concatenate(shares), *parts), specs
    )
    return join(parts)


def _exchange(arrays: Any, split: int, joined: int) -> Any:
    """Splits arrays along dimension `split`, sends the parts to the ranks of the experts, and joins
    what arrives along dimension `joined`."""
    if not (axes := mesh.used(*mesh.EXPERTS)):
        return arrays
    exchange = partial(jax.lax.all_to_all, axis_name=axes, tiled=True)
    return jax.tree.map(lambda x: exchange(x, split_axis=split, concat_axis=joined), arrays)


@jax.custom_vjp
def permute(
    x: Float[Array, "T D"], slot: Int[Array, "T k"], assignment: Int[Array, " R"]
) -> Float[Array, "R D"]:
    """The token of each slot; empty slots are zero. This is the transpose of `unpermute`."""
    return jnp.take(x, assignment // slot.shape[1], axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def unpermute(
    permuted: Float[Array, "R D"], slot: Int[Array, "T k"], assignment: Int[Array, " R"]
) -> Float[Array, "T D"]:
    """The sum over each token's slots, in fp32. This is the transpose of `permute`."""
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


def expert_routes(
    gates: Float[Array, "B S k"], experts: Int[Array, "B S k"], cfg: ExpertsConfig
) -> Routes:
    """The routes of a device whose experts have a capacity.

    Each expert takes the tokens with the largest gates from every group of `capacity_tokens` tokens
    (Megatron's policy `probs`). Of equal gates the first wins. Slots are ordered by expert, group
    of tokens, and gate.
    """
    capacity = cfg.capacity(cfg.capacity_tokens)
    expert = experts.reshape(-1, cfg.capacity_tokens * cfg.top_k)
    groups, size = expert.shape
    by_gate = jnp.argsort(-gates.reshape(expert.shape), axis=-1)
    by_expert = jnp.argsort(jnp.take_along_axis(expert, by_gate, axis=-1), axis=-1)
    order = jnp.take_along_axis(by_gate, by_expert, axis=-1)
    load = jnp.sum(expert[..., None] == jnp.arange(cfg.count), axis=1, dtype=jnp.int32)
    first = jnp.cumsum(load, axis=-1) - load  # sorted position of each expert's assignments

    group = jnp.arange(groups)[:, None]
    index = jnp.argsort(order, axis=-1) - jnp.take_along_axis(first, expert, axis=-1)
    slot = (expert * groups + group) * capacity + index
    slot = jnp.where(index < capacity, slot, NONE)

    index, start = jnp.arange(capacity), (first + group * size)[..., None]
    position = jnp.where(index < load[..., None], start + index, NONE)
    position = position.swapaxes(0, 1).reshape(-1)
    order = (order + group * size).reshape(-1)
    assignment = jnp.take(order, position, mode="fill", fill_value=NONE)
    return Routes(slot.reshape(experts.shape), assignment)


def rank_routes(
    experts: Int[Array, "B S k"], cfg: ExpertsConfig
) -> tuple[Routes, Int[Array, "n e"]]:
    """The routes of a device whose experts share the slots of their rank. Returns (routes, the
    number of tokens that each of n ranks gets for each of its e experts).

    Slots are ordered by rank, expert, and token. If a rank has too few slots, the tokens of its
    last experts are dropped first. That biases the run, so a run that dropped any tokens is not
    comparable.
    """
    ranks = mesh.ranks("experts")
    slots = cfg.rank_slots(experts.size // cfg.top_k, ranks)
    expert = experts.reshape(-1)
    order = jnp.argsort(expert)
    load = jnp.sum(expert[:, None] == jnp.arange(cfg.count), axis=0, dtype=jnp.int32)
    ends = jnp.cumsum(load.reshape(ranks, -1), axis=1)
    first = jnp.cumsum(ends[:, -1]) - ends[:, -1]  # sorted position of each rank's assignments

    rank = expert // (cfg.count // ranks)
    index = jnp.argsort(order) - first[rank]
    slot = jnp.where(index < slots, rank * slots + index, NONE)

    index = jnp.arange(slots)
    position = jnp.where(index < ends[:, -1:], first[:, None] + index, NONE)
    assignment = jnp.take(order, position.reshape(-1), mode="fill", fill_value=NONE)
    sent = jnp.diff(jnp.minimum(ends, slots), axis=1, prepend=0)
    return Routes(slot.reshape(experts.shape), assignment), sent


def _expected(assignments: int, cfg: ExpertsConfig, slots: int) -> int:
    """The rows that the busiest rank of a layer gets. All ranks wait for it in the exchange."""
    return min(round(assignments * busiest_share(cfg, mesh.ranks("experts"))), slots)
