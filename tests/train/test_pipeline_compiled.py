"""A pipeline compiled for absent GPUs: its transfers, memory and overlap next to a hand count.

Counted for Nemotron-4 at full width, 16 layers of it on 128 GPUs: 8 ranks with 2 chunks of one
layer, fsdp 2, tensor 8.
"""

from collections import Counter

import jax
import pytest
from compiled import Compiled, needs_compiler

from jaxbench.base.hardware import H100
from jaxbench.ops.attention import cudnn
from jaxbench.plan.compiled_step import axes_of, traffic_by_axes
from jaxbench.train.pipeline_schedule import interleaved_1f1b
from jaxbench.train.program_checks import check_program
from jaxbench.xla import collectives, schedule

pytestmark = needs_compiler
P, V, LAYERS, FSDP, TENSOR, LENGTH, EMBED = 8, 2, 16, 2, 8, 4096, 18432
PERIOD = P * V
ACTIVATION = LENGTH // TENSOR * EMBED * 2
"""Bytes of the hidden state that ranks send, in bf16: a tensor rank's tokens of one sequence."""


def compiled(microbatches):
    return Compiled(
        "nemotron4_340b_bf16", 128, f"model.layers={LAYERS}", f"parallelism.pipeline={P}",
        f"parallelism.virtual_stages={V}", f"parallelism.fsdp={FSDP}", "batch.microbatch=1",
        f"batch.global_batch={FSDP * microbatches}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def short():
    return compiled(3 * P)


@pytest.fixture(scope="module")
def long():
    return compiled(6 * P)


def received(program, kind, axes):
    """(runs, bytes) of the collectives of a kind whose devices lie along these axes alone."""
    strides = {"tensor": 1, "fsdp": TENSOR, "pipeline": TENSOR * FSDP}
    sizes = {"tensor": TENSOR, "fsdp": FSDP, "pipeline": P}
    runs = total = 0
    for c in program.collectives:
        along = {a for a in strides if len({d // strides[a] % sizes[a] for d in c.devices}) > 1}
        if c.kind == kind and along == axes:
            runs, total = runs + c.count, total + c.bytes * c.count
    return runs, total


def test_a_schedule_step_sends_one_activation_each_way_and_in_each_ring(short, long):
    for row, groups in ((short, 3), (long, 6)):
        actions = V * groups * P + P - 1
        steps = actions + PERIOD + P - 1
        # In each direction what the stages and the ring in front of them send; in every step the
        # ring of outputs. Once for each group the gradient of its loss, and the last of d_inputs.
        sent = 4 * actions + steps + groups + 1
        assert received(row, "collective-permute", {"pipeline"}) == (sent, sent * ACTIVATION)


def test_weights_come_and_gradients_go_once_per_step(long):
    """In bf16, whatever the number of microbatches: to and from the ranks of their layers, and of
    the fsdp ranks that share them."""
    cfg = long.run.model
    attention = cfg.attention
    heads = 2 * attention.heads + 2 * attention.kv_heads
    layer = 2 * cfg.embed * (heads * attention.head_dim + 2 * cfg.mlp.ffn)
    local = LAYERS // P * layer // TENSOR
    groups = 6
    _, exchanged = received(long, "all-to-all", {"pipeline"})
    assert exchanged == 2 * local // FSDP
    assert received(long, "all-gather", {"fsdp"})[1] == local
    assert received(long, "reduce-scatter", {"fsdp"})[1] == local // FSDP
    head = 2 * cfg.embed * cfg.vocabulary // TENSOR
    gathered = received(long, "all-gather", {"pipeline", "fsdp"})[1]
    # Beside the head the tokens of 16 ranks, which are looked up, and again when their gradients
    # return: one group too many each way, in a loop that looks one ahead.
    tokens = 2 * (groups + 1) * 4 * P * FSDP * LENGTH
    assert gathered == head + tokens
    assert received(long, "reduce-scatter", {"pipeline", "fsdp"})[1] == head // P // FSDP


@pytest.fixture(scope="module")
def nemotron4():
    """The row of 128 GPUs: 16 ranks with 6 chunks of a layer, two groups of microbatches."""
    return Compiled("nemotron4_340b_bf16", 128)


@pytest.mark.nightly
def test_nemotron4_fits_with_fused_attention_of_head_dim_192(nemotron4):
    """In every schedule step one forward and one backward kernel, of an idle rank as well."""
    calls, p = nemotron4.program.custom_calls(), nemotron4.run.parallelism
    steps = p.virtual_stages * nemotron4.run.accumulation + p.pipeline - 1
    assert [calls[name] for name in cudnn.CALLS] == [steps, steps] == [207, 207]
    assert nemotron4.peak_gib <= H100.memory_limit / 2**30
    assert nemotron4.executed_ratio == pytest.approx(207 / 192, rel=5e-3)
    with jax.set_mesh(nemotron4.mesh):
        check_program(nemotron4.compiled, nemotron4.run)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="needs jax 0.11, which schedules otherwise: Python 3.12"
)
def test_the_steady_state_hardly_waits_for_collectives(nemotron4):
    """Each direction's products hide what the other one sends. Sums over tensor ranks wait a little
    behind the activations, since all collectives share a queue; with two queues nothing waits."""
    bound = schedule.Walk(nemotron4.program).under(schedule.Roofline(H100))
    transfers = bound.transfers
    # Each of a loop's two bodies runs in half of its 96 steps; before and after them are 111.
    steady = [t for t in transfers if t.collective.count == 48]
    permutes = [t for t in steady if t.collective.kind == "collective-permute"]
    assert sum(t.collective.count for t in permutes) == 5 * 96
    assert sum(t.exposed_s for t in steady) < 0.01 * bound.step_s


def test_the_plan_names_what_the_ranks_of_a_pipeline_send_each_other(nemotron4):
    timeline = schedule.Walk(nemotron4.program).under(schedule.Roofline(H100))
    transfers = traffic_by_axes(timeline, H100, lambda c: axes_of(c, nemotron4.run.mesh_shape))
    permutes = [t for t in transfers if t.kind == "collective-permute"]
    sent = 4 * 207 + 207 + 111 + 3
    assert [(t.axes, t.across_domains, t.count) for t in permutes] == [("pipeline", True, sent)]


def test_slots_are_updated_in_place(long):
    slots = interleaved_1f1b(P, V, 6 * P).slots
    copied = Counter(
        i.opcode
        for i, _, runs in long.program.walk()
        for _, shape in i.arrays
        if runs > 1 and i.opcode.startswith("copy") and shape[:1] == (slots,)
    )
    assert not copied


def test_gradients_are_added_to_their_sums_in_place(nemotron4):
    """In each of 207 steps, for each of a layer's two largest weights, one kernel that reads the
    sum and the gradient and writes the sum. Nothing copies sums out of their stack."""
    weight = 2 * EMBED * 4 * EMBED // TENSOR
    adding = sum(
        runs
        for _, kernel, runs in schedule.Walk(nemotron4.program).kernels()
        if kernel.source.endswith("dynamic_update_slice") and kernel.bytes // weight == 3
    )
    assert adding == 2 * 207


def test_memory_does_not_grow_with_the_microbatches(short, long):
    """Except the tables of actions: a few numbers for each step."""
    assert abs(short.peak_gib - long.peak_gib) < 2**-10


def test_farthest_pair_of_a_ring():
    text = "source_target_pairs={{0,16},{16,32},{32,0}}, metadata={}"
    assert collectives.groups(text)[0] == (32, 0)
