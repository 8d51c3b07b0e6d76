"""Every mesh, remat policy and chunk size against one device with the recipe's own: neither loss
nor gradients change."""

from functools import cache

import pytest
from cases import tiered
from steps import MESHES, assert_same, loss_and_gradients
from tiny import tiny_run

from jaxbench.ops.ssd import xla

MODELS = {
    "llama": ("llama31_8b_bf16",),
    "nemotron4": ("nemotron4_340b_bf16",),
    "nemotronh": ("nemotronh_56b_bf16",),
    # Learned positions, biases in every layer, and a tied head.
    "gpt3": ("gpt3_5b_bf16",),
    # Drops included: which tokens are dropped depends on groups of tokens, never on the mesh.
    "grok1": ("grok1_314b_bf16",),
    "grok1, dropless": (
        "grok1_314b_bf16",
        "model.experts={capacity_factor: null, rank_capacity_factor: 8}",
    ),
    # Qwen3: norms of queries and keys, whose gains all heads share, and small experts.
    "qwen3": (
        "grok1_314b_bf16",
        "model.experts={capacity_factor: null, rank_capacity_factor: 8, count: 16, top_k: 4}",
        "model.attention.qk_norm=true",
        "model.norm_eps=1e-6",
    ),
    # Nemotron 3 Super: a router whose bias has the loads as its gradient, experts without gates in
    # a latent space, a shared one, a block that predicts two further tokens.
    "nemotron3": (
        "nemotronh_56b_bf16",
        "model.layers=8",
        "model.pattern=ME*E",
        "model.mlp=null",
        "model.experts={count: 8, top_k: 4, ffn: 24, activation: relu2, latent: 32}",
        "model.experts={shared_ffn: 48, router: sigmoid, gate_scale: 2.5, bias_rate: 0.001}",
        "model.experts={groups: 4, top_groups: 2, balance_loss: 0.1, rank_capacity_factor: 8}",
        "model.prediction={pattern: '*E', depth: 2, loss: 0.3}",
        "execution.remat=residual,up:6,mamba",
    ),
    # DeepSeek-V3: latent attention, a dense layer first, and a block that predicts further tokens.
    "deepseek3": ("deepseek_v3_bf16", "model.experts.balance_loss=0.1"),
    # GPT-OSS: windows, sinks and biases; alternating layers.
    "gpt_oss": ("gpt_oss_120b_bf16",),
    "gpt_oss, with a capacity": (
        "gpt_oss_120b_bf16",
        "model.experts={capacity_factor: 1.0, capacity_tokens: 8}",
    ),
    # One batched matmul for all experts, without a limit that these few tokens reach.
    "gpt_oss, slots of experts": ("gpt_oss_120b_bf16", "model.experts.slots=own"),
    # Eight ranks do not divide them, so each holds slices of experts at rest.
    "qwen3, twelve experts": (
        "qwen3_30b_a3b_bf16",
        "model.experts={count: 12, top_k: 4, rank_capacity_factor: 8}",
    ),
    # Tied: gradients of the table come from both of its uses.
    "grok1, tied": ("grok1_314b_bf16", "model.tied=true"),
}
"""Recipes with overrides of the model."""

EXPERT = {
    "expert 8": ("parallelism.expert=8",),
    "fsdp 2 x expert 2 x tensor 2": (
        "parallelism.fsdp=2", "parallelism.expert=2", "parallelism.tensor=2",
    ),
    "expert 2 x context 2 x tensor 2": (
        "parallelism.expert=2", "parallelism.context=2", "parallelism.tensor=2",
    ),
    "data 2 x fsdp 2 x expert 2": ("parallelism.fsdp=2", "parallelism.expert=2"),
}  # fmt: skip
FOUR = {
    f"{axis} 2 x expert 4": ("parallelism.expert=4", *changes)
    for axis, changes in {
        "data": (),
        **{axis: (f"parallelism.{axis}=2",) for axis in ("fsdp", "context", "tensor")},
    }.items()
}
REMAT = ("none", "full", "query,key:1,value,attention:2,gate,up:2")
DENSE, MIXED = "data 2 x fsdp 2 x tensor 2", "fsdp 2 x context 2 x tensor 2"
EXPERTS, CONTEXT = "fsdp 2 x expert 2 x tensor 2", "expert 2 x context 2 x tensor 2"

NEWER = ("nemotron3", "deepseek3", "gpt_oss")

