"""The order of rows by group, as index maps from counts alone, without a sort; and the dtype of
results: shared by all implementations."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

BLOCK = 128
"""Rows of a block, all of one group: enough for an efficient product, few to pad."""

NONE = 2**31 - 1
"""Index of a row of padding, beyond every array: gathers fill in zeros."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("row", "place", "group", "ends"),
    meta_fields=("expected",),
)
@dataclass(frozen=True)
class Groups:
    """Assignment of rows: which belong to which group.

    `row` (`"R"`) is the arriving row of each permuted one and `place` (`"A"`) its inverse, `NONE`
    for padding; `group` (`"blocks"`) is the group of each block of permuted rows, the number of
    groups for blocks without rows, which are the last; `ends` (`"E"`) is the number of blocks up to
    the end of each group. `expected` is the number of rows when all ranks have equally many, for
    plans.
    """

    row: Any
    place: Any
    group: Any
    ends: Any
    expected: int


def group(received: Int[Array, "n E"], slots: int, expected: int) -> Groups:
    """The groups of rows that arrive from n ranks. Each sends at most `slots` rows, sorted by
    group, in a part of its own: `received` of each group.

    The number of permuted rows is static, the most that any counts need: n slots + E (BLOCK - 1),
    in whole blocks.
    """
    ranks, count = received.shape
    blocks = (ranks * slots + count * (BLOCK - 1)) // BLOCK
    rows = jnp.sum(received, axis=0)
    ends = jnp.cumsum(-(-rows // BLOCK))
    first = (ends - -(-rows // BLOCK)) * BLOCK  # permuted row of each group
    before = jnp.cumsum(received, axis=0) - received  # rows of a group from earlier ranks
    sent = jnp.cumsum(received, axis=1)  # rows of a rank up to the end of each group

    slot = jnp.arange(slots)
    of_slot = jnp.sum(slot[:, None] >= sent[:, None], axis=-1)  # [n, slots]
    of_slot, empty = jnp.minimum(of_slot, count - 1), of_slot == count
    shift = first + before - (sent - received)  # [n, E], from a rank's slot to the permuted row
    place = jnp.where(empty, NONE, slot + jnp.take_along_axis(shift, of_slot, axis=1))

    of_block = jnp.sum(jnp.arange(blocks)[:, None] >= ends, axis=-1)
    of_row = jnp.minimum(jnp.repeat(of_block, BLOCK), count - 1)
    permuted = jnp.arange(blocks * BLOCK)
    offset = permuted - first[of_row]
    rank = jnp.sum(offset[:, None] >= (before + received).T[of_row], axis=-1)
    filled, rank = rank < ranks, jnp.minimum(rank, ranks - 1)
    row = jnp.where(filled, rank * slots + permuted - shift[rank, of_row], NONE)
    return Groups(row, place.reshape(-1), of_block, ends, expected)


def result_dtype(x: Array) -> Any:
    """The dtype of a result: that of the operands, or bf16 of FP8 ones."""
    return jnp.bfloat16 if x.itemsize == 1 else x.dtype
