"""Interleaved 1F1B: the order of its actions, its length, and its stash."""

import numpy as np
import pytest

from jaxbench.train.pipeline_schedule import interleaved_1f1b

every_shape = pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches"),
    [(2, 1, 2), (2, 3, 8), (4, 1, 4), (4, 2, 16), (8, 12, 16), (3, 2, 9)],
)


def steps_of(actions, ranks, chunks):
    """The schedule step of each (microbatch, stage); stages are numbered along the model."""
    steps = {}
    for step, rank in np.argwhere(actions.busy):
        stage = actions.chunk[step, rank] * ranks + rank
        assert rank < ranks
        assert actions.chunk[step, rank] < chunks
        key = int(actions.microbatch[step, rank]), int(stage)
        assert key not in steps
        steps[key] = int(step)
    return steps


@every_shape
def test_every_stage_follows_the_one_before_it(ranks, chunks, microbatches):
    schedule = interleaved_1f1b(ranks, chunks, microbatches)
    forward = steps_of(schedule.forward, ranks, chunks)
    backward = steps_of(schedule.backward, ranks, chunks)
    stages = ranks * chunks
    actions = {(m, s) for m in range(microbatches) for s in range(stages)}
    assert set(forward) == set(backward) == actions
    for m, s in actions:
        if s + 1 < stages:
            # A rank has what another one sends in the next step.
            assert forward[m, s + 1] == forward[m, s] + 1
            assert backward[m, s] == backward[m, s + 1] + 1
        # Losses are taken between steps, for a whole group.
        first = m // ranks * ranks
        ready = max(forward[n, stages - 1] for n in range(first, first + ranks))
        assert backward[m, stages - 1] > ready


@every_shape
def test_steps_are_those_of_the_work_and_the_bubble(ranks, chunks, microbatches):
    schedule = interleaved_1f1b(ranks, chunks, microbatches)
    one_way = chunks * microbatches + ranks - 1
    assert len(schedule.forward.busy) == schedule.warmup + one_way
    assert not schedule.forward.busy[one_way:].any()
    assert not schedule.backward.busy[: schedule.warmup].any()
    assert np.all(schedule.forward.busy.sum(0) == chunks * microbatches)
    assert schedule.warmup + schedule.period * (microbatches // ranks - 1) == one_way


@every_shape
def test_a_slot_is_kept_until_its_backward_pass(ranks, chunks, microbatches):
    schedule = interleaved_1f1b(ranks, chunks, microbatches)
    for rank in range(ranks):
        holds, chunk_in = {}, {}
        for step in range(len(schedule.forward.busy)):
            for actions, fills in ((schedule.backward, False), (schedule.forward, True)):
                here = actions.microbatch[step, rank], actions.chunk[step, rank]
                slot = actions.slot[step, rank]
                assert 0 <= slot < schedule.slots
                # An idle rank, too, fills a slot, but none that is held. Once all ranks are idle,
                # no forward action runs.
                if fills and actions.busy[step].any():
                    assert slot not in holds
                    chunk_in[slot] = actions.chunk[step, rank]
                elif not fills and step >= schedule.warmup:
                    # Of an idle rank too: the chunk that filled the slot.
                    assert chunk_in[slot] == actions.chunk[step, rank]
                if actions.busy[step, rank] and fills:
                    holds[slot] = here
                elif actions.busy[step, rank]:
                    assert holds.pop(slot) == here
        assert not holds


def test_slots_do_not_grow_with_the_microbatches():
    assert {interleaved_1f1b(8, 12, 8 * groups).slots for groups in (2, 4, 16)} == {110}
    assert interleaved_1f1b(8, 12, 8).slots <= 110
