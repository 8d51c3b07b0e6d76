"""The order of rows by group, and what else all implementations share. The order is a pair of index
maps, computed from counts alone, without a sort."""

from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxbench.recipe.mixers import SLOTS

BLOCK = SLOTS
"""Rows of a block, all of one group."""

NONE = 2**31 - 1
"""Index of a row of padding. It lies beyond every array, so gathers fill in zeros."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """Which rows belong to which group.

    `row` (`"R"`) is the arriving row of each permuted row, and `place` (`"A"`) is its inverse; both
    are `NONE` for padding. `group` (`"blocks"`) is the group of each block of permuted rows. Blocks
    without rows come last; their `group` is the number of groups. `ends` (`"E"`) is the number of
    blocks up to the end of each group. `expected` is the number of rows that plans count.

    If `uses` is larger than 1, each arriving row is permuted to at most so many places, and results
    there are added up. `row` and `place` then count uses, those of one arriving row after the
    other; `place` is `NONE` for a use that is none.
    """

    row: Any
    place: Any
    group: Any
    ends: Any
    expected: int = field(metadata={"static": True})
    uses: int = field(default=1, metadata={"static": True})

    @property
    def source(self) -> Int[Array, " R"]:
        """The arriving row of each permuted row, whatever the `uses`."""
        return self.row if self.uses == 1 else self.row // self.uses

    def arriving(self, results: Float[Array, "R D"]) -> Float[Array, "A D"]:
        """The sum of the results of each arriving row, in fp32, from permuted results."""
        if self.uses == 1:
            return take(results, self.place)
        parts = take(results, self.place.reshape(-1, self.uses))
        return jnp.sum(parts.astype(jnp.float32), axis=1).astype(results.dtype)

    @property
    def multiplied(self) -> int:
        """Rows that a matmul multiplies if the expected ones arrive, which plans count: on average
        half of a group's last block is padding."""
        return min(self.expected + self.ends.size * BLOCK // 2, self.row.size)

    def of_equal_size(self) -> "Groups":
        """Groups with these shapes that have as many rows as expected, equally many each, spread
        over all arriving rows. Their `place` is `NONE`, since no kernel reads it."""
        count, uses = self.ends.size, self.place.size
        received = jnp.full((1, count), self.expected // count)
        equal = group(received, self.row.size - count * (BLOCK - 1), self.expected)
        row = jnp.where(equal.row == NONE, NONE, equal.row * max(1, uses // self.expected))
        return replace(equal, row=row, place=jnp.full(uses, NONE), uses=self.uses)


def group(received: Int[Array, "n E"], slots: int, expected: int) -> Groups:
    """The groups of rows that arrive from n ranks. Each rank sends at most `slots` rows, in a part
    of its own and sorted by group; `received` counts the rows of each rank and group.

    The number of permuted rows is static. It is the most that any counts can need: n slots + E
    (BLOCK - 1), in whole blocks.
    """
    ranks, count = received.shape
    blocks = (ranks * slots + count * (BLOCK - 1)) // BLOCK
    of_group = -(-jnp.sum(received, axis=0) // BLOCK)  # blocks of each group
    ends = jnp.cumsum(of_group)
    of_block = jnp.sum(jnp.arange(blocks)[:, None] >= ends, axis=-1)
    of_row = jnp.minimum(jnp.repeat(of_block, BLOCK), count - 1)
    row, place = _maps(received, slots, (ends - of_group) * BLOCK, of_row)
    return Groups(row, place, of_block, ends, expected)


def equal_groups(received: Int[Array, "n E"], slots: int, capacity: int) -> Groups:
    """`group` with `capacity` rows for each group, whole blocks, whatever arrives. Arriving rows
    beyond the capacity have no place."""
    assert capacity % BLOCK == 0
    count = received.shape[1]
    of_block = jnp.repeat(jnp.arange(count), capacity // BLOCK)
    ends = jnp.arange(1, count + 1) * (capacity // BLOCK)
    first, of_row = ends * BLOCK - capacity, jnp.repeat(of_block, BLOCK)
    row, place = _maps(received, slots, first, of_row, capacity)
    return Groups(row, place, of_block, ends, count * capacity)


def _maps(
    received: Int[Array, "n E"],
    slots: int,
    first: Int[Array, " E"],
    of_row: Int[Array, " R"],
    capacity: int | None = None,
) -> tuple[Int[Array, " R"], Int[Array, " A"]]:
    """`row` and `place` of `Groups`, if `first` is the first permuted row of each group, and
    `of_row` the group of each permuted row. Without a `capacity` each group has room for its rows.
    """
    ranks, count = received.shape
    before = jnp.cumsum(received, axis=0) - received  # rows of a group from earlier ranks
    sent = jnp.cumsum(received, axis=1)  # rows of a rank up to the end of each group
    shift = first + before - (sent - received)  # [n, E], from a rank's slot to the permuted row

    slot = jnp.arange(slots)
    of_slot = jnp.sum(slot[:, None] >= sent[:, None], axis=-1)  # [n, slots]
    none, of_slot = of_slot == count, jnp.minimum(of_slot, count - 1)
    place = slot + jnp.take_along_axis(shift, of_slot, axis=1)
    if capacity is not None:
        none |= place >= first[of_slot] + capacity
    place = jnp.where(none, NONE, place)

    permuted = jnp.arange(of_row.size)
    offset = permuted - first[of_row]
    rank = jnp.sum(offset[:, None] >= (before + received).T[of_row], axis=-1)
    filled, rank = rank < ranks, jnp.minimum(rank, ranks - 1)
    row = jnp.where(filled, rank * slots + permuted - shift[rank, of_row], NONE)
    return row, place.reshape(-1)


def take(x: Array, index: Int[Array, "*R"]) -> Array:
    """The rows of these indices; zeros for `NONE`."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def take_bytes(x: Array, index: Int[Array, " R"]) -> Array:
    """`take` of rows of 8-bit numbers, up to four of which are loaded at a time. If we loaded
    single ones, XLA would fuse the gather with a transpose that follows into one kernel that is ten
    times slower than memory."""
    together = gcd(4, x.shape[1])
    word = {4: jnp.uint32, 2: jnp.uint16, 1: jnp.uint8}[together]
    parts = x.reshape(len(x), -1, together) if together > 1 else x
    taken = take(jax.lax.bitcast_convert_type(parts, word), index)
    return jax.lax.bitcast_convert_type(taken, x.dtype).reshape(-1, x.shape[1])


Scales = tuple[Array, Array]
"""The inverse scales of both operands of an FP8 matmul, each of them a bf16 number."""


def product_of(scales: Scales | None) -> Array | None:
    """The scale of a result of FP8 operands, in fp32."""
    return None if scales is None else scales[0] * scales[1]


def result_dtype(x: Array) -> Any:
    """The dtype of a result: the dtype of the operands, or bf16 for FP8 operands."""
    return jnp.bfloat16 if x.itemsize == 1 else x.dtype
