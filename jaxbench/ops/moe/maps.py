"""Index maps between the tokens of a device and the slots in which it sends them.

The assignments that a device sends fill *slots*; some slots stay empty. There are two index maps,
each the inverse of the other: from a slot to its assignment, and from an assignment to its slot.

Example with a capacity: four tokens a, b, c, d with k = 1, and two experts with capacity 2 each.
Tokens a, b and c are assigned to expert 0, with gates 0.9, 0.5 and 0.7, and d to expert 1. Expert 0
takes the two largest gates, so b is dropped:

    slot                  0  1  2  3          assignment        a     b     c     d
    assignment of slot    a  c  d  NONE       slot of it        0     NONE  1     2

Dropless, the slots of assignments hold their gates and say in which order a rank multiplies. A
token is sent once to each rank that has any of its experts, in slots of its own, with the first of
its assignments to the rank. Example with two tokens a and b, k = 2, and two ranks that hold two
experts each. Token a is assigned to experts 0 and 1, and b to experts 1 and 3. Rank 0 gets three
assignments, but two tokens. The maps of assignments, with three slots for each rank:

    slot                  0   1   2   3   4     5           assignment    a0  a1    b0  b1
    assignment of slot    a0  a1  b0  b1  NONE  NONE        slot of it    0   1     2   3

The maps of tokens, with two slots for each rank:

    slot                  0   1   2   3                     assignment    a0  a1    b0  b1
    assignment of slot    a0  b0  b1  NONE                  slot of it    0   NONE  1   2

Dimension letters are as in `ops`; T tokens of one device, R its slots.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxbench import mesh
from jaxbench.ops.grouped import NONE
from jaxbench.recipe.mixers import ExpertsConfig


class Maps(NamedTuple):
    """The slot of each assignment, and the assignment of each slot. `NONE` means that there is
    none.

    `slot` is `"batch shard_seq assignment"`. `assignment` is `"slots"` and counts a device's local
    assignments.
    """

    slot: Any
    assignment: Any


class Uses(NamedTuple):
    """Which assignments use the tokens of a rank. `NONE` means that there is none.

    `slot` (`"R uses"`) is the assignment's slot for each use of a token in its own slot. `use`
    (`"slots"`) is the inverse: the use of each assignment's slot, where a token's uses follow each
    other. Both count what one rank sends to another.
    """

    slot: Any
    use: Any


def expert_maps(
    gates: Float[Array, "B S k"], experts: Int[Array, "B S k"], cfg: ExpertsConfig
) -> Maps:
    """The maps of a device whose experts have a capacity.

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
    return Maps(slot.reshape(experts.shape), assignment)


def rank_maps(experts: Int[Array, "B S k"], cfg: ExpertsConfig) -> tuple[Maps, Int[Array, "n e"]]:
    """The maps of a device whose experts share the slots of their rank. Returns (maps, the number
    of assignments that each of n ranks gets for each of its e experts).

    Slots are ordered by rank, expert, and token. If a rank has too few slots, the tokens of its
    last experts are dropped first. That biases the run, so a run that dropped any tokens is not
    comparable.
    """
    ranks = mesh.ranks("experts")
    slots = cfg.rank_slots(experts.size // cfg.top_k, ranks)
    load = jnp.sum(experts.reshape(-1, 1) == jnp.arange(cfg.count), axis=0, dtype=jnp.int32)
    ends = jnp.cumsum(load.reshape(ranks, -1), axis=1)
    maps = _in_slots(experts // (cfg.count // ranks), experts, ends[:, -1], slots)
    return maps, jnp.diff(jnp.minimum(ends, slots), axis=1, prepend=0)


def _in_slots(
    rank: Int[Array, "B S k"], by: Int[Array, "B S k"], load: Int[Array, " n"], slots: int
) -> Maps:
    """Maps of assignments to ranks with so many slots each, which are ordered by `by`. `load` is
    the number of assignments to each of n ranks; an assignment to rank n, which does not exist, has
    no slot."""
    order = jnp.argsort(by.reshape(-1))
    first = jnp.cumsum(load) - load  # sorted position of each rank's assignments
    index = jnp.argsort(order).reshape(rank.shape) - jnp.take(first, rank, mode="clip")
    slot = jnp.where((rank < load.size) & (index < slots), rank * slots + index, NONE)

    index = jnp.arange(slots)
    position = jnp.where(index < load[:, None], first[:, None] + index, NONE)
    return Maps(slot, jnp.take(order, position.reshape(-1), mode="fill", fill_value=NONE))


def has_room(
    maps: Maps, experts: Int[Array, "B S k"], sent: Int[Array, "n e"], room: Int[Array, "n e"]
) -> Bool[Array, "B S k"]:
    """True for an assignment with a slot if its expert has room for it. `sent` is the number of
    assignments to each expert of each rank, which are in this order in the slots of the rank.
    `room` says how many of them the expert takes."""
    first = (jnp.cumsum(sent, axis=1) - sent).reshape(-1)
    index = maps.slot % (maps.assignment.size // len(sent)) - first[experts]
    return index < room.reshape(-1)[experts]


def once_per_rank(
    experts: Int[Array, "B S k"], maps: Maps, cfg: ExpertsConfig
) -> tuple[Maps, Maps, Uses]:
    """The maps of tokens, each of which is sent once to each rank that has any of its experts.
    Returns (`maps` without the assignments of tokens that find no slot, the maps of the tokens,
    their uses).

    Of a token's assignments to a rank, only the first has a slot in the maps of tokens. The slots
    of tokens are ordered by rank and token; if there are too few, the last tokens are dropped.
    """
    ranks, k = mesh.ranks("experts"), cfg.top_k
    local = cfg.count // ranks
    tokens = experts.size // k
    slots, of_rank = cfg.token_slots(tokens, ranks), maps.assignment.size // ranks
    rank = jnp.where(maps.slot == NONE, ranks, experts // local)

    same = rank[..., :, None] == rank[..., None, :]
    earlier = jnp.arange(k) < jnp.arange(k)[:, None]
    to = jnp.where(jnp.any(same & earlier, axis=-1), ranks, rank)
    load = jnp.sum(to.reshape(-1, 1) == jnp.arange(ranks), axis=0, dtype=jnp.int32)
    crossing = _in_slots(to, to, load, slots)
    # The slot of an assignment's token, also if it is not the token's first one to its rank.
    of_token = jnp.min(jnp.where(same, crossing.slot[..., None, :], NONE), axis=-1)

    kept = (rank < ranks) & (of_token != NONE)
    maps = maps._replace(slot=jnp.where(kept, maps.slot, NONE))
    uses = min(k, local)
    number = jnp.broadcast_to(jnp.arange(k), rank.shape) if uses == k else experts % local
    use = jnp.where(kept, of_token % slots * uses + number, NONE)
    use = jnp.take(use.reshape(-1), maps.assignment, mode="fill", fill_value=NONE)
    maps = maps._replace(assignment=jnp.where(use == NONE, NONE, maps.assignment))

    token = crossing.assignment // k
    there, number, slot = (
        jnp.take(part.reshape(tokens, k), token, axis=0, mode="fill", fill_value=NONE)[:, None]
        for part in (rank, number, maps.slot)
    )
    here = there == jnp.arange(ranks * slots)[:, None, None] // slots
    chosen = here & (number == jnp.arange(uses)[:, None]) & (slot != NONE)
    return maps, crossing, Uses(jnp.min(jnp.where(chosen, slot % of_rank, NONE), axis=-1), use)
