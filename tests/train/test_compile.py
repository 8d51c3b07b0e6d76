"""Real rows compiled by the real compiler for absent GPUs: exact figures of the program.

Skipped where the CUDA plugin is not installed (`pip install '.[plan]'`).
"""

import math
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from cases import tiered
from compiled import Compiled, needs_compiler

from jaxbench.base.errors import RecipeError, RunFailed
from jaxbench.base.hardware import H100, PLANNED
from jaxbench.base.scopes import SCAN, TRITON
from jaxbench.forecast.costs import Measured
from jaxbench.forecast.tables import load
from jaxbench.jax_internals import READS_HOST
from jaxbench.ops.attention import cudnn
from jaxbench.recipe import flops
from jaxbench.train.program import offloaded_bytes
from jaxbench.train.program_checks import check_program, describe_kernels
from jaxbench.xla import host_copies, schedule
from jaxbench.xla.custom_calls import quantized_matmuls
from jaxbench.xla.rewrites import COLLECTIVES

pytestmark = needs_compiler
LIMIT_GIB = H100.memory_limit / 2**30


@pytest.fixture(scope="module")
def llama2():
    return Compiled("llama2_70b_bf16", 64)


COPIES = {"mxfp8": 2 * (1 + 1 / 32), "nvfp4": 1 / 2 + 1 / 16**2}
"""Gathered bytes per weight and microbatch: MXFP8 has a copy for each contraction; NVFP4's square
blocks serve both."""


