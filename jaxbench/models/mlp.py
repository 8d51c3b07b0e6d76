"""The feed-forward mixers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxbench.models.context import Context
from jaxbench.models.layers import Hidden, LayerOutput, Weight, normal, zero_bias
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
        dims = "batch seq part ffn"
        gate_up = dense.dot("BSD,DPF->BSPF", x, self.gate_up, dims, "gather")
        hidden = gating.gated(
            self.activation, gate_up, None, quantized.is_block_scaled(self.gate_up)
        )
        return dense.dot("BSF,DF->BSD", hidden, self.down, "batch seq embed", "scatter"), ()


UNGATED: dict[str, Callable[[Array], Array]] = {
    # In the compute dtype, unlike `gating.squared_relu`: a square is rounded once either way.
    "relu2": lambda up: jnp.square(jax.nn.relu(up)),
    "gelu_ungated": lambda up: jax.nn.gelu(up.astype(jnp.float32)).astype(up.dtype),
}
"""Activations without a gate, by their names in recipes: the squared ReLU (So et al. 2021), and the
tanh form of the GELU (Hendrycks and Gimpel 2016)."""


class UngatedMlp(nnx.Module):
    """Feed-forward layer down(act(up x)), without a gate. Biases of both matmuls are optional."""

    def __init__(self, cfg: ModelConfig, mixer: MlpConfig, *, key):
        k_up, k_down = jax.random.split(key)
        dims, shape = "embed ffn", (cfg.embed, mixer.ffn)
        self.up = Weight(normal(k_up, cfg, dims, shape, fan_in=cfg.embed), quantized=True)
        down = normal(k_down, cfg, dims, shape, fan_in=mixer.ffn, residual=True)
        self.down = Weight(down, quantized=True)
        self.activation = UNGATED[mixer.activation]
        self.up_bias = zero_bias("ffn", (mixer.ffn,)) if mixer.biases else None
        self.down_bias = zero_bias("embed", (cfg.embed,)) if mixer.biases else None

    def __call__(self, x: Hidden, ctx: Context) -> LayerOutput:
        up = dense.dot("BSD,DF->BSF", x, self.up, "batch seq ffn", "gather")
        if self.up_bias is not None:
            up = dense.biased(up, self.up_bias[...])
        hidden = self.activation(save(up, "up"))
        y = dense.dot("BSF,DF->BSD", hidden, self.down, "batch seq embed", "scatter")
        if self.down_bias is not None:  # added once, after the sum over tensor ranks
            y = dense.biased(y, self.down_bias[...])
        return y, ()


def make_mlp(cfg: ModelConfig, mixer: MlpConfig, *, key) -> nnx.Module:
    """The feed-forward layer that has the mixer's activation."""
    return (GatedMlp if mixer.gated else UngatedMlp)(cfg, mixer, key=key)
