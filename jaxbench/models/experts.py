"""Mixture of experts: gated feed-forward layers of which each token uses a few."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxbench import mesh
from jaxbench.experts import grouped, routing
from jaxbench.models.layers import GATES, Pass, Routed, Weight, normal
from jaxbench.ops import dense, gating
from jaxbench.ops.remat import SMALL, save
from jaxbench.ops.twice import Twice, once
from jaxbench.recipe.model import ModelConfig


class Experts(nnx.Module):
    """sum_e gate_e(x) down_e(act(gate_up_e x) * up_e x) over the experts that the router chooses
    (Shazeer et al. 2017), without biases.

    Tokens are routed as they lie, each on one device, so that nothing is repeated over tensor
    ranks. A row is multiplied by its gate before its last product: the gate's gradient then needs
    only what the backward pass has anyway, and no expert runs again for it.
    """

    def __init__(self, cfg: ModelConfig, *, key):
        k_router, k_gate_up, k_down = jax.random.split(key, 3)
        self.cfg = cfg
        shape, experts = (cfg.embed, cfg.experts), (cfg.experts, cfg.embed)
        # A copy on each device, in fp32: gathering so small a matrix would cost only latency.
        self.router = nnx.Param(
            normal(k_router, cfg, "router_embed router", shape, fan_in=cfg.embed)
        )
        dims, inner = "experts expert_embed part expert_ffn", (*experts, 2, cfg.ffn)
        gate_up = normal(k_gate_up, cfg, dims, inner, fan_in=cfg.embed, truncated=True)
        self.gate_up = Weight(gate_up, fp8=True)
        dims, outer = "experts expert_embed expert_ffn", (*experts, cfg.ffn)
        down = normal(k_down, cfg, dims, outer, fan_in=cfg.ffn, truncated=True, residual=True)
        self.down = Weight(down, fp8=True)

    def __call__(
        self, x: Float[Array, "B S D"], shared: Pass
    ) -> tuple[Float[Array, "B S D"], Routed]:
        """The sum over chosen experts, `"batch shard_seq embed"` in and out; and each sequence's
        load-balance loss, choices of each expert, and dropped choices."""
        logits = jnp.einsum(
            "BSD,DE->BSE",
            x.astype(jnp.float32),
            self.router[...],
            precision=jax.lax.Precision.HIGHEST,
            out_sharding=mesh.spec("batch shard_seq choice", mesh.ACTIVATION),
        )
        logits = save(logits, SMALL)
        gates, experts = routing.choose(logits, self.cfg)
        rows, weights, routes = routing.dispatch(x, gates, experts, self.cfg)
        dropped = mesh.sum_seq(routes.row == routing.NONE, axis=(1, 2))
        figures = (*routing.balance_loss(logits, experts), dropped)
        return routing.combine(self._products(rows, weights, routes), routes), (figures,)

    def _products(self, rows: Array, weights: Array, routes: routing.Routes) -> Array:
        activation = GATES[self.cfg.activation]
        if routes.expert is not None:
            matrices = self.gate_up[...], self.down[...]
            return grouped.mlp(rows, weights, routes.expert, *matrices, activation)
        dims = "experts rows part expert_ffn"
        gate_up = dense.dot_twice("ERD,EDPF->ERPF", Twice.of(rows), self.gate_up, dims)
        hidden = gating.gated(activation, gate_up, weights)
        return once(dense.dot_twice("ERF,EDF->ERD", hidden, self.down, "experts rows embed"))
