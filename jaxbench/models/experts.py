"""The mixture of experts: feed-forward layers of which each token uses a few."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxbench import mesh
from jaxbench.experts import routing
from jaxbench.experts.dispatch import combine, dispatch
from jaxbench.models.layers import (
    GATES,
    ForwardContext,
    Hidden,
    LayerOutput,
    LoadBias,
    Weight,
    normal,
)
from jaxbench.models.mlp import make_mlp
from jaxbench.ops import dense, gating, grouped
from jaxbench.ops.duplicated import Duplicated, single
from jaxbench.ops.remat import SMALL, save
from jaxbench.recipe.model import ExpertsConfig, ModelConfig


class Experts(nnx.Module):
    """sum_e g_e(x) down_e(act(gate_e x) * up_e x), or down_e(relu(up_e x)^2), with the router's
    gates g, over the experts that it chooses (Shazeer et al. 2017), and a shared expert that has no
    gate (DeepSeek-AI 2024, "DeepSeekMoE"); without biases. With `latent` the chosen ones work on a
    projection of x, and their sum is projected back (NVIDIA 2025, "Nemotron 3").

    Tokens are routed from their sequence shard, each on one device, so that no work is repeated
    over tensor ranks. A permuted token is multiplied by its gate before the last product: the
    gate's gradient then needs no output of an expert, which would have to be recomputed.
    """

    def __init__(self, cfg: ModelConfig, mixer: ExpertsConfig, *, key):
        k_router, k_up, k_down, k_shared, k_into, k_out_of = jax.random.split(key, 6)
        self.cfg = mixer
        # Replicated, in fp32: a gather of so small a matrix would cost its latency.
        dims, outer = "router_embed router", (cfg.embed, mixer.count)
        self.router = nnx.Param(normal(k_router, cfg, dims, outer, fan_in=cfg.embed))
        zeros = jnp.zeros(mixer.count, out_sharding=mesh.spec("router", mesh.WEIGHT))
        self.bias = None if mixer.bias_rate is None else LoadBias(zeros)
        width = mixer.latent or cfg.embed
        dims, shape = "experts expert_embed expert_ffn", (mixer.count, width, mixer.ffn)
        if mixer.matrices == 3:
            parts, inner = "experts expert_embed part expert_ffn", (*shape[:2], 2, mixer.ffn)
            gate_up = normal(k_up, cfg, parts, inner, fan_in=width, truncated=True)
            self.gate_up = Weight(gate_up, fp8=True)
        else:
            self.up = Weight(normal(k_up, cfg, dims, shape, fan_in=width), fp8=True)
        down = normal(k_down, cfg, dims, shape, fan_in=mixer.ffn, truncated=True, residual=True)
        self.down = Weight(down, fp8=True)
        self.shared = make_mlp(cfg, mixer.shared, key=k_shared) if mixer.shared else None
        if mixer.latent:
            dims, outer = "embed latent", (cfg.embed, mixer.latent)
            into = normal(k_into, cfg, dims, outer, fan_in=cfg.embed)
            out_of = normal(k_out_of, cfg, dims, outer, fan_in=mixer.latent)
            self.into_latent, self.out_of_latent = Weight(into, fp8=True), Weight(out_of, fp8=True)

    def __call__(self, x: Hidden, ctx: ForwardContext) -> LayerOutput:
        """The sum over chosen experts and the shared one, `"batch shard_seq embed"` in and out; and
        each sequence's load-balance loss, assignments of each expert, and dropped assignments."""
        logits = jnp.einsum(
            "BSD,DE->BSE",
            x.astype(jnp.float32),
            self.router[...],
            precision=jax.lax.Precision.HIGHEST,
            out_sharding=mesh.spec("batch shard_seq assignment", mesh.ACTIVATION),
        )
        if self.cfg.routing == "random":
            logits = routing.random_logits(logits, self.router[...])
        logits = save(logits, SMALL)
        bias = None if self.bias is None else self.bias[...]
        gates, experts = routing.choose(logits, self.cfg, bias)
        sent = x
        if self.cfg.latent:
            sent = dense.dot("BSD,DL->BSL", x, self.into_latent, "batch shard_seq latent")
        tokens, weights, routes = dispatch(sent, gates, experts, self.cfg)
        dropped = mesh.sum_seq(routes.slot == grouped.NONE, axis=(1, 2))
        figures = (*routing.balance_loss(logits, experts, self.cfg), dropped)
        if routes.groups is None:
            outputs = self._products(tokens, weights)
        else:
            outputs = self._grouped_products(tokens, weights, routes.groups, ctx.grouped_matmul)
        y = combine(outputs, routes)
        if self.cfg.latent:
            y = dense.dot("BSL,DL->BSD", y, self.out_of_latent, "batch shard_seq embed")
            y = mesh.pinned(y)
        return (y if self.shared is None else y + self.shared(x, ctx)[0]), (figures,)

    def _products(self, tokens: Array, weights: Array) -> Array:
        x = Duplicated.of(tokens)
        if self.cfg.matrices == 3:
            dims = "experts capacity part expert_ffn"
            up = dense.dot_duplicated("ERD,EDPF->ERPF", x, self.gate_up, dims)
        else:
            up = dense.dot_duplicated("ERD,EDF->ERF", x, self.up, "experts capacity expert_ffn")
        hidden, dims = self._hidden(up, weights), "experts capacity embed"
        return single(dense.dot_duplicated("ERF,EDF->ERD", hidden, self.down, dims))

    def _grouped_products(
        self, tokens: Array, weights: Array, groups: grouped.Groups, implementation: str
    ) -> Array:
        up = self.gate_up if self.cfg.matrices == 3 else self.up
        hidden = self._hidden(
            grouped.to_permuted(implementation, Duplicated.of(tokens), up, groups), weights
        )
        return single(grouped.from_permuted(implementation, hidden, self.down, groups))

    def _hidden(self, up: Duplicated, weights: Array) -> Duplicated:
        """Between the products: activations times gates."""
        if self.cfg.matrices == 3:
            return gating.gated(GATES[self.cfg.activation], up, weights)
        return Duplicated.of(gating.squared_relu(single(up), weights))