@pytest.mark.parametrize("dtype", tiered([], COPIES, slow=["nvfp4"]))
def test_block_scaled_products_and_what_they_move(dtype):
    """Three products of each weight, whose operands two kernels make of its activations, and
    quantized weights alone in all-gathers."""
    settings = f"precision.dtype={dtype}", "model.layers=2", "batch.global_batch=8"
    row = Compiled("llama31_8b_fp8", 8, *settings, gpu=PLANNED["b200"])
    weights = "0.mixer.qkv", "0.mixer.out", "1.mixer.gate_up", "1.mixer.down"
    assert quantized_matmuls(row.program, dtype) == {
        (f"stacks.0.layers.{name}", True): 3 * 2 for name in weights
    }
    matmuls = [i for i, _, _ in row.program.walk() if i.target == "__cudnn$blockScaledDot"]
    # In NVFP4 the last operand is the scale of the whole result.
    assert {len(i.operands) for i in matmuls} == {5 if dtype == "nvfp4" else 4}
    kinds = Counter()
    for work, runs, _ in row.program.works():
        kinds[work.kind] += runs
    assert kinds[f"quantize_{dtype}"] == kinds[f"amax_{dtype}"] or dtype == "mxfp8"
    assert kinds[f"quantize_{dtype}"] == 2 * len(weights) * 2
    gathered = sum(
        math.prod(dims) * runs
        for i, _, runs in row.program.walk()
        if i.opcode in ("all-gather", "all-gather-start")
        for name, dims in i.arrays[len(i.arrays) // 2 if i.opcode.endswith("start") else 0 :]
        if name == "u8"
    )
    m = row.run.model
    assert m.attention
    assert m.mlp
    inner = m.attention.heads * m.attention.head_dim
    kv = 2 * m.attention.kv_heads * m.attention.head_dim
    parameters = m.embed * (2 * inner + kv + 3 * m.mlp.ffn)
    assert gathered == 2 * parameters * COPIES[dtype]
    # The activation's exponentials are computed again; none waits in fp32 for the backward pass.
    wide = math.prod((row.run.microbatch, row.run.batch.sequence_length, m.mlp.ffn))
    fusions = [i for i, _, _ in row.program.walk() if i.opcode == "fusion"]
    results = {(name, math.prod(dims)) for i in fusions for name, dims in i.arrays}
    assert ("bf16", wide) in results
    assert ("f32", wide) not in results
    with jax.set_mesh(row.mesh):
        check_program(row.compiled, row.run)


@pytest.mark.parametrize("dtype", tiered([], COPIES, slow=["mxfp8"]))
def test_an_input_is_quantized_for_the_matmuls_that_follow(dtype):
    """Two layers that are recomputed. The forward pass quantizes along features, and the
    recomputation along tokens; for the outputs that it needs, which `down` has none of, along
    features too. Gradients are quantized along both."""
    settings = f"precision.dtype={dtype}", "execution.remat=full", "model.layers=2"
    row = Compiled("llama31_8b_fp8", 8, *settings, "batch.global_batch=8", gpu=PLANNED["b200"])
    results = Counter()
    for i, _, runs in row.program.walk():
        if i.opcode == "custom-call" and f"quantize_{dtype}" in i.attributes:
            kind = "transpose(" in i.attributes, "rematted" in i.attributes
            results[kind] += runs * len(i.arrays) // 2  # values and scales
    forward, backward, recomputed = (False, False), (True, False), (True, True)
    assert results == {forward: 2 * 4, recomputed: 2 * (4 + 3), backward: 2 * 4 * 2}


@pytest.mark.parametrize("dtype", tiered([], ("bf16", "mxfp8")))
def test_whole_experts_are_gathered_and_scattered_without_a_copy(dtype):
    """A gather along a dimension other than the first would have to be transposed."""
    gpus = {"bf16": 16, "mxfp8": 8}[dtype]
    settings = f"batch.global_batch={gpus}", "batch.microbatch=1", "model.layers=2"
    row = Compiled(f"qwen3_30b_a3b_{dtype}", gpus, *settings, gpu=PLANNED["b200"])
    m = row.run.model
    assert m.experts
    weight = m.experts.count * m.embed * m.experts.ffn
    whole = [
        i
        for i, _, _ in row.program.walk()
        if {math.prod(dims) for _, dims in i.arrays} & {weight, 2 * weight}
    ]
    assert [i for i in whole if i.kind == "all-gather"]
    assert not [i.name for i in whole if i.opcode in ("copy", "transpose") or "transpose" in i.name]


def test_a_gpu_without_block_scaled_products_is_refused():
    row = Compiled("llama31_8b_fp8", 8, "precision.dtype=mxfp8", "model.layers=1",
                   "batch.global_batch=8")  # fmt: skip
    with jax.set_mesh(row.mesh), pytest.raises(RunFailed, match="MXFP8 was asked for"):
        check_program(row.compiled, row.run)


offloads = pytest.mark.skipif(
    not READS_HOST, reason="needs jaxlib 0.11.2, which offloads: Python 3.12"
)


@pytest.mark.skipif(READS_HOST, reason="offloads: Python 3.11 has an older jaxlib, which does not")
def test_an_older_compiler_recomputes_what_it_would_read_from_wrong_places(llama2):
    assert offloaded_bytes(llama2.compiled) == 0
    assert llama2.executed_ratio == pytest.approx(1.169, abs=1e-3)


@offloads
def test_llama2_70b_on_64_gpus_fits_and_recomputes_nothing(llama2):
    """Gate and up wait in the host's memory: one entry for each layer, which takes what the one
    before made, and nothing else is copied there."""
    assert llama2.peak_gib <= LIMIT_GIB
    assert llama2.executed_ratio == pytest.approx(1.0, abs=1e-3)
    layer = 2 * 2 * 4096 * 2 * 28672
    assert offloaded_bytes(llama2.compiled) == 80 * layer
    copied = schedule.Walk(llama2.program).under(schedule.Roofline(H100)).host
    # The loop is peeled: what is written last is not read back, and nothing for no layer.
    assert (copied.to_host, copied.from_host) == (80 * layer, 78 * layer)
    kernels = [
        i for i, scope, _ in llama2.program.walk()
        if host_copies.copies(i, scope) and not i.is_start
    ]  # fmt: skip
    assert not [i for i in kernels if i.opcode not in ("dynamic-slice", "dynamic-update-slice")]
    assert set(llama2.program.flops()) == {("product", "bf16"), ("attention", "bf16")}


@offloads
@pytest.mark.parametrize(
    ("remat", "offload", "features"),
    [("query,key,value,attention,residual", "gate,up", 2 * 28672), ("full", "input", 8192)],
    ids=["gate and up", "all that is saved"],
)
def test_microbatches_share_host_memory(remat, offload, features):
    """XLA unrolls the loop over microbatches, and would allocate for two of them at once."""
    row = Compiled("llama31_70b_bf16", 64, "model.layers=8", "batch.microbatch=1",
                   f"execution.remat={remat}", f"execution.offload={offload}")  # fmt: skip
    assert (row.run.accumulation, row.run.microbatch) == (2, 1)
    assert offloaded_bytes(row.compiled) == 8 * 8192 * features * 2


@offloads
def test_the_host_s_memory_is_read_where_it_was_written(llama2):
    """Offsets and strides of the copy engine, which a compiler before jaxlib 0.11.2 got wrong where
    a loop goes backwards (openxla/xla issue 46231)."""
    entry, found = (
        2 * 4096 * 28672 * 2,
        {"dynamic-slice": Counter(), "dynamic-update-slice": Counter()},
    )
    places = re.compile(r'"byte_offset":"(-?\d+)","byte_stride":"(-?\d+)"')
    for i, scope, runs in llama2.program.walk():
        if (
            i.opcode in found
            and host_copies.copies(i, scope)
            and (place := places.findall(i.attributes))
        ):
            offset, stride = map(int, place[-1])
            found[i.opcode].update((offset + n * stride) / entry for n in range(runs))
    # Gate and up. The last layer but one is written after the loop, and stays on the device too.
    assert found["dynamic-update-slice"] == dict.fromkeys(range(79), 2)
    assert found["dynamic-slice"] == dict.fromkeys(range(1, 79), 2)


@pytest.mark.nightly
@offloads
def test_the_forecast_guides_a_schedule_that_exposes_less():
    """XLA's own estimates begin reads from the host's memory too late on this row."""
    exposed = {}
    for name in ("tuned", "guided"):
        row = Compiled("llama2_70b_bf16", 1024, f"execution.xla_flags={name}")
        with jax.set_mesh(row.mesh):
            described = describe_kernels(row.run)
        costs = Measured(H100, load("h100"))
        exposed[name] = schedule.Walk(row.program).under(costs).exposed_s
    assert described["schedule"] == "guided by the forecast"
    assert exposed["guided"] < exposed["tuned"] / 5


def test_attention_is_fused_and_runs_once_per_pass(llama2):
    calls = llama2.program.custom_calls()
    assert [calls[name] for name in cudnn.CALLS] == [80, 80]
    with jax.set_mesh(llama2.mesh):
        check_program(llama2.compiled, llama2.run)


def test_every_weight_is_gathered_once_per_pass_and_layer(llama2):
    """Bytes equal the hand count: bf16 weights forward and backward, gradients once."""
    cfg, n = llama2.run.model, 64
    a = cfg.attention
    layer = 2 * (2 * cfg.embed * (a.heads + a.kv_heads) * a.head_dim + 3 * cfg.embed * cfg.mlp.ffn)
    head = 2 * cfg.embed * cfg.vocabulary
    tokens = 4 * 4096 * 128
    received = dict.fromkeys(COLLECTIVES, 0)
    for c in llama2.collectives:
        received[c.kind] += c.bytes * c.count
    assert received["all-gather"] == 2 * 80 * layer + head + tokens
    assert received["reduce-scatter"] == (80 * layer + head) // n
    # The embedding moves activations: once forward, once backward.
    assert received["all-to-all"] == 2 * 2 * 4096 * cfg.embed * 2
    gains = 4 * (2 * 80 + 1) * cfg.embed
    assert gains <= received["all-reduce"] < gains + 100
    assert received["collective-permute"] == 0


@pytest.mark.nightly
def test_sums_over_replicas_follow_each_layer():
    """As many bytes as in sums at the end of the step, the embedding's of them in fp32, and never
    more at once than a layer's, with which the compiler may combine the head's."""
    row = Compiled(
        "llama2_70b_bf16", 256, "model.layers=4", "execution.offload=none",
        "execution.replica_sums=layer",
    )  # fmt: skip
    pairs = [c for c in row.collectives if c.kind == "all-reduce" and len(c.devices) == 2]
    cfg, shard = row.run.model, 128
    a, head = cfg.attention, 2 * cfg.embed * cfg.vocabulary // shard
    matrices = 2 * cfg.embed * (a.heads + a.kv_heads) * a.head_dim
    layer = 2 * (matrices + 3 * cfg.embed * cfg.mlp.ffn) // shard
    assert sum(c.bytes * c.count for c in pairs) == 4 * layer + head + 2 * head
    assert max(c.bytes for c in pairs) <= layer + head


@pytest.mark.slow
def test_what_tensor_ranks_send_in_fp8():
    """A layer gathers the inputs of two regions forward and again backward, and two gradients, all
    in FP8. Only the loss gathers in bf16.

    Nothing else is sent: Shardy once took the residual's gradient from the copy that all ranks had
    gathered, and each rank's slice of it became a `collective-permute` of its own tokens."""
    row = Compiled(
        "llama31_8b_fp8", 8, "parallelism.tensor=2", "parallelism.fsdp=4", "model.layers=2",
        "batch.global_batch=8", "execution.remat=query,key,value,attention,residual,gate,up",
    )  # fmt: skip
    assert "collective-permute" not in {c.kind for c in row.collectives}
    gathered = Counter[int]()
    for c in row.collectives:
        if c.kind == "all-gather" and c.devices == (0, 1):
            gathered[c.bytes] += c.count
    assert row.run.accumulation == 2
    assert gathered == {8192 * 4096: 2 * 6 * 2, 2 * 8192 * 4096: 2}


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="needs jax 0.11, which pipelines: Python 3.12"
)
def test_collectives_are_hidden_behind_products(llama2, llama2_fp8):
    """All but the first and the last of the step: at most a peer's 4 GiB. At most half of its
    19520 launches, which the compiler of jax 0.11 gave."""
    for row in (llama2, llama2_fp8):
        timeline = schedule.Walk(row.program).under(schedule.Roofline(H100))
        assert timeline.uncovered_bytes <= 4 * 2**30
    if jax.__version_info__[:2] == (0, 11):
        assert timeline.launches <= 19520 / 2


