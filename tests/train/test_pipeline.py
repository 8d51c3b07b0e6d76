"""Pipelines on CPU devices: every mesh against one device, and FP8 against no pipeline."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import tiered
from steps import assert_same, new_state, same_sequences, sequences
from tiny import mesh_of, tiny_run, to_numpy

from jaxbench.models.context import Sequences, make_context
from jaxbench.ops.remat import Policy
from jaxbench.train import pipeline_ends
from jaxbench.train.step import gradients

LLAMA, NEMOTRON, GROK = "llama31_8b_bf16", "nemotron4_340b_bf16", "grok1_314b_bf16"
DEEPSEEK = "deepseek_v3_bf16"
GPT_OSS, GPT3 = "gpt_oss_120b_bf16", "gpt3_5b_bf16"

CASES = {
    # two groups of microbatches, a layer in each stage
    "pipeline 8": (NEMOTRON, 8, "full", "pipeline=8"),
    # nothing is recomputed; one layer of padding
    "pipeline 4 x tensor 2": (LLAMA, 7, "none", "pipeline=4 virtual_stages=2 tensor=2"),
    # M = 4 P; chunks of two layers, the last of them and half of another padding
    "pipeline 2 x fsdp 2 x context 2": (
        LLAMA, 5, "attention,residual", "pipeline=2 virtual_stages=2 fsdp=2 context=2",
    ),
    "pipeline 2 x data 2 x tensor 2": (
        NEMOTRON, 6, "query,key,value,attention,up", "pipeline=2 virtual_stages=3 tensor=2",
    ),
    "pipeline 4 x fsdp 2": (NEMOTRON, 4, "attention,up", "pipeline=4 fsdp=2"),
    "pipeline 2 x expert 2 x tensor 2": (
        GROK, 4, "attention,residual", "pipeline=2 virtual_stages=2 expert=2 tensor=2",
    ),
    # Learned positions of each rank's microbatches, and a tied head.
    "pipeline 2 x context 2 x tensor 2": (GPT3, 5, "attention,up", "pipeline=2 context=2 tensor=2"),
    "pipeline 4 x expert 2": (GROK, 5, "full", "pipeline=4 expert=2"),
    "pipeline 2 x fsdp 2 x context 2, experts": (GROK, 2, "none", "pipeline=2 fsdp=2 context=2"),
    "pipeline 2 x expert 2 x tensor 2, dropless": (
        GROK, 4, "attention,gate,up", "pipeline=2 virtual_stages=2 expert=2 tensor=2",
    ),
    # A dense layer in front of the stages, multi-token prediction behind them, and biases of the
    # router, whose gradients are loads; one block of padding.
    "pipeline 2 x expert 2 x tensor 2, deepseek3": (
        DEEPSEEK, 4, "latent,attention", "pipeline=2 virtual_stages=2 expert=2 tensor=2",
    ),
    "pipeline 2 x fsdp 2 x context 2, deepseek3": (
        DEEPSEEK, 3, "full", "pipeline=2 fsdp=2 context=2",
    ),
    # Stages of two layers, of which one has a window; layers are recomputed one at a time, experts
    # computed in two parts.
    "pipeline 2 x expert 2 x context 2, gpt_oss": (
        GPT_OSS, 4, "attention,residual", "pipeline=2 expert=2 context=2",
    ),
}  # fmt: skip
DEEPSEEK_LAYERS = "model.pattern=L-LELELE", "model.experts.balance_loss=0.1"
DROPLESS = "model.experts.capacity_factor=null", "model.experts.rank_capacity_factor=4"


QUICK = ("pipeline 2 x fsdp 2 x context 2",)


def run_of(family, layers, remat, axes, *more, devices=8):
    parallelism = [f"parallelism.{axis}" for axis in axes.split()]
    return tiny_run(
        f"model.layers={layers}", "batch.global_batch=16", f"execution.remat={remat}",
        "precision.accumulate=fp32", *parallelism, *more, devices=devices, family=family,
    )  # fmt: skip


@pytest.mark.parametrize(
    "case", tiered([], [(1, "fp32"), (3, "fp32"), (4, "bf16")], slow=[(3, "fp32")]), ids=str
)
def test_any_number_of_groups(case):
    """M = P, 3 P and 4 P; gradients summed in bf16 too."""
    groups, sums = case
    batch, dtype = f"batch.global_batch={2 * groups}", f"precision.accumulate={sums}"
    axes = "pipeline=2 virtual_stages=2 tensor=2"
    run = run_of(LLAMA, 4, "full", axes, "batch.microbatch=1", batch, dtype, devices=4)
    assert run.accumulation == 2 * groups
    one = same_sequences(run_of(LLAMA, 4, "full", "", batch, devices=1))
    if sums == "fp32":
        assert_same(same_sequences(run), one, roundings=200)
    else:
        loss, grads = same_sequences(run)
        assert loss == pytest.approx(one[0], rel=1e-6)
        for name, exact in one[1].items():
            # Eight additions, each rounded to 8 bits.
            bound = 8 * 2**-8 * np.abs(exact).max()
            np.testing.assert_allclose(grads[name], exact, atol=bound, rtol=0, err_msg=name)


@pytest.mark.nightly
def test_a_tied_head():
    tied, axes = "model.tied=true", "pipeline=2 context=2 tensor=2"
    run = run_of(GROK, 3, "full", axes, "batch.microbatch=2", tied)
    one = run_of(GROK, 3, "full", "", "batch.microbatch=4", tied, devices=1)
    assert_same(same_sequences(run), same_sequences(one), roundings=200)


@pytest.mark.parametrize("name", tiered(QUICK, CASES))
def test_a_pipeline_changes_neither_loss_nor_gradients(name):
    family, layers, remat, axes = CASES[name]
    more = DROPLESS if "dropless" in name else DEEPSEEK_LAYERS if family == DEEPSEEK else ()
    parts = 2 if family == GPT_OSS else 1
    in_parts = f"batch.microbatch={parts}", f"execution.expert_parts={parts}"
    run = run_of(family, layers, remat, axes, *in_parts, *more)
    assert run.mesh_text() == name.partition(",")[0]
    one = run_of(family, layers, remat, "", "batch.microbatch=4", *more, devices=1)
    # Gradients are sums over 512 tokens and some layers in another order, as in `test_train`.
    assert_same(same_sequences(run), same_sequences(one), roundings=200)


def routing_of(run):
    with mesh_of(run):
        result = jax.jit(gradients, static_argnums=3)(new_state(run), *sequences(run), run)
        return to_numpy(result.figures)


def test_blocks_before_the_stages_know_their_sequences(monkeypatch):
    """The number of the sequence seeds stochastic rounding."""

    def adds_number(x, weights, constants, ctx, *, bf16):
        return x + ctx.counters.sequence, ()

    monkeypatch.setattr(pipeline_ends, "apply_block", adds_number)
    run, tokens = tiny_run(), jnp.zeros((2, 1, 4), jnp.int32)
    embedding = jax.tree_util.Partial(lambda tokens, dtype: tokens[..., None].astype(dtype))
    with mesh_of(run):
        ends = pipeline_ends.Ends(
            cfg=run.model,
            dtype=jnp.float32,
            ctx=make_context(run.model, 4, run.execution, run.precision),
            policy=Policy(None),
            weights=pipeline_ends.EndWeights(embedding, [1.0], None, []),
            before_scaled=[None],
            behind_scaled=[],
            prediction_bf16=frozenset(),
            batch=Sequences(tokens, tokens, jnp.array([3, 5])),
        )
        assert [ends.enter(group)[0].max() for group in (0, 1)] == [3, 5]


@pytest.mark.nightly
def test_figures_of_the_routing_are_those_of_one_device():
    """Ranks that are no data parallelism: the passes are the same sequences."""
    one, many = (
        routing_of(run_of(GROK, 3, "full", axes, "batch.microbatch=1", devices=devices))
        for axes, devices in (("", 1), ("pipeline=2 virtual_stages=2 context=2 tensor=2", 8))
    )
    assert one.keys() == many.keys()
    for name, expected in one.items():
        np.testing.assert_allclose(many[name], expected, rtol=1e-6, err_msg=name)


def two_steps_in_fp8(axes, scaling, family, layers, more):
    """(loss, gradients, histories after each) of two passes over one batch with the same weights:
    the second is scaled by what the first has seen."""
    run = run_of(
        family, layers, "attention", axes, "batch.microbatch=1", "precision.dtype=fp8",
        "precision.amax_history=4", f"precision.scaling={scaling}", *more,
    )  # fmt: skip
    with mesh_of(run):
        batch, state = sequences(run), new_state(run)
        # Every rounding to bf16 where the program has it, or the two would round differently.
        exact = {"xla_allow_excess_precision": False}
        step = jax.jit(gradients, static_argnums=3).lower(state, *batch, run).compile(exact)
        first = step(state, *batch).histories
        second = step(replace(state, fp8=first), *batch)
        histories = to_numpy(first), to_numpy(second.histories)
        return float(second.loss), to_numpy(second.gradients), histories


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("scaling", "model"),
    [
        ("current", (NEMOTRON, 3, ())),
        ("delayed", (DEEPSEEK, 4, DEEPSEEK_LAYERS)),
        ("delayed", (DEEPSEEK, 4, (*DEEPSEEK_LAYERS, "precision.bf16_products=prediction"))),
    ],
)
def test_fp8_is_that_of_no_pipeline(scaling, model):
    """With equal tensor ranks, whose partial sums are rounded to bf16; one layer of padding."""
    loss, grads, histories = two_steps_in_fp8(
        "pipeline=2 virtual_stages=2 fsdp=2 tensor=2", scaling, *model
    )
    expected = two_steps_in_fp8("fsdp=2 tensor=2", scaling, *model)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert bool(histories[0]) == (scaling == "delayed")
    for actual, history in zip(histories, expected[2], strict=True):
        for name, exact in history.items():
            np.testing.assert_array_equal(actual[name], exact, err_msg=name)
    for name, exact in expected[1].items():
        # A microbatch's gradient of a weight, of one sequence here and of four there, is rounded to
        # bf16 before it is summed: 0.002 by norm. With jax 0.11 and delayed scaling a cotangent is
        # so near the middle of two numbers of e5m2, up to a fourth of it apart, that it is rounded
        # to the other one, and two tokens' gradients move by some percent: 0.012 by norm.
        difference = np.linalg.norm(grads[name] - exact) / np.linalg.norm(exact)
        assert difference <= 2**-6, name
