"""Loss and gradients of the programs that XLA makes for GPUs, next to those of the CPU's own."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from cases import tiered
from compiled import needs_compiler
from gpu_on_cpu import execute
from steps import new_state
from tiny import mesh_of, tiny_run, to_numpy

from jaxbench import mesh
from jaxbench.base.hardware import H100
from jaxbench.plan.absent import compile_only_devices
from jaxbench.train.program import compile_program
from jaxbench.train.step import make_program

BF16 = ("precision.dtype=bf16",)
FP8 = ("precision.dtype=fp8", "precision.implementation=xla")
CASES = {
    "llama31_8b bf16": BF16,
    "llama31_8b fp8": FP8,
    "nemotron4_340b bf16": BF16,
    "grok1_314b fp8": FP8,
}
"""Settings of a tiny row of a family: layers in loops, remat, cuDNN attention, buffers that are
written in parts; products in FP8; epilogues of products; experts with a capacity."""

ROUNDING = {"bf16": 2**-9, "fp8": 2**-4}
"""Largest relative error of rounding to bf16, and to float8_e4m3fn."""


def first_step(run):
    """Loss, norm of all gradients, and AdamW's first moments, which are a tenth of them."""
    with mesh_of(run):
        return figures(*make_program(run)(new_state(run)))


def first_step_of_gpu(run):
    """The same, by the program that is compiled for an H100."""
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape, compile_only_devices(H100, 1))):
        compiled = compile_program(run).program
    with mesh_of(run):
        state = new_state(run)
        results = execute(compiled, jax.tree.leaves(state))
        structure = jax.tree.structure(jax.eval_shape(make_program(run), state))
        return figures(*jax.tree.unflatten(structure, results))


def figures(state, values):
    moments = to_numpy(state.optimizer)
    grads = {name: moment for name, moment in moments.items() if ".mu." in name}
    return float(values["loss"]), float(values["grad_norm"]), grads


@needs_compiler
@pytest.mark.parametrize("case", tiered([], CASES, slow=["llama31_8b fp8"]))
def test_a_step_is_that_of_the_cpu(case):
    """Two programs that round independently differ by sqrt(2) times what rounding changes in one,
    which is its difference from fp32. A loss is the mean of 256 tokens', whose errors are
    independent: its own is a sixteenth."""
    family, dtype = case.split()
    # With weights of 0.2, the tests' default, rounding changes gradients by half in FP8.
    run = tiny_run(*CASES[case], "model.init_std=0.05", family=f"{family}_bf16")
    loss, norm, grads = first_step_of_gpu(run)
    own_loss, own_norm, own_grads = first_step(run)
    exact = first_step(replace(run, precision=replace(run.precision, dtype="fp32")))[2]
    assert loss == pytest.approx(own_loss, rel=ROUNDING[dtype] / 16)
    assert norm == pytest.approx(own_norm, rel=ROUNDING[dtype])
    for name, own in own_grads.items():
        rounding = np.linalg.norm(own - exact[name])
        assert rounding > 0
        assert np.linalg.norm(grads[name] - own) < 1.5 * rounding, name