def test_slots_are_neither_zeroed_nor_copied(llama2_fp8):
    """Activations wait in 80 layers of 128 MiB each; what is written there is one layer's."""
    slots = {"copy", "broadcast", "AllocateBuffer"}
    opcodes = Counter(
        i.target or i.opcode
        for i, _, _ in llama2_fp8.program.walk()
        if i.shape.startswith("bf16[80,2,4096,") and (i.target or i.opcode) in slots
    )
    assert set(opcodes) == {"AllocateBuffer"}


@pytest.fixture(scope="module")
def llama2_fp8():
    return Compiled("llama2_70b_fp8", 64)


def test_every_listed_product_is_fp8_and_no_other(llama2_fp8):
    """Forward and both gradients in 80 layers; the input of the MLP is computed again in all of
    them."""
    recomputed = {"0.mixer.qkv": 0, "0.mixer.out": 0, "1.mixer.gate_up": 80, "1.mixer.down": 0}
    products = quantized_matmuls(llama2_fp8.program, "fp8")
    assert products == {
        (f"stacks.0.layers.{name}", True): 3 * 80 + again for name, again in recomputed.items()
    }
    calls = llama2_fp8.program.custom_calls()
    assert calls["__cublas$lt$matmul$f8"] == sum(products.values()) == 1040
    # Only the head is left in bf16: logits in chunks, the gradients of the hidden state and of the
    # head in one product each.
    assert calls["__cublas$lt$matmul"] + calls["__cublas$gemm"] == 4 + 1 + 1
    with jax.set_mesh(llama2_fp8.mesh):
        check_program(llama2_fp8.compiled, llama2_fp8.run)


