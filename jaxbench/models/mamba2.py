"""The Mamba-2 mixer of Nemotron-H (Dao and Gu 2024; NVIDIA 2025, "Nemotron-H")."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxbench import mesh
from jaxbench.models.layers import NORM_EPS, Pass, Routed, Vector, Weight, normal
from jaxbench.ops import dense, ssd
from jaxbench.ops.remat import save
from jaxbench.recipe.model import Mamba, ModelConfig

TAPS = 4
"""Width of the causal convolution."""

DT_RANGE = (1e-3, 1e-1)
A_RANGE = (1.0, 16.0)
"""Initial time steps, log-uniform, and initial decay rates, uniform, per head (Megatron's)."""


class GroupParameters(nnx.Module):
    """What a group has besides its projections: convolution, per-head scalars and norm gain, each
    with the group as first dimension, in fp32."""

    def __init__(self, mamba: Mamba, *, key):
        k_taps, k_bias, k_dt, k_a = jax.random.split(key, 4)
        groups, heads = mamba.groups, mamba.heads // mamba.groups
        channels = mamba.inner + 2 * mamba.state
        per_group = mesh.spec("groups inner", mesh.VECTOR)

        def uniform(key, shape, low, high, dims="groups inner"):
            sharding = mesh.spec(dims, mesh.VECTOR)
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
        self.gain = Vector(jnp.ones((groups, mamba.inner), out_sharding=per_group))


class Mamba2(nnx.Module):
    """in_proj, then in each group: convolution and SiLU, selective scan, gate, RMSNorm; out_proj.

    One fused input projection. Its columns are ordered by group: gate z, scan input x, maps b and c
    into and out of the state, one time step for each head. So a tensor rank holds whole groups, a
    product makes all of them, and the three that are convolved lie side by side.

    Between the projections groups are independent. A device takes its own one after another and
    keeps only the output of the input projection for the backward pass: the square matrices and
    states of the scan exist for one group at a time, with still enough of them (chunks x heads) to
    fill a GPU.
    """

    def __init__(self, cfg: ModelConfig, *, key):
        assert cfg.mamba is not None
        self.mamba = mamba = cfg.mamba
        k_in, k_groups, k_out = jax.random.split(key, 3)
        columns = 2 * mamba.inner + 2 * mamba.state + mamba.heads // mamba.groups
        shape = (cfg.embed, mamba.groups, columns)
        in_proj = normal(k_in, cfg, "embed groups inner", shape, fan_in=cfg.embed)
        self.in_proj = Weight(in_proj, fp8=True)
        self.groups = GroupParameters(mamba, key=k_groups)
        shape, fan_in = (cfg.embed, mamba.groups, mamba.inner), mamba.groups * mamba.inner
        out = normal(k_out, cfg, "embed groups inner", shape, fan_in=fan_in, residual=True)
        self.out = Weight(out, fp8=True)

    def __call__(
        self, x: Float[Array, "B S D"], shared: Pass
    ) -> tuple[Float[Array, "B S D"], Routed]:
        x = mesh.gather_seq(x)
        projected = dense.dot("BSD,DGI->BSGI", x, self.in_proj, "batch seq groups inner")

        def local(projected, groups):
            one = jax.checkpoint(lambda inputs: self.group(*inputs), prevent_cse=False)
            groups = jax.tree.map(mesh.own_copy, groups)
            y = jax.lax.map(one, (jnp.moveaxis(projected, 2, 0), groups))
            return jnp.moveaxis(y, 0, 2)

        out_specs = mesh.spec("batch seq groups inner", mesh.ACTIVATION)
        y = jax.shard_map(local, out_specs=out_specs)(projected, self.groups)
        y = dense.dot("BSGI,DGI->BSD", save(y, "mamba"), self.out, "batch seq embed")
        return mesh.scatter_seq(y), ()

    def group(
        self, projected: Float[Array, "B S I"], group: GroupParameters
    ) -> Float[Array, "B S F"]:
        """One group's features, from its columns of the input projection to those of the output
        projection. Gate before norm; all but the products of the scan in fp32."""
        inner, state = self.mamba.inner, self.mamba.state
        context = mesh.axes("seq")
        z, convolved, dt = jnp.split(projected, [inner, 2 * inner + 2 * state], axis=-1)
        convolved = ssd.causal_conv(convolved, group.taps[...], group.bias[...], context)
        convolved = jax.nn.silu(convolved).astype(projected.dtype)
        x, b, c = jnp.split(convolved, [inner, inner + state], axis=-1)
        x = x.reshape(*x.shape[:2], -1, self.mamba.head_dim)
        dt = jax.nn.softplus(dt.astype(jnp.float32) + group.dt_bias[...])
        with jax.named_scope("ssd.scan"):  # for profiles
            y = ssd.scan(x, dt, -jnp.exp(group.a_log[...]), b, c, context)
        y += group.d[...][:, None] * x
        y = y.reshape(z.shape) * jax.nn.silu(z.astype(jnp.float32))
        y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + NORM_EPS)
        return (y * group.gain[...]).astype(projected.dtype)
