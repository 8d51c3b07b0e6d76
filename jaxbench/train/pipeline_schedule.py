"""Pipeline schedule: interleaved 1F1B (Narayanan et al. 2021) as tables of actions.

There are P ranks with V virtual stages (model chunks) each, and M microbatches. Stage s = v P + r
is virtual stage v of rank r. In a schedule step every rank has one forward action, which is a
virtual stage for a microbatch, and one backward action. Microbatches pass all P V stages in groups
of P, and the loss of a group is computed at once.

The first P V + P - 1 steps (warm-up) have forward actions only, and as many at the end (cool-down)
have backward actions only. A rank idles for (P - 1)/(M V) of its work in each direction.

P = V = M = 2, one group. `m.v` is virtual stage v for microbatch m, `-` is idle:

    step             0    1    2    3    4    5    6    7    8    9
    rank 0 forward  0.0  1.0  0.1  1.1   -
    rank 1 forward   -   0.0  1.0  0.1  1.1
    rank 0 backward                           -   0.1  1.1  0.0  1.0
    rank 1 backward                          0.1  1.1  0.0  1.0   -
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Actions:
    """Actions of every rank in one direction, arrays `[steps, ranks]`: the microbatch, the model
    chunk (virtual stage of the rank), the stash slot of its residuals, and whether the rank is
    busy. An idle rank computes on whatever its buffers hold, and its results are dropped.

    `new_group` marks the steps in which rank 0 has just finished a group and begins the next, if
    there is one; it is equal on all ranks. Forward, the inputs of the next group then enter the
    pipeline. Backward, all gradients of the finished group have left it.
    """

    microbatch: np.ndarray
    chunk: np.ndarray
    slot: np.ndarray
    busy: np.ndarray
    new_group: np.ndarray


@dataclass(frozen=True)
class Schedule:
    """Forward and backward actions of a training step. `slots` is the size of the activation stash,
    which does not depend on the number of microbatches. Warm-up and cool-down take `warmup` steps
    each, and every further group of microbatches takes `period` steps."""

    forward: Actions
    backward: Actions
    slots: int
    warmup: int
    period: int


def interleaved_1f1b(ranks: int, virtual_stages: int, microbatches: int) -> Schedule:
    """The schedule of a training step; `ranks` must divide `microbatches`."""
    assert microbatches % ranks == 0
    period = ranks * virtual_stages
    warmup = period + ranks - 1
    step = np.arange(warmup + virtual_stages * microbatches + ranks - 1)[:, None]
    rank = np.arange(ranks)

    def actions(index: np.ndarray, order: np.ndarray) -> Actions:
        """Actions in one direction: `index` `[steps, ranks]` counts a rank's actions, idle if out
        of range; `order` has its virtual stages in the order in which they run."""
        busy = (index >= 0) & (index < virtual_stages * microbatches)
        group, position = np.divmod(np.where(busy, index, 0), period)
        microbatch = group * ranks + position % ranks
        first = index[:, :1]
        new_group = np.repeat((first > 0) & (first % period == 0), ranks, axis=1)
        slot = np.zeros_like(microbatch)
        return Actions(microbatch, order[position // ranks], slot, busy, new_group)

    order = np.arange(virtual_stages)
    forward = actions(step - rank, order)
    backward = actions(step - warmup - (ranks - 1 - rank), order[::-1])
    slots = max(_allocate_slots(forward, backward, rank) for rank in range(ranks))
    return Schedule(forward, backward, slots, warmup, period)


def _allocate_slots(forward: Actions, backward: Actions, rank: int) -> int:
    """Assigns stash slots to a rank's actions, and returns how many it needs.

    This is register allocation with a free list. The residuals of a forward action are live until
    the backward action of the same microbatch and chunk, which frees their slot. The most recently
    freed slot is used first.

    An idle forward action writes a free slot without taking it, until the last forward action of
    all ranks. An idle backward action reads slot 0, with the chunk that last wrote it: with the
    weights of another chunk the residuals could give values that are not finite.
    """
    live: dict[tuple[int, int], int] = {}
    chunk_of_slot_0 = 0
    free: list[int] = []
    count = 0
    for step in range(len(forward.slot)):
        at = step, rank
        if backward.busy[at]:
            slot = live.pop((backward.microbatch[at], backward.chunk[at]))
            backward.slot[at] = slot
            free.append(slot)
        else:
            backward.chunk[at] = chunk_of_slot_0
        if not free:
            free.append(count)
            count += 1
        forward.slot[at] = free[-1]
        if free[-1] == 0 and forward.busy[step].any():
            chunk_of_slot_0 = int(forward.chunk[at])
        if forward.busy[at]:
            live[forward.microbatch[at], forward.chunk[at]] = free.pop()
    return count