def test_fp8_takes_no_more_memory_than_bf16(llama2_fp8):
    """With the same activations saved."""
    changes = f"execution.remat={llama2_fp8.run.execution.remat}", "execution.offload=none"
    assert llama2_fp8.peak_gib <= Compiled("llama2_70b_bf16", 64, *changes).peak_gib


def test_fp8_gathers_half_the_bytes(llama2, llama2_fp8):
    assert llama2_fp8.executed_ratio <= 1.18
    head = 2 * 8192 * 32000
    tokens = 4 * 4096 * 128
    gathered = {
        row: sum(c.bytes * c.count for c in row.collectives if c.kind == "all-gather")
        for row in (llama2, llama2_fp8)
    }
    assert 2 * (gathered[llama2_fp8] - head - tokens) == gathered[llama2] - head - tokens


@pytest.mark.nightly
def test_gathering_in_bf16_is_a_choice(full_remat, llama2_fp8):
    gathered = [
        {c.bytes for c in row.collectives if c.kind == "all-gather" and "gate_up" in c.source}
        for row in (full_remat, llama2_fp8)
    ]
    assert gathered == [{2 * 8192 * 2 * 28672}, {8192 * 2 * 28672}]


@pytest.fixture(scope="module")
def unrolled():
    """Without remat, in two microbatches."""
    return Compiled("llama31_8b_bf16", 8, "model.layers=2", "batch.global_batch=16")


