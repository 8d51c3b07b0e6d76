"""Loss and gradients of tiny runs, and how far two of them may differ."""

import jax
import numpy as np
import pytest
from tiny import mesh_of, to_numpy

from jaxbench import mesh
from jaxbench.train import data
from jaxbench.train.step import gradients, init_state

MESHES = {
    "data 8": (),
    "fsdp 8": ("parallelism.fsdp=8",),
    "tensor 4 x data 2": ("parallelism.tensor=4",),
    "context 4 x data 2": ("parallelism.context=4",),
    "data 2 x fsdp 2 x tensor 2": ("parallelism.fsdp=2", "parallelism.tensor=2"),
    "fsdp 4 x tensor 2": ("parallelism.fsdp=4", "parallelism.tensor=2"),
    "fsdp 4 x context 2": ("parallelism.fsdp=4", "parallelism.context=2"),
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
        batch = data.synthetic(run.seed, state.step, shape, run.model.vocabulary)
        (loss, _), grads, _ = jax.jit(gradients, static_argnums=3)(state, *batch, run)
        return float(loss), to_numpy(grads)


def same_sequences(run):
    """Loss and gradients on sequences that do not depend on how the batch is cut."""
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 64, size=(2, run.batch.global_batch, 32), dtype=np.int32)
    with mesh_of(run):
        spec = mesh.spec("microbatch batch seq", mesh.ACTIVATION)
        shape = (run.accumulation, -1, 32)
        batch = [jax.device_put(x.reshape(shape), spec) for x in (tokens, targets)]
        (loss, _), grads, _ = jax.jit(gradients, static_argnums=3)(new_state(run), *batch, run)
        return float(loss), to_numpy(grads)


def assert_same(actual, expected, roundings):
    """Equal up to some fp32 roundings of the largest entry of each gradient."""
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    assert actual[1].keys() == expected[1].keys()
    for name, exact in expected[1].items():
        tolerance = roundings * np.finfo(np.float32).eps * np.abs(exact).max()
        np.testing.assert_allclose(actual[1][name], exact, atol=tolerance, rtol=0, err_msg=name)
