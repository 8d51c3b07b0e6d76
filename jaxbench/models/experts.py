"""The mixture of experts: gated feed-forward layers of which each token uses a few."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxbench import mesh
from jaxbench.experts import routing
from jaxbench.experts.dispatch import combine, dispatch
from jaxbench.models.layers import GATES, ForwardContext, Hidden, LayerOutput, Weight, normal
from jaxbench.ops import dense, gating, grouped
from jaxbench.ops.duplicated import Duplicated, single
from jaxbench.ops.remat import SMALL, save
from jaxbench.recipe.model import ExpertsConfig, ModelConfig


class Experts(nnx.Module):
    """sum_e g_e(x) down_e(act(gate_e x) * up_e x) with the router's gates g, over the experts that
    it chooses (Shazeer et al. 2017), without biases.

    Tokens are routed from their sequence shard, each on one device, so that no work is repeated
    over tensor ranks. A permuted token is multiplied by its gate before the last product: the
    gate's gradient then needs no output of an expert, which would have to be recomputed.
    """

    def __init__(self, cfg: ModelConfig, mixer: ExpertsConfig, *, key):
        k_router, k_gate_up, k_down = jax.random.split(key, 3)
        self.cfg = mixer
        shape, experts = (cfg.embed, mixer.count), (mixer.count, cfg.embed)
        # Replicated, in fp32: a gather of so small a matrix would cost its latency.
        self.router = nnx.Param(
            normal(k_router, cfg, "router_embed router", shape, fan_in=cfg.embed)
        )
        dims, inner = "experts expert_embed part expert_ffn", (*experts, 2, mixer.ffn)
        gate_up = normal(k_gate_up, cfg, dims, inner, fan_in=cfg.embed, truncated=True)
        self.gate_up = Weight(gate_up, fp8=True)
        dims, outer = "experts expert_embed expert_ffn", (*experts, mixer.ffn)
        down = normal(k_down, cfg, dims, outer, fan_in=mixer.ffn, truncated=True, residual=True)
        self.down = Weight(down, fp8=True)

    def __call__(self, x: Hidden, ctx: ForwardContext) -> LayerOutput:
        """The sum over chosen experts, `"batch shard_seq embed"` in and out; and each sequence's
        load-balance loss, assignments of each expert, and dropped assignments."""
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
        gates, experts = routing.choose(logits, self.cfg)
        tokens, weights, routes = dispatch(x, gates, experts, self.cfg)
        dropped = mesh.sum_seq(routes.slot == grouped.NONE, axis=(1, 2))
        figures = (*routing.balance_loss(logits, experts), dropped)
        if routes.groups is None:
            outputs = self._products(tokens, weights)
        else:
            outputs = self._grouped_products(tokens, weights, routes.groups, ctx.grouped_matmul)
        return combine(outputs, routes), (figures,)

    def _products(self, x: Array, weights: Array) -> Array:
        activation = GATES[self.cfg.activation]
        dims = "experts capacity part expert_ffn"
        gate_up = dense.dot_duplicated("ERD,EDPF->ERPF", Duplicated.of(x), self.gate_up, dims)
        hidden = gating.gated(activation, gate_up, weights)
        return single(
            dense.dot_duplicated("ERF,EDF->ERD", hidden, self.down, "experts capacity embed")
        )

    def _grouped_products(
        self, tokens: Array, weights: Array, groups: grouped.Groups, implementation: str
    ) -> Array:
        x = Duplicated.of(tokens)
        gate_up = grouped.to_permuted(implementation, x, self.gate_up, groups)
        hidden = gating.gated(GATES[self.cfg.activation], gate_up, weights)
        return single(grouped.from_permuted(implementation, hidden, self.down, groups))
