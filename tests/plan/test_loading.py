"""What a device holds before its first step: the state, made or restored, and nothing else."""

from functools import partial

import jax
from compiled import needs_compiler

from jaxbench import mesh
from jaxbench.base.hardware import H100
from jaxbench.plan.absent import compile_only_devices
from jaxbench.recipe import recipes
from jaxbench.train.step import init_state

SMALL = ("model.layers=2", "model.vocabulary=4096", "batch.global_batch=32")


@needs_compiler
def test_making_the_state_takes_no_more_than_the_state():
    """So a row whose step fits can begin: the state is the step's arguments."""
    overrides = recipes.parse_overrides(list(SMALL))
    run = recipes.resolve(recipes.load("llama31_8b_bf16"), 16, overrides=overrides)
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape, compile_only_devices(H100, run.gpus))):
        made = jax.jit(partial(init_state, run)).lower().compile()
    held = made.memory_analysis()
    assert held.output_size_in_bytes > 2**28
    # Scalars and alignment.
    assert held.peak_memory_in_bytes - held.output_size_in_bytes < 2**20