@pytest.mark.nightly
def test_without_remat_nothing_is_computed_again_or_stacked(unrolled):
    assert unrolled.executed_ratio == pytest.approx(1, abs=1e-3)
    stacked = [i.name for i, _, _ in unrolled.program.walk() if "[2,1,8192," in i.shape]
    assert stacked == []


@pytest.mark.nightly
def test_without_remat_weights_are_gathered_once_per_pass(unrolled):
    cfg, a = unrolled.run.model, unrolled.run.model.attention
    attention = 2 * cfg.embed * (a.heads + a.kv_heads) * a.head_dim
    layer = 2 * (attention + 3 * cfg.embed * cfg.mlp.ffn)
    tokens = 4 * 8 * 8192
    gathered = sum(c.bytes * c.count for c in unrolled.collectives if c.kind == "all-gather")
    assert gathered == 2 * (2 * layer + 2 * cfg.embed * cfg.vocabulary + tokens)


@pytest.mark.nightly
def test_without_remat_one_gpu_multiplies_in_fp8():
    """No gather stands between a weight of FP8 and the layer that reads it."""
    row = Compiled("llama31_8b_fp8", 1, "model.layers=2", "model.vocabulary=4096")
    with jax.set_mesh(row.mesh):
        check_program(row.compiled, row.run)


@pytest.mark.nightly
def test_layers_in_bf16_and_current_scaling():
    row = Compiled(
        "llama31_8b_fp8", 8, "model.layers=2", "precision.scaling=current",
        "precision.last_bf16_layers=1", "batch.global_batch=16", "batch.microbatch=1",
        "execution.remat=none",
    )  # fmt: skip
    # One layer, two microbatches, three products each; nothing is recomputed.
    products = quantized_matmuls(row.program, "fp8")
    assert set(products.values()) == {2 * 3}
    assert all(in_fp8 for _, in_fp8 in products)
    with jax.set_mesh(row.mesh):
        check_program(row.compiled, row.run)


def test_a_product_that_is_not_fp8_is_an_error(llama2, llama2_fp8):
    with (
        jax.set_mesh(llama2.mesh),
        pytest.raises(RunFailed, match=r"FP8 was asked for, but matmul \S+ runs 0 times in it"),
    ):
        check_program(llama2.compiled, llama2_fp8.run)


def test_no_partitioner_fallback_and_no_compiler_remat(llama2):
    """XLA warns on stderr when the partitioner replicates an array or memory is too tight."""
    assert "rematerialization" not in llama2.warnings
    # What the pass computes again is named after the first one: fusion.3.remat, fusion.3.remat2.
    assert not re.search(r"\.remat\d*\b", llama2.compiled.as_text())


@pytest.fixture(scope="module")
def full_remat():
    changes = "execution.remat=full", "model.layers=4", "precision.gather=bf16"
    return Compiled("llama2_70b_fp8", 64, *changes)


