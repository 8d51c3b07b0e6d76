"""Loss and gradients of tiny runs, and comparisons of two of them."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny import mesh_of, to_numpy

from jaxbench import mesh
from jaxbench.models.context import make_context
from jaxbench.models.decoder import segments
from jaxbench.ops.layer_stack import LayerLoop
from jaxbench.train.step import gradients, init_state, synthetic_batch, train_step

MESHES = {
    "data 8": (),
    "fsdp 8": ("parallelism.fsdp=8",),
    "tensor 4 x data 2": ("parallelism.tensor=4",),
    "context 4 x data 2": ("parallelism.context=4",),
    "data 2 x fsdp 2 x tensor 2": ("parallelism.fsdp=2", "parallelism.tensor=2"),
    "fsdp 4 x tensor 2": ("parallelism.fsdp=4", "parallelism.tensor=2"),
    "fsdp 4 x context 2": ("parallelism.fsdp=4", "parallelism.context=2"),
    # Two ranks of `context` share a key head.
    "context 4 x tensor 2": ("parallelism.context=4", "parallelism.tensor=2"),
    "fsdp 2 x context 2 x tensor 2": (
        "parallelism.fsdp=2", "parallelism.context=2", "parallelism.tensor=2",
    ),
}  # fmt: skip


def new_state(run):
    """The initial state on the current mesh."""
    return jax.jit(lambda: init_state(run))()


def loss_and_gradients(run):
    """Loss and gradients of the first step."""
    with mesh_of(run):
        state = new_state(run)
        shape = (run.accumulation, run.microbatch * run.batch_ranks, run.batch.sequence_length)
        batch = synthetic_batch(run.seed, state.step, shape, run.model.vocabulary)
        result = jax.jit(gradients, static_argnums=3)(state, *batch, run)
        return float(result.loss), to_numpy(result.gradients)


def last_hidden(model, tokens, execution, precision):
    """The output of a model's last layer."""
    x = model.embedding(tokens, model.dtype)
    ctx = make_context(model.cfg, tokens.shape[1], execution, precision)
    for segment in segments(model.cfg, execution, precision):
        x, _ = model.run_segment(segment, x, ctx, (), LayerLoop())
    return x


def sequences(run, seed=0):
    """Tokens and targets that do not depend on how the batch is cut, on the current mesh."""
    rng = np.random.default_rng(seed)
    size = 2, run.batch.global_batch, run.batch.sequence_length
    cut = run.accumulation, -1, run.batch.sequence_length
    spec = mesh.spec("microbatch batch seq", mesh.ACTIVATION)
    draws = rng.integers(0, run.model.vocabulary, size=size, dtype=np.int32)
    return [jax.device_put(x.reshape(cut), spec) for x in draws]


def same_sequences(run, **compiler_options):
    """Loss and gradients of `sequences`; in FP8 with scales from an earlier pass over them."""
    with mesh_of(run):
        batch, state = sequences(run), new_state(run)
        step = jax.jit(gradients, static_argnums=3, compiler_options=compiler_options)
        if state.fp8:
            state = replace(state, fp8=step(state, *batch, run).histories)
        result = step(state, *batch, run)
        return float(result.loss), to_numpy(result.gradients)


def steps_of(run, count):
    """(losses, last state) of some steps from the initial state, on other `sequences` in each."""
    losses = []
    with mesh_of(run):
        state, step = new_state(run), jax.jit(train_step, static_argnums=3)
        for index in range(count):
            state, figures = step(state, *sequences(run, seed=index), run)
            losses.append(float(figures["loss"]))
    return losses, state


def projection(actual, expected):
    """The component of all gradients along the expected ones, over the latter's length: 1 for equal
    ones, and for those with noise orthogonal to them."""
    products, squares = (
        sum(np.vdot(gradients[name], g) for name, g in expected.items())
        for gradients in (actual, expected)
    )
    return products / squares


def assert_same(actual, expected, roundings):
    """Equal up to some fp32 roundings of the largest entry of each gradient."""
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    assert actual[1].keys() == expected[1].keys()
    for name, exact in expected[1].items():
        tolerance = roundings * np.finfo(np.float32).eps * np.abs(exact).max()
        np.testing.assert_allclose(actual[1][name], exact, atol=tolerance, rtol=0, err_msg=name)