CASES = [
    *(("llama", mesh, None) for mesh in MESHES),
    *(("llama", None, remat) for remat in REMAT),
    *(("llama", mesh, "none") for mesh in (DENSE, MIXED)),
    # Other families with each axis and policy that their own layers see.
    *(("nemotron4", mesh, None) for mesh in ("tensor 4 x data 2", MIXED)),
    *(("gpt3", mesh, None) for mesh in ("fsdp 8", "tensor 4 x data 2", MIXED)),
    ("nemotronh", "tensor 4 x data 2", None),
    *(("nemotronh", None, remat) for remat in ("none", "full")),
    *(("grok1", mesh, None) for mesh in EXPERT),
    *(("grok1, dropless", mesh, None) for mesh in ("expert 8", "data 2 x fsdp 2 x expert 2")),
    # On `EXPERTS` in parts, below.
    *((model, CONTEXT, None) for model in ("qwen3", "deepseek3", "gpt_oss")),
    *((model, None, "none") for model in NEWER),
    ("nemotron3", None, "full"),
    # All experts on every rank, their weights gathered.
    *(("qwen3", mesh, None) for mesh in ("fsdp 8", DENSE)),
    ("deepseek3", "fsdp 8", None),
    *(("qwen3, twelve experts", mesh, None) for mesh in ("fsdp 8", EXPERTS)),
    ("gpt_oss", None, REMAT[2]),
    # Four ranks of experts with each other axis; with stages in `test_pipeline`.
    *zip(("qwen3", "nemotron3", "deepseek3", "gpt_oss"), FOUR, [None] * 4, strict=True),
    *(("gpt_oss, with a capacity", mesh, None) for mesh in (EXPERTS, CONTEXT)),
    *(("gpt_oss, slots of experts", mesh, None) for mesh in ("fsdp 8", CONTEXT)),
    *(("grok1, tied", EXPERTS, remat) for remat in ("none", "attention,residual:1")),
]
"""(model, mesh or None for one device, remat or None for the recipe's)."""

QUICK = [("llama", DENSE, None), ("llama", MIXED, None)]
SLOW = [
    ("llama", None, REMAT[2]), ("llama", MIXED, "none"), ("llama", "context 4 x tensor 2", None),
    ("gpt3", MIXED, None), ("nemotronh", "tensor 4 x data 2", None),
    ("deepseek3", CONTEXT, None), ("qwen3, twelve experts", EXPERTS, None),
    ("grok1, dropless", "data 2 x fsdp 2 x expert 2", None),
    ("gpt_oss, slots of experts", CONTEXT, None),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    monkeypatch.setattr(xla, "SSD_CHUNK", 4)


@cache
def one_device(model):
    """Loss and gradients of the tiny recipe on one device, in several chunks."""
    family, *overrides = MODELS[model]
    return loss_and_gradients(tiny_run(*overrides, family=family))


@pytest.mark.parametrize(
    "case", tiered(QUICK, CASES, SLOW), ids=lambda case: ", ".join(map(str, case))
)
def test_neither_loss_nor_gradients_change(case):
    model, mesh, remat = case
    family, *overrides = MODELS[model]
    overrides += (MESHES | EXPERT | FOUR)[mesh] if mesh else ()
    overrides += [f"execution.remat={remat}"] if remat else ()
    run = tiny_run(*overrides, family=family, devices=8 if mesh else 1)
    assert run.unrolled == (remat == "none")
    # Gradients are sums over 256 tokens and some layers, in another order on each mesh; those of
    # decay rates are sums of terms of both signs.
    roundings = 300 if model in ("nemotronh", "nemotron3") else 200 if mesh else 50
    assert_same(loss_and_gradients(run), one_device(model), roundings)


PARTS = ("grok1", "nemotron3", "deepseek3", "gpt_oss")


@pytest.mark.parametrize("model", tiered([], PARTS, ["grok1"]))
def test_experts_in_parts_of_a_microbatch_give_the_same_gradients(model):
    family, *overrides = MODELS[model]
    overrides += [*EXPERT[EXPERTS], "execution.expert_parts=2"]
    run = tiny_run(*overrides, family=family, devices=8)
    # Gradients of experts are sums of two products more, of those of a mesh.
    roundings = 300 if model == "nemotron3" else 200
    assert_same(loss_and_gradients(run), one_device(model), roundings)


LAYERS = [
    ("llama", DENSE), ("nemotronh", "tensor 4 x data 2"), ("nemotron3", "data 2 x expert 4"),
    ("grok1, dropless", "data 2 x fsdp 2 x expert 2"), ("deepseek3", "data 2 x expert 4"),
]  # fmt: skip
"""(model, mesh) of replicas whose sums layers make, in each of two microbatches."""


@pytest.mark.parametrize("case", tiered([], LAYERS, LAYERS[:2]), ids=", ".join)
def test_sums_over_replicas_in_each_layer_give_the_same_gradients(case):
    model, mesh = case
    family, *overrides = MODELS[model]
    overrides += [*(MESHES | EXPERT | FOUR)[mesh], "execution.replica_sums=layer"]
    run = tiny_run(*overrides, family=family, devices=8)
    assert_same(loss_and_gradients(run), one_device(model), 300)


@pytest.mark.slow
def test_fp8_that_gathers_in_bf16_may_sum_over_replicas_in_each_layer():
    changes = "precision.dtype=fp8", "precision.scaling=current", "precision.gather=bf16"
    runs = (
        tiny_run(*changes, *MESHES[DENSE], f"execution.replica_sums={sums}", devices=8)
        for sums in ("layer", "step")
    )
    actual, expected = map(loss_and_gradients, runs)
    assert_same(actual, expected, 300)


@pytest.mark.slow
def test_one_chunk_or_many_give_the_same_gradients(monkeypatch):
    expected = one_device("nemotronh")
    monkeypatch.setattr(xla, "SSD_CHUNK", 128)
    run = tiny_run(family="nemotronh_56b_bf16")
    assert_same(loss_and_gradients(run), expected, roundings=300)
