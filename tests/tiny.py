"""A Llama small enough for a unit test, with every mesh axis divisible by 2 and 4."""

from contextlib import contextmanager

import jax
import numpy as np

from jaxbench import mesh, recipes

SMOKE = recipes.load(recipes.config_folder() / "llama31_8b_bf16.yaml")
DIMS = (
    "model.layers=3", "model.embed=64", "model.ffn=96", "model.heads=8", "model.kv_heads=4",
    "model.head_dim=8", "model.vocabulary=64", "model.init_std=0.2", "batch.sequence_length=32",
    "batch.global_batch=8", "precision.dtype=fp32", "execution.remat=query,attention,residual:1",
)  # fmt: skip


def tiny_run(*overrides: str, devices: int = 1, steps: int = 50):
    """The tiny run with `section.key=value` overrides."""
    parsed = recipes.parse_overrides([*DIMS, *overrides])
    return recipes.resolve(SMOKE, "smoke", devices=devices, overrides=parsed, steps=steps)


@contextmanager
def mesh_of(run):
    """The run's mesh over the first devices, set as the current one."""
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape, jax.devices()[: run.gpus])):
        yield


def to_numpy(tree):
    """Leaves by their path, as full float64 arrays."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(p): np.asarray(x).astype(np.float64) for p, x in leaves}