@pytest.mark.nightly
@pytest.mark.parametrize(("batch", "passes", "each", "embedding"), [(64, 4, 4, 4), (16, 1, 2, 4)])
def test_replicas_sum_their_gradients_once_per_step(batch, passes, each, embedding):
    """Two replicas, four microbatches: each gradient crosses replicas once, in fp32; those of a
    single one in the bf16 that they are computed in, which for the embedding's is fp32."""
    row = Compiled(
        "llama31_8b_bf16", 16, f"batch.global_batch={batch}", "model.layers=4",
        "model.vocabulary=4096",
    )  # fmt: skip
    assert (row.run.data, row.run.accumulation) == (2, passes)
    assert row.run.gradient_bytes == (4 if passes > 1 else 2)
    crossing = [c for c in row.collectives if c.kind == "all-reduce"]
    assert all(c.count == 1 for c in crossing if c.bytes > 100)
    counts = flops.parameters(row.run.model)
    matrices = counts["total"] - counts["norms"]
    sharded = (each * matrices + (embedding - each) * counts["embedding"]) // 8
    assert sum(c.bytes for c in crossing if c.group == 2) == sharded
    assert sum(c.bytes for c in crossing if c.group == 16) >= each * counts["norms"]
    scattered = [c for c in row.collectives if c.kind == "reduce-scatter"]
    assert {c.group for c in scattered} == {8}


@pytest.fixture(scope="module")
def grok1():
    return Compiled("grok1_314b_bf16", 512)


def test_grok1_on_512_gpus_fits_and_recomputes_little(grok1):
    assert grok1.peak_gib <= LIMIT_GIB
    assert grok1.executed_ratio <= 1.22


def test_tokens_reach_their_experts_by_plain_all_to_alls(grok1):
    """Ragged ones broke with several collectives in flight (docs/reference/xla_flags.md)."""
    assert {c.kind for c in grok1.collectives} >= {"all-to-all"}
    assert "ragged" not in grok1.compiled.as_text()


def test_only_the_chosen_experts_and_no_dispatch_products(grok1):
    """Executed products equal the hand count: forward, gradients, and what remat runs again."""
    cfg, tokens = grok1.run.model, 2 * 8192
    a, experts = cfg.attention, cfg.experts
    qkv = cfg.embed * (a.heads + 2 * a.kv_heads) * a.head_dim
    out = cfg.embed * a.heads * a.head_dim
    chosen = experts.top_k * cfg.embed * experts.ffn
    # Down products never run again; output projections only where `residual` is not kept.
    layers = 64 * (4 * qkv + 4 * 2 * chosen + 3 * chosen) + (32 * 3 + 32 * 4) * out
    # Routing decisions are kept: the router runs once. Each of its matmuls is three in bf16.
    router = 64 * 3 * 3 * cfg.embed * experts.count
    head = 3 * cfg.embed * cfg.vocabulary
    assert grok1.program.flops() == Counter(
        {
            ("product", "bf16"): 2 * tokens * (layers + router + head),
            ("attention", "bf16"): grok1.program.flops()["attention", "bf16"],
        }
    )


