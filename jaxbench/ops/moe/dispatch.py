"""Dispatch of tokens to the ranks of their experts, and combine. Both are exchanges of static size
that use the index maps of `ops.moe.maps`.

Dispatch and combine are gathers, forward and backward. They need no one-hot matmuls and no scatter,
and they sum in the same order in every run.

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
from jaxbench.ops.moe.maps import (
    Maps,
    Uses,
    expert_maps,
    has_room,
    once_per_rank,
    rank_maps,
)
from jaxbench.ops.moe.routing import busiest_share
from jaxbench.ops.remat import ALWAYS, save
from jaxbench.recipe.mixers import ExpertsConfig


class Routes(NamedTuple):
    """`maps` (`Maps`) say how tokens are sent and outputs return; they are None within one rank,
    where nothing is sent. `kept` (`"batch shard_seq assignment"`) is false for an assignment that
    is dropped. `groups` are the `Groups` of arriving tokens, by local expert, or None with a
    capacity.
    """

    maps: Any
    kept: Any
    groups: Any


def dispatch(
    x: Float[Array, "B S D"],
    gates: Float[Array, "B S k"],
    experts: Int[Array, "B S k"],
    cfg: ExpertsConfig,
) -> tuple[Array, Array, Routes]:
    """Sends tokens to the ranks of their experts. Returns (arrived tokens, their gates, routes).

    With a capacity, tokens and gates are `"experts capacity .."`, and empty slots are zero.
    Dropless, both are `"slots .."`. Tokens are then in the order in which they arrive, at most
    `cfg.token_slots` from each rank, and each is used by one or more experts; gates are permuted by
    expert, as the results of the matmuls are (`ops.grouped`). Within one rank all tokens have
    arrived already.

    Dropless assignments to the experts of a rank share slots, even if each expert has slots of its
    own where they arrive: what one sender has for one expert is little, so it would need far more
    padding.
    """
    ranks = mesh.ranks("experts")

    def with_capacity(x, gates, experts):
        maps = _saved(expert_maps(gates, experts, cfg))
        arrays = _tokens(x, maps), _gates(gates, maps)
        arrays = [y.reshape(cfg.count, -1, y.shape[-1]) for y in arrays]
        tokens, slot_gates = _exchange(arrays, 0, 1)
        routes = Routes(maps, maps.slot != NONE, None)
        return tokens, save(slot_gates[..., 0], ALWAYS), routes

    def dropless(x, gates, experts):
        maps, sent = rank_maps(experts, cfg)
        received, slots = _exchange(sent, 0, 0), maps.assignment.size // ranks
        capacity = cfg.capacity(ranks * experts.size // cfg.top_k)
        if cfg.slots == "own":
            by_slot = equal_groups(received, slots, capacity)
        else:
            by_slot = group(received, slots, _expected(experts.size, cfg, ranks * slots))
        if ranks == 1:
            uses = Uses(maps.slot.reshape(-1, cfg.top_k), maps.assignment)
            groups = _saved(_of_tokens(by_slot, uses))
            routes = Routes(None, groups.place.reshape(experts.shape) != NONE, groups)
            slot_gates = permute(gates.reshape(-1, 1), groups.place[:, None], groups.row)
            return x.reshape(-1, x.shape[-1]), save(slot_gates[:, 0], ALWAYS), routes
        maps, crossing, uses = once_per_rank(experts, maps, cfg)
        maps, crossing = _saved((maps, crossing))
        order = _saved((by_slot.place[:, None], by_slot.row))
        groups = _saved(_of_tokens(by_slot, _arrived(uses, ranks)))
        tokens, slot_gates = _exchange((_tokens(x, crossing), _gates(gates, maps)), 0, 0)
        slot_gates = permute(slot_gates, *order)
        kept = maps.slot != NONE
        if cfg.slots == "own":
            # Tokens do not wait for this exchange: what finds no room is left out where it arrives.
            before = _exchange(jnp.cumsum(received, axis=0) - received, 0, 0)
            kept = _saved(kept & has_room(maps, experts, sent, capacity - before))
        return tokens, save(slot_gates[:, 0], ALWAYS), Routes(crossing, kept, groups)

    def spec(dims: str) -> PartitionSpec:
        return mesh.spec(dims, mesh.ACTIVATION)

    local = dropless if cfg.dropless else with_capacity
    dims = "slots" if cfg.dropless else "experts capacity"
    of_assignments = spec("batch shard_seq assignment")
    routes_spec = Routes(
        maps=None if cfg.dropless and ranks == 1 else Maps(of_assignments, spec("slots")),
        kept=of_assignments,
        groups=spec("slots") if cfg.dropless else None,
    )
    out_specs = spec(f"{dims} embed"), spec(dims), routes_spec
    tokens, slot_gates, routes = mesh.on_each_device(local, out_specs)(x, gates, experts)
    return save(tokens, "dispatched"), slot_gates, routes


def _saved(maps: Any) -> Any:
    """Index maps that the backward pass does not compute again."""
    return jax.tree.map(partial(save, name=ALWAYS), maps)


def _tokens(x: Float[Array, "B S D"], maps: Maps) -> Float[Array, "R D"]:
    """The tokens of slots."""
    slot = maps.slot.reshape(-1, maps.slot.shape[-1])
    return permute(x.reshape(-1, x.shape[-1]), slot, maps.assignment)


def _gates(gates: Float[Array, "B S k"], maps: Maps) -> Float[Array, "R 1"]:
    """The gates of slots."""
    return permute(gates.reshape(-1, 1), maps.slot.reshape(-1, 1), maps.assignment)


def _of_tokens(groups: Groups, uses: Uses) -> Groups:
    """Groups of arriving tokens with several uses each, from the groups of their assignments."""
    row = jnp.take(uses.use, groups.row, mode="fill", fill_value=NONE)
    place = jnp.take(groups.place, uses.slot.reshape(-1), mode="fill", fill_value=NONE)
    return replace(groups, row=row, place=place, uses=uses.slot.shape[-1])


def _arrived(sent: Uses, ranks: int) -> Uses:
    """The uses of the tokens that arrive from all ranks, from those that each rank sends."""
    slots, of_slots = (part.reshape(ranks, -1) for part in sent)
    together = _exchange(jnp.concatenate([slots, of_slots], axis=1), 0, 0)
    slot, use = jnp.split(together, [slots.shape[1]], axis=1)
    sender = jnp.arange(ranks)[:, None]
    slot = jnp.where(slot == NONE, NONE, slot + of_slots.shape[1] * sender)
    use = jnp.where(use == NONE, NONE, use + slots.shape[1] * sender)
    return Uses(slot.reshape(sent.slot.shape), use.reshape(-1))


def combine(outputs: Float[Array, "*R D"], routes: Routes) -> Float[Array, "B S D"]:
    """Sends the outputs back, as the inverse of `dispatch`, and adds up what comes back for each
    token: an output of each rank, or with a capacity of each expert. A dropped assignment adds
    nothing."""
    out = mesh.spec("batch shard_seq embed", mesh.ACTIVATION)
    if routes.maps is None:
        flat = mesh.on_each_device(lambda y, kept: y.reshape(*kept.shape[:2], -1), out)
        return flat(outputs, routes.kept)

    def local(outputs, maps):
        outputs = _exchange(outputs, outputs.ndim - 2, 0).reshape(-1, outputs.shape[-1])
        slot = maps.slot
        tokens = unpermute(outputs, slot.reshape(-1, slot.shape[-1]), maps.assignment)
        return tokens.reshape(*slot.shape[:2], -1)

    return mesh.on_each_device(local, out)(outputs, routes.maps)


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


def _expected(assignments: int, cfg: ExpertsConfig, slots: int) -> int:
    """The rows that the busiest rank of a layer gets. All ranks wait for it in the exchange."""
    return min(round(assignments * busiest_share(cfg, mesh.ranks("experts"))), slots)
