"""Interleaved 1F1B: what may follow what, and how long it takes."""

import numpy as np
import pytest

from jaxbench.train.timetable import timetable

SHAPES = [(2, 1, 2), (2, 3, 8), (4, 1, 4), (4, 2, 16), (8, 12, 16), (3, 2, 9)]


def ticks_of(duties, ranks, chunks):
    """The tick of each (microbatch, stage); stages are numbered along the model."""
    found = {}
    for tick, rank in np.argwhere(duties.busy):
        stage = duties.chunk[tick, rank] * ranks + rank
        assert rank < ranks
        assert duties.chunk[tick, rank] < chunks
        key = int(duties.microbatch[tick, rank]), int(stage)
        assert key not in found
        found[key] = int(tick)
    return found


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), SHAPES)
def test_every_stage_follows_the_one_before_it(ranks, chunks, microbatches):
    table = timetable(ranks, chunks, microbatches)
    forward = ticks_of(table.forward, ranks, chunks)
    backward = ticks_of(table.backward, ranks, chunks)
    stages = ranks * chunks
    every = {(m, s) for m in range(microbatches) for s in range(stages)}
    assert set(forward) == set(backward) == every
    for m, s in every:
        if s + 1 < stages:
            # What a rank hands on arrives for the very next tick.
            assert forward[m, s + 1] == forward[m, s] + 1
            assert backward[m, s] == backward[m, s + 1] + 1
        # Losses are taken between ticks, for a whole group.
        first = m // ranks * ranks
        ready = max(forward[n, stages - 1] for n in range(first, first + ranks))
        assert backward[m, stages - 1] > ready


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), SHAPES)
def test_ticks_are_those_of_the_work_and_the_bubble(ranks, chunks, microbatches):
    table = timetable(ranks, chunks, microbatches)
    one_way = chunks * microbatches + ranks - 1
    assert len(table.forward.busy) == table.warmup + one_way
    assert not table.forward.busy[one_way:].any()
    assert not table.backward.busy[: table.warmup].any()
    assert np.all(table.forward.busy.sum(0) == chunks * microbatches)
    assert table.warmup + table.period * (microbatches // ranks - 1) == one_way


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), SHAPES)
def test_a_slot_is_kept_until_its_backward_pass(ranks, chunks, microbatches):
    table = timetable(ranks, chunks, microbatches)
    for rank in range(ranks):
        holds, chunk_in = {}, {}
        for tick in range(len(table.forward.busy)):
            for duties, fills in ((table.backward, False), (table.forward, True)):
                here = duties.microbatch[tick, rank], duties.chunk[tick, rank]
                slot = duties.slot[tick, rank]
                assert 0 <= slot < table.slots
                if fills:  # an idle rank, too, fills a slot, but none that is held
                    assert slot not in holds
                if fills:
                    chunk_in[slot] = duties.chunk[tick, rank]
                elif tick >= table.warmup:  # also of an idle rank: the chunk that filled the slot
                    assert chunk_in[slot] == duties.chunk[tick, rank]
                if duties.busy[tick, rank] and fills:
                    holds[slot] = here
                elif duties.busy[tick, rank]:
                    assert holds.pop(slot) == here
        assert not holds


def test_slots_do_not_grow_with_the_microbatches():
    assert {timetable(8, 12, 8 * groups).slots for groups in (2, 4, 16)} == {110}
    assert timetable(8, 12, 8).slots <= 110