def test_tokens_travel_to_experts_and_weights_of_one_expert_are_gathered(grok1):
    cfg, tokens = grok1.run.model, 2 * 8192
    a = cfg.attention
    attention = 2 * 2 * cfg.embed * (a.heads + a.kv_heads) * a.head_dim
    expert = 2 * 3 * cfg.embed * cfg.experts.ffn
    head = 2 * cfg.embed * cfg.vocabulary
    received = dict.fromkeys(COLLECTIVES, 0)
    for c in grok1.collectives:
        received[c.kind] += c.bytes * c.count
    assert received["all-gather"] == 2 * 64 * (attention + expert) + head + 4 * tokens * 512
    assert received["reduce-scatter"] == 64 * (attention // 512 + expert // 64) + head // 512
    rows = 2 * tokens
    # Rows: there and back, forward and backward, and there again; gates: there and back.
    exchanged = 64 * rows * (5 * 2 * cfg.embed + 2 * 4)
    embedding = 2 * 2 * tokens * cfg.embed
    assert received["all-to-all"] == exchanged + embedding


@pytest.mark.nightly
def test_nemotronh_multiplies_what_a_hand_count_says():
    """Every product of XLA's scan is found in the program."""
    changes = "model.layers=3", "model.pattern=M*-", "execution.ssd=xla"
    row = Compiled("nemotronh_56b_bf16", 64, *changes)
    calls = row.program.custom_calls()
    assert [calls[name] for name in cudnn.CALLS] == [3, 3]
    # One layer, 3 passes, 2 sequences, 4 groups of a tensor rank: forward, recomputed, and two
    # products backward for each.
    runs = 4 * 3 * 2 * 4
    length, chunk, features, state = 8192, 256, 32 * 64, 256
    chunks = length // chunk
    forward = length * (chunk * (state + features) + 2 * state * features)
    between = features * state * chunks * chunks
    executed = [work.flops * n for work, n, source in row.program.works() if SCAN in source]
    assert sum(executed) == runs * 2 * (forward + between)
    assert row.program.flops()["product", "f32"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layers"), [("nemotronh_56b_bf16", 2), ("nemotron3_nano_30b_a3b_bf16", 1)]
)
def test_a_model_that_is_cut_needs_no_kernels_of_what_it_has_not(recipe, layers):
    """The first layers have neither attention nor experts."""
    gpus = 32 if recipe.startswith("nemotronh") else 16
    row = Compiled(recipe, gpus, f"model.layers={layers}")
    with jax.set_mesh(row.mesh):
        check_program(row.compiled, row.run)


@pytest.fixture(scope="module")
def mamba2():
    """One layer, on which the kernels were asked for."""
    changes = (
        "model.layers=1", "model.pattern=M", "model.attention=null", "model.mlp=null",
        "execution.ssd=pallas",
    )  # fmt: skip
    return Compiled("nemotronh_56b_bf16", 64, *changes)


@pytest.mark.nightly
def test_kernels_of_mamba2_run_once_per_pass_and_tell_what_they_cost(mamba2):
    """Three passes of 2 sequences, 4 groups of 32 heads. A pass runs the layer forward, in its
    recomputation (with the convolution's result kept), and in the kernels' own."""
    with jax.set_mesh(mamba2.mesh):
        check_program(mamba2.compiled, mamba2.run)
    runs, flops, moved = Counter(), {}, {}
    for _, kernel, times in schedule.Walk(mamba2.program).kernels():
        for work in kernel.works:
            if work.kind != "product":
                runs[work.kind] += times
                flops[work.kind], moved[work.kind] = work.flops, kernel.bytes
                assert (kernel.part == "scan") == work.kind.startswith("ssd")
    assert runs == {
        "conv_silu": 6, "ssd_forward": 9, "gate_norm": 6, "gate_norm_back": 3, "ssd_reverse": 3,
        "ssd_to_x": 3, "ssd_to_c": 3, "ssd_to_b": 3, "conv_silu_back": 3,
    }  # fmt: skip
    tokens, heads, features, state = 2 * 8192, 4 * 32, 64, 256
    # A program reads 128 columns of the state, and so makes the products of scores twice.
    per_token = {
        "ssd_forward": 64 * (state + features) + 2 * state * features,
        "ssd_reverse": state * features,
        # Three squares of 64 by 64 tokens, of the four in a chunk.
        "ssd_to_x": 96 * (state + 2 * features) + state * features,
        "ssd_to_c": 2 * 128 * features + state * features + 128 * state // 32,
    }
    for name, products in per_token.items():
        assert flops[name] == 2 * tokens * heads * products
    # bf16 features and states, every 128 tokens; fp32 time steps.
    x, maps, dt = 2 * tokens * heads * features, 2 * tokens * 4 * state, 4 * tokens * heads
    states = 2 * tokens // 128 * heads * state * features
    channels, scalars = x + 2 * maps, 4 * heads
    assert moved["ssd_reverse"] == maps + x + states + 2 * dt + scalars
    assert moved["ssd_to_x"] == channels + 2 * x + 2 * states + 4 * dt + (1 + 2 * 64) * scalars
    assert moved["ssd_to_c"] == channels + x + states + maps + 4 * dt


@pytest.mark.nightly
def test_xla_in_place_of_the_kernels_is_an_error(mamba2):
    text = mamba2.compiled.as_text().replace(TRITON, "something_else")
    plain = SimpleNamespace(as_text=lambda: text)
    with (
        jax.set_mesh(mamba2.mesh),
        pytest.raises(RunFailed, match="a fused Mamba-2 scan was asked"),
    ):
        check_program(plain, mamba2.run)


def test_plain_attention_in_place_of_the_fused_one_is_an_error(llama2):
    """A program without its calls."""
    text = re.sub(r"__cudnn\$fmha\w+", "something_else", llama2.compiled.as_text())
    plain = SimpleNamespace(as_text=lambda: text)
    with jax.set_mesh(llama2.mesh), pytest.raises(RunFailed, match="fused attention was asked for"):
        check_program(plain, llama2.run)


def test_an_unknown_compiler_option_is_an_error_and_no_abort():
    changes = "execution.xla_flags=tuned,xla_gpu_graph_level=0", "model.layers=1"
    with pytest.raises(RecipeError, match="xla_gpu_graph_level was removed from XLA; use"):
        Compiled("llama31_8b_bf16", 8, *changes, "batch.sequence_length=256")


@pytest.mark.nightly
def test_sinks_run_no_kernel_twice_and_windows_are_counted_as_such():
    """GPT-OSS on one GPU: a layer of each kind, twice."""
    row = Compiled("gpt_oss_120b_bf16", 1, "execution.remat=attention")
    calls = row.program.custom_calls()
    assert [calls[name] for name in cudnn.CALLS] == [4, 4]
    lengths = Counter()
    for work, runs, _ in row.program.works():
        if work.kind == "attention":
            lengths[work.sizes[2]] += runs
    assert lengths == {512: 4, 4096: 4}


@pytest.mark.nightly
def test_layers_of_a_long_block_are_recomputed_one_at_a_time():
    """Two blocks of five layers, two of them with experts, whose activations are the largest
    arrays: 17.9 GiB where the input of each layer is saved, 29.2 where all five are recomputed at
    once. Two further heads and applications of a block, one after the other, add the head's
    gradients, the block's weights, and the largest gradients of one of them."""
    changes = (
        "model.pattern=EM*EMEM*EM", "model.layers=10", "execution.expert_parts=1",
        "execution.ssd=xla", "execution.remat=residual",
    )  # fmt: skip
    assert Compiled("nemotron3_super_120b_a12b_bf16", 64, *changes).peak_gib < 23


@pytest.mark.nightly
def test_experts_in_parts_hide_their_exchanges():
    """All but a third of their bytes, next to the first gather and the last scatter; of one part,
    all are exposed. Weights are gathered once for both parts of a pass."""
    row = Compiled(
        "qwen3_30b_a3b_fp8", 16, "precision.dtype=bf16", "model.layers=2", "parallelism.fsdp=2",
        "parallelism.expert=8", "batch.microbatch=4", "execution.expert_parts=2",
        "execution.remat=query,key,value,attention,residual", "execution.offload=none",
    )  # fmt: skip
    assert "latency_estimator" not in row.warnings  # of each instruction that the guide leaves out
    sums = Counter()
    for c in row.collectives:
        sums[c.kind, c.group] += c.bytes * c.count
    timeline = schedule.Walk(row.program).under(schedule.Roofline(H100))
    assert timeline.uncovered_bytes <= sums["all-to-all", 8] * 0.65
    # Two layers of 16 experts in bf16, forward and backward.
    experts = row.run.model.experts
    assert experts
    weights = 2 * 2 * 16 * 3 * row.run.model.embed * experts.ffn
    assert sums["all-gather", 2] == 2 * row.run.accumulation * weights
    assert sums["reduce-scatter", 2] == row.run.accumulation * weights // 2


def test_matmuls_of_experts_in_parts_count_for_each_part():
    """A program that computes its experts at once is not the one of a run in two parts."""
    row = Compiled(
        "qwen3_30b_a3b_fp8", 1, "model.layers=1", "model.vocabulary=1024", "model.experts.count=8",
        "batch.sequence_length=512", "batch.global_batch=2", "batch.microbatch=2",
    )  # fmt: skip
    in_parts = replace(row.run.execution, expert_parts=2)
    with jax.set_mesh(row.mesh):
        check_program(row.compiled, row.run)
        message = r"matmul \S+down runs 3 times in it .* expected at least 6"
        with pytest.raises(RunFailed, match=message):
            check_program(row.compiled, replace(row.run, execution=in_parts))
