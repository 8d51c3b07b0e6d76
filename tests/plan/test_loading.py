"""What a device holds before its first step: the state, made or restored, and nothing beside it."""

from functools import partial

import jax
import pytest
from compiled import needs_compiler

from jaxbench import mesh
from jaxbench.hardware import H100
from jaxbench.plan.absent import compile_only_devices
from jaxbench.recipe import recipes
from jaxbench.train.step import init_state

SMALL = ("model.layers=2", "model.vocabulary=4096", "batch.global_batch=32")
HYBRID = ("model.layers=4", "model.pattern=M-*-", "model.vocabulary=4096")


@needs_compiler
@pytest.mark.parametrize(
    ("name", "gpus", "overrides"),
    [("llama31_8b_bf16", 16, SMALL), ("nemotronh_56b_fp8", 32, HYBRID)],
)
def test_making_the_state_takes_no_more_than_the_state(name, gpus, overrides):
    """So a row whose step fits can begin: the state is the step's arguments."""
    parsed = recipes.parse_overrides(list(overrides))
    run = recipes.resolve(recipes.load(name), gpus, overrides=parsed)
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape, compile_only_devices(H100, gpus))):
        made = jax.jit(partial(init_state, run)).lower().compile()
    held = made.memory_analysis()
    assert held.output_size_in_bytes > 2**28
    # Scalars and alignment: 0.00 GiB at the rows' own sizes.
    assert held.peak_memory_in_bytes - held.output_size_in_bytes < 2**20
