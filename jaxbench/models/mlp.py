"""The feed-forward mixers."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbench import mesh
from jaxbench.models.context import Context
from jaxbench.models.layers import Hidden, LayerOutput, Weight, normal
from jaxbench.ops import dense, gating, quantized
from jaxbench.ops.remat import save
from jaxbench.recipe.mixers import MlpConfig
from jaxbench.recipe.model import ModelConfig


class GatedMlp(nnx.Module):
    """Gated feed-forward layer, down(act(gate x) * up x), without biases (Shazeer 2020).

    One matmul computes both input projections.
    """

    def __init__(self, cfg: ModelConfig, mixer: MlpConfig, *, key):
        k_gate_up, k_down = jax.random.split(key)
        self.activation = gating.GATES[mixer.activation]
        dims, inner = "embed part ffn", (cfg.embed, 2, mixer.ffn)
        gate_up = normal(k_gate_up, cfg, dims, inner, fan_in=cfg.embed, truncated=True)
        self.gate_up = Weight(gate_up, quantized=True)
        dims, outer = "embed ffn", (cfg.embed, mixer.ffn)
        down = normal(k_down, cfg, dims, outer, fan_in=mixer.ffn, truncated=True, residual=True)
        self.down = Weight(down, quantized=True)

    def __call__(self, x: Hidden, ctx: Context) -> LayerOutput:
        x = mesh.gather_seq(x)
        dims = "batch seq part ffn"
        gate_up = dense.dot("BSD,DPF->BSPF", x, self.gate_up, dims)
        hidden = gating.gated(self.activation, gate_up, None, quantized.in_blocks(self.gate_up))
        y = dense.dot("BSF,DF->BSD", hidden, self.down, "batch seq embed")
        return mesh.scatter_seq(y), ()


class SquaredReluMlp(nnx.Module):
    """Feed-forward layer down(relu(up x)^2), without gate and biases (So et al. 2021)."""

    def __init__(self, cfg: ModelConfig, mixer: MlpConfig, *, key):
        k_up, k_down = jax.random.split(key)
        dims, shape = "embed ffn", (cfg.embed, mixer.ffn)
        self.up = Weight(normal(k_up, cfg, dims, shape, fan_in=cfg.embed), quantized=True)
        down = normal(k_down, cfg, dims, shape, fan_in=mixer.ffn, residual=True)
        self.down = Weight(down, quantized=True)

    def __call__(self, x: Hidden, ctx: Context) -> LayerOutput:
        x = mesh.gather_seq(x)
        up = save(dense.dot("BSD,DF->BSF", x, self.up, "batch seq ffn"), "up")
        # In the compute dtype, unlike `gating.squared_relu`: a square is rounded once either way.
        y = dense.dot("BSF,DF->BSD", jnp.square(jax.nn.relu(up)), self.down, "batch seq embed")
        return mesh.scatter_seq(y), ()


def make_mlp(cfg: ModelConfig, mixer: MlpConfig, *, key) -> nnx.Module:
    """The feed-forward layer that has the mixer's activation."""
    return (GatedMlp if mixer.activation in gating.GATES else SquaredReluMlp)(cfg, mixer, key=key)
