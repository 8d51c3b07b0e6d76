"""Mixture of experts: gated feed-forward layers of which each token uses a few."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxbench import grouped, mesh, ops, routing
from jaxbench.config import ModelConfig
from jaxbench.models.layers import ACTIVATIONS, Weight, normal


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
        self.gate_up = Weight(normal(k_gate_up, cfg, dims, inner, fan_in=cfg.embed, truncated=True))
        dims, outer = "experts expert_embed expert_ffn", (*experts, cfg.ffn)
        self.down = Weight(
            normal(k_down, cfg, dims, outer, fan_in=cfg.ffn, truncated=True, residual=True)
        )

    def __call__(
        self, x: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B S D"], tuple[Array, Array, Array]]:
        """The sum over chosen experts, `"batch shard_seq embed"` in and out; and each sequence's
        load-balance loss, choices of each expert, and dropped choices."""
        logits = jnp.einsum(
            "BSD,DE->BSE",
            x.astype(jnp.float32),
            self.router[...],
            precision=jax.lax.Precision.HIGHEST,
            out_sharding=mesh.spec("batch shard_seq choice", mesh.ACTIVATION),
        )
        logits = ops.save(logits, "routing")
        gates, experts = routing.choose(logits, self.cfg)
        rows, weights, plan = routing.dispatch(x, gates, experts, self.cfg)
        dropped = jnp.sum(plan.row == routing.NONE, axis=(1, 2))
        figures = (*routing.balance(logits, experts), dropped)
        return routing.combine(self._products(rows, weights, plan), plan), figures

    def _products(self, rows: Array, weights: Array, plan: routing.Plan) -> Array:
        activation = ACTIVATIONS[self.cfg.activation]
        if plan.expert is not None:
            matrices = self.gate_up[...], self.down[...]
            return grouped.mlp(rows, weights, plan.expert, *matrices, activation)
        dims = "experts rows part expert_ffn"
        gate_up = ops.dot("ERD,EDPF->ERPF", rows, self.gate_up, dims)
        gate, up = ops.save(gate_up[..., 0, :], "gate"), ops.save(gate_up[..., 1, :], "up")
        hidden = grouped.gated(gate, up, weights, activation)
        return ops.dot("ERF,EDF->ERD", hidden, self.down, "experts rows embed")
