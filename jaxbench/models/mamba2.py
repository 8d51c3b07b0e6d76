"""The Mamba-2 mixer of Nemotron-H (Dao and Gu 2024; NVIDIA 2025, "Nemotron-H")."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbench import mesh
from jaxbench.models.context import Context
from jaxbench.models.layers import (
    Hidden,
    LayerOutput,
    Vector,
    Weight,
    normal,
)
from jaxbench.ops import dense, ssd
from jaxbench.ops.remat import save
from jaxbench.recipe.mixers import MambaConfig
from jaxbench.recipe.model import ModelConfig

TAPS = 4
"""Width of the causal convolution."""

DT_RANGE = (1e-3, 1e-1)
A_RANGE = (1.0, 16.0)
"""Initial time steps (log-uniform) and initial decay rates (uniform) per head, as in Megatron."""


class GroupParameters(nnx.Module):
    """Parameters of groups other than the projections: convolution, per-head scalars and norm gain,
    each `[groups, ..]` in fp32."""

    def __init__(self, groups: int, dims: ssd.Dims, *, key):
        k_taps, k_bias, k_dt, k_a = jax.random.split(key, 4)
        heads, channels = dims.heads, dims.channels
        per_group = mesh.spec("groups inner", mesh.VECTOR)

        def uniform(key, shape, low, high, names="groups inner"):
            sharding = mesh.spec(names, mesh.VECTOR)
            draw = jax.random.uniform(key, shape, out_sharding=sharding)
            return low + (high - low) * draw

        # Kaiming-uniform with a = sqrt(5), as torch draws a convolution of this fan-in.
        bound = TAPS**-0.5
        self.taps = nnx.Param(
            uniform(k_taps, (groups, TAPS, channels), -bound, bound, "groups taps inner")
        )
        self.bias = Vector(uniform(k_bias, (groups, channels), -bound, bound))
        dt = jnp.exp(uniform(k_dt, (groups, heads), *map(math.log, DT_RANGE)))
        self.dt_bias = Vector(dt + jnp.log(-jnp.expm1(-dt)))  # the inverse of softplus
        self.a_log = Vector(jnp.log(uniform(k_a, (groups, heads), *A_RANGE)))
        self.d = Vector(jnp.ones((groups, heads), out_sharding=per_group))
        self.gain = Vector(jnp.ones((groups, dims.inner), out_sharding=per_group))


class Mamba2(nnx.Module):
    """The input projection; in each group convolution and SiLU, selective scan, gate, RMSNorm; then
    the output projection.

    The input projections are one weight, ordered by group: gate z, scan input x, maps b and c into
    and out of the state, and one time step per head. A tensor rank therefore holds whole groups,
    and x, b and c, which are convolved, are adjacent.

    Between the projections groups are independent. A device computes its own groups by one of
    `ops.ssd.IMPLEMENTATIONS`, and saves only the output of the input projection for the backward
    pass.
    """

    def __init__(self, cfg: ModelConfig, mamba: MambaConfig, *, key):
        heads = mamba.heads // mamba.groups
        self.dims = ssd.Dims(heads, mamba.head_dim, mamba.state, cfg.norm_eps)
        k_in, k_groups, k_out = jax.random.split(key, 3)
        shape = (cfg.embed, mamba.groups, self.dims.columns)
        in_proj = normal(k_in, cfg, "embed groups inner", shape, fan_in=cfg.embed)
        self.in_proj = Weight(in_proj, quantized=True)
        self.groups = GroupParameters(mamba.groups, self.dims, key=k_groups)
        shape, fan_in = (cfg.embed, mamba.groups, mamba.inner), mamba.groups * mamba.inner
        out = normal(k_out, cfg, "embed groups inner", shape, fan_in=fan_in, residual=True)
        self.out = Weight(out, quantized=True)

    def __call__(self, x: Hidden, ctx: Context) -> LayerOutput:
        mixer = ssd.IMPLEMENTATIONS[ctx.kernels.ssd].mixer
        dims = "batch seq groups inner"
        projected = dense.dot("BSD,DGI->BSGI", x, self.in_proj, dims, "gather")

        def local(projected, groups):
            parameters = jax.tree.map(mesh.varying, ssd.Parameters.of(groups))
            y = mixer(self.dims, projected, parameters)
            return y.reshape(*y.shape[:2], -1)

        out_specs = mesh.spec("batch seq groups", mesh.ACTIVATION)
        y = jax.shard_map(local, out_specs=out_specs)(projected, self.groups)
        # Saved as tokens by features: with groups first, as it is computed, XLA would transpose
        # the whole stash between microbatches.
        y = save(y, "mamba").reshape(*y.shape[:2], *projected.shape[2:3], -1)
        return dense.dot("BSGI,DGI->BSD", y, self.out, "batch seq embed", "scatter"), ()
