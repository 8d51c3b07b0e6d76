"""The mixture of experts: gated feed-forward layers of which each token uses a few."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxbench import mesh
from jaxbench.experts import grouped_matmul, routing
from jaxbench.models.layers import GATES, ForwardContext, Hidden, LayerOutput, Weight, normal
from jaxbench.ops import dense, gating
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
        logits = save(logits, SMALL)
        gates, experts = routing.choose(logits, self.cfg)
        permuted, weights, routes = routing.dispatch(x, gates, experts, self.cfg)
        dropped = mesh.sum_seq(routes.slot == routing.NONE, axis=(1, 2))
        figures = (*routing.balance_loss(logits, experts), dropped)
        return routing.combine(self._products(permuted, weights, routes), routes), (figures,)

    def _products(self, x: Array, weights: Array, routes: routing.Routes) -> Array:
        activation = GATES[self.cfg.activation]
        if routes.expert is not None:
            matrices = self.gate_up[...], self.down[...]
            return grouped_matmul.mlp(x, weights, routes.expert, *matrices, activation)
        dims = "experts capacity part expert_ffn"
        gate_up = dense.dot_duplicated("ERD,EDPF->ERPF", Duplicated.of(x), self.gate_up, dims)
        hidden = gating.gated(activation, gate_up, weights)
        return single(
            dense.dot_duplicated("ERF,EDF->ERD", hidden, self.down, "experts capacity embed")
        )
