"""Which rank of a pipeline computes what, when: interleaved 1F1B (Narayanan et al. 2021).

Ranks P, chunks of layers V on each, microbatches M. In a tick a rank computes one chunk forward for
one microbatch and one chunk backward for another. Microbatches go in groups of P through all P V
stages; their losses are taken for a group at once. The first PV + P - 1 ticks only go forward, as
many last ones only backward, so a rank is idle for (P - 1)/(M V) of its work in each direction.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Duties:
    """What each rank does in each tick in one direction, `[ticks, ranks]`: the microbatch, the
    chunk, the slot in which a chunk's activations wait for its backward pass, and whether it does
    anything. An idle rank computes on whatever it holds."""

    microbatch: np.ndarray
    chunk: np.ndarray
    slot: np.ndarray
    busy: np.ndarray


@dataclass(frozen=True)
class Timetable:
    """Forward and backward duties of a step. `slots` are as many as are ever filled, whatever the
    number of microbatches; `warmup` are the ticks that only go forward, and those that only go
    backward; after them `period` ticks go with each further group of microbatches."""

    forward: Duties
    backward: Duties
    slots: int
    warmup: int
    period: int


def timetable(ranks: int, chunks: int, microbatches: int) -> Timetable:
    """Interleaved 1F1B for a number of microbatches that the ranks divide."""
    assert microbatches % ranks == 0
    period = ranks * chunks
    warmup = period + ranks - 1
    tick = np.arange(warmup + chunks * microbatches + ranks - 1)[:, None]
    rank = np.arange(ranks)

    def duties(turn: np.ndarray, order: np.ndarray) -> Duties:
        """Of a rank's turns in one direction, with the chunks in the order in which they come."""
        busy = (turn >= 0) & (turn < chunks * microbatches)
        group, place = np.divmod(np.where(busy, turn, 0), period)
        microbatch = group * ranks + place % ranks
        return Duties(microbatch, order[place // ranks], np.zeros_like(microbatch), busy)

    in_order = np.arange(chunks)
    forward = duties(tick - rank, in_order)
    backward = duties(tick - warmup - (ranks - 1 - rank), in_order[::-1])
    slots = max(_fill_slots(forward, backward, rank) for rank in range(ranks))
    return Timetable(forward, backward, slots, warmup, period)


def _fill_slots(forward: Duties, backward: Duties, rank: int) -> int:
    """Gives a rank's chunks their slots, one that a chunk has just left first; how many it needs.

    An idle rank fills a slot that is free, and goes back through the chunk that last filled slot
    0: with another chunk's weights its activations could give what is not finite.
    """
    held: dict[tuple[int, int], int] = {}
    first_slot = 0
    free: list[int] = []
    count = 0
    for tick in range(len(forward.slot)):
        duty = tick, rank
        if backward.busy[duty]:
            slot = held.pop((backward.microbatch[duty], backward.chunk[duty]))
            backward.slot[duty] = slot
            free.append(slot)
        else:
            backward.chunk[duty] = first_slot
        if not free:
            free.append(count)
            count += 1
        forward.slot[duty] = free[-1]
        if free[-1] == 0:
            first_slot = int(forward.chunk[duty])
        if forward.busy[duty]:
            held[forward.microbatch[duty], forward.chunk[duty]] = free.pop()
    return count
