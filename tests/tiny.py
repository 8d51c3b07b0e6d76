"""Models small enough for a unit test, with every mesh axis divisible by 2 and 4."""

from contextlib import contextmanager

import jax
import numpy as np

from jaxbench import mesh
from jaxbench.recipe import recipes

DIMS = (
    "model.embed=64", "model.attention={heads: 8, kv_heads: 4, head_dim: 8}",
    "model.vocabulary=64", "model.init_std=0.2", "batch.sequence_length=32",
    "batch.global_batch=8", "precision.dtype=fp32", "precision.accumulate=fp32",
)  # fmt: skip
FAMILIES = {
    "llama31_8b_bf16": (
        "model.layers=3", "model.mlp.ffn=96", "execution.remat=query,attention,residual:1",
    ),
    "grok1_314b_bf16": (
        "model.layers=2", "model.experts.ffn=48", "model.experts.capacity_tokens=8",
        "execution.remat=attention,residual:1",
    ),
    "nemotron4_340b_bf16": ("model.layers=3", "model.mlp.ffn=96", "execution.remat=attention,up:2"),
    "gpt3_5b_bf16": (
        "model.layers=3", "model.attention.kv_heads=8", "model.mlp.ffn=96",
        "execution.remat=attention,up:2",
    ),
    "nemotronh_56b_bf16": (
        "model.layers=10", "model.mlp.ffn=96", "model.pattern=M*-M*-M-M-",
        "execution.remat=residual,up:6,mamba:8",
        "model.mamba={heads: 8, head_dim: 8, state: 8, groups: 4}",
    ),
    "qwen3_30b_a3b_bf16": (
        "model.layers=2", "model.experts={count: 8, top_k: 2, ffn: 48, rank_capacity_factor: 8}",
        "model.experts.balance=sequence", "execution.remat=attention,residual:1",
    ),
    "gpt_oss_120b_bf16": (
        "model.layers=4", "model.attention={window: 8}",
        "model.experts={count: 8, top_k: 2, ffn: 48, rank_capacity_factor: 8}",
        "execution.remat=attention,residual:2",
    ),
    "nemotron3_nano_30b_a3b_bf16": (
        "model.layers=4", "model.pattern=ME*E",
        "model.experts={count: 8, top_k: 2, ffn: 48, shared_ffn: 96, rank_capacity_factor: 8}",
        "model.mamba={heads: 8, head_dim: 8, state: 8, groups: 4}",
        "execution.remat=attention,residual,mamba",
    ),
    "nemotron3_super_120b_a12b_bf16": (
        "model.layers=4", "model.pattern=ME*E",
        "model.experts={count: 8, top_k: 2, ffn: 48, latent: 32, shared_ffn: 96}",
        "model.experts.rank_capacity_factor=8", "precision.scaling=current",
        "model.mamba={heads: 8, head_dim: 8, state: 8, groups: 4}",
        "execution.remat=attention,residual,mamba",
    ),
    "deepseek_v3_bf16": (
        "model.layers=3", "model.pattern=L-LELE", "model.mlp.ffn=96", "model.attention=null",
        "model.latent_attention={heads: 8, query_latent: 32, kv_latent: 16}",
        "model.latent_attention={head_dim: 8, rope_dim: 8, value_dim: 8}",
        "model.experts={count: 8, top_k: 4, groups: 4, top_groups: 2, ffn: 48, shared_ffn: 96}",
        "model.experts={rank_capacity_factor: 8}", "execution.remat=latent,attention,residual",
    ),
}  # fmt: skip
"""Recipes whose smoke row is shrunk, and how. Qwen3's balance loss is of each sequence, whatever a
microbatch is. Nemotron-H's pattern is two blocks, each repeated
twice."""


def tiny_run(*overrides: str, devices: int = 1, steps: int = 50, family: str = "llama31_8b_bf16"):
    """The tiny run of a family with `section.key=value` overrides."""
    recipe = recipes.load(recipes.config_folder() / f"{family}.yaml")
    parsed = recipes.parse_overrides([*DIMS, *FAMILIES[family], *overrides])
    return recipes.resolve(recipe, "smoke", devices=devices, overrides=parsed, steps=steps)


@contextmanager
def mesh_of(run):
    """The run's mesh over the first devices, set as the current one."""
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape, jax.devices()[: run.gpus])):
        yield


def to_numpy(tree):
    """Leaves by their path, as full float64 arrays."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(p): np.asarray(x).astype(np.float64) for p, x in leaves}
