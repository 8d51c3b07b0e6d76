"""The mixture of experts: many feed-forward layers; each token uses a few of them."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxbench import mesh
from jaxbench.models.context import Context
from jaxbench.models.layers import (
    Hidden,
    LayerOutput,
    LoadBias,
    Vector,
    Weight,
    normal,
    zero_bias,
)
from jaxbench.models.mlp import make_mlp
from jaxbench.ops import dense, fp32_dot, gating, grouped, quantized
from jaxbench.ops.moe import routing
from jaxbench.ops.moe.dispatch import combine, dispatch, join_batch, split_batch
from jaxbench.ops.remat import ALWAYS, save
from jaxbench.recipe.mixers import ExpertsConfig
from jaxbench.recipe.model import ModelConfig


class Biases(nnx.Module):
    """Biases of the router, and of both matmuls of each expert. Every rank holds the biases of the
    last matmul for all experts (`Experts`)."""

    def __init__(self, cfg: ModelConfig, mixer: ExpertsConfig, *, key):
        self.router = Vector(normal(key, cfg, "router", (mixer.count,), fan_in=cfg.embed))
        parts, sizes = ("part ", (2,)) if mixer.gated else ("", ())
        self.up = zero_bias(f"experts {parts}expert_ffn", (mixer.count, *sizes, mixer.ffn))
        self.down = zero_bias("router embed", (mixer.count, mixer.latent or cfg.embed))


ExpertWeight = Weight | quantized.Operand


class Experts(nnx.Module):
    """The sum over the chosen experts e of g_e(x) down_e(act(gate_e x) * up_e x), or of g_e(x)
    down_e(relu(up_e x)^2), with the gates g of the router (Shazeer et al. 2017).

    A shared expert has no gate (DeepSeek-AI 2024, "DeepSeekMoE"). With `latent` the chosen experts
    work on a projection of x, and their sum is projected back (NVIDIA 2025, "Nemotron 3"). With
    `biases` the router and both matmuls of an expert have biases (OpenAI 2025, "gpt-oss").

    Tokens are routed from their sequence shard, each on one device, so tensor ranks repeat no work.

    A permuted token is multiplied by its gate before the last matmul. The gradient of the gate then
    needs no output of an expert, which would have to be recomputed.

    The biases of the last matmul add up to sum_e g_e b_e. They are added where a token comes from:
    one matmul instead of a sum over k times as many permuted tokens. Each rank needs the biases of
    all experts for that.
    """

    def __init__(self, cfg: ModelConfig, mixer: ExpertsConfig, *, key):
        k_router, k_up, k_down, k_shared, k_into, k_out_of, k_bias = jax.random.split(key, 7)
        self.cfg, self.gated = mixer, mixer.gated
        # Replicated: a gather of so small a matrix would cost its latency.
        dims, outer = "router_embed router", (cfg.embed, mixer.count)
        self.router = nnx.Param(normal(k_router, cfg, dims, outer, fan_in=cfg.embed))
        zeros = jnp.zeros(mixer.count, out_sharding=mesh.spec("router", mesh.WEIGHT))
        self.bias = None if mixer.bias_rate is None else LoadBias(zeros)
        width = mixer.latent or cfg.embed
        first = mesh.expert_dims(mixer.count)
        dims, shape = f"{first} expert_ffn", (mixer.count, width, mixer.ffn)
        if self.gated:
            parts, inner = f"{first} part expert_ffn", (*shape[:2], 2, mixer.ffn)
            gate_up = normal(k_up, cfg, parts, inner, fan_in=width, truncated=True)
            self.gate_up = Weight(gate_up, quantized=True, experts=True)
        else:
            up = normal(k_up, cfg, dims, shape, fan_in=width)
            self.up = Weight(up, quantized=True, experts=True)
        down = normal(k_down, cfg, dims, shape, fan_in=mixer.ffn, truncated=True, residual=True)
        self.down = Weight(down, quantized=True, experts=True)
        self.shared = make_mlp(cfg, mixer.shared, key=k_shared) if mixer.shared else None
        if mixer.latent:
            dims, outer = "embed latent", (cfg.embed, mixer.latent)
            into = normal(k_into, cfg, dims, outer, fan_in=cfg.embed)
            out_of = normal(k_out_of, cfg, dims, outer, fan_in=mixer.latent, residual=True)
            self.into_latent = Weight(into, quantized=True)
            self.out_of_latent = Weight(out_of, quantized=True)
        self.biases = Biases(cfg, mixer, key=k_bias) if mixer.biases else None

    def __call__(self, x: Hidden, ctx: Context) -> LayerOutput:
        """The sum over the chosen experts and the shared one, `"batch shard_seq embed"` in and
        out."""
        spec = mesh.spec("batch shard_seq assignment", mesh.ACTIVATION)
        router = self.router[...]
        if self.cfg.router_dtype == "fp32" or x.dtype == jnp.float32:
            logits = fp32_dot.dot(x, router, spec)
        else:
            logits = jnp.einsum("BSD,DE->BSE", x, router.astype(x.dtype), out_sharding=spec)
        if self.biases is not None:
            logits = dense.biased(logits, self.biases.router[...])
        logits = logits.astype(jnp.float32)
        if self.cfg.routing == "learned":
            logits = save(logits, ALWAYS)
        else:  # the same numbers when they are recomputed
            logits = routing.random_logits(logits, ctx.counters, self.cfg)
        bias = None if self.bias is None else self.bias[...]
        gates, experts = routing.choose(logits, self.cfg, bias)
        inputs = x
        if self.cfg.latent:
            inputs = dense.dot("BSD,DL->BSL", x, self.into_latent, "batch shard_seq latent")
        parts = split_batch((inputs, gates, experts), ctx.expert_parts)
        kernel = ctx.kernels.grouped_matmul
        y, dropped = join_batch(
            [self._routed(part, kernel, number) for number, part in enumerate(parts)]
        )
        balance_loss, load = routing.balance_loss(logits, experts, self.cfg)
        figures = routing.RoutingFigures(balance_loss, load, dropped)
        if self.cfg.latent:
            y = save(y, "latent")
            y = dense.dot("BSL,DL->BSD", y, self.out_of_latent, "batch shard_seq embed")
            y = mesh.pinned(y)
        if self.shared is not None:
            y += self.shared(x, ctx)[0]
        return y, (figures,)

    def _routed(
        self, part: tuple[Array, Array, Array], implementation: str, number: int
    ) -> tuple[Array, Array]:
        """(sum over the chosen experts, number of dropped assignments of each sequence), from
        (hidden state, gates, experts) of the part of this number."""
        x, gates, experts = part
        tokens, slot_gates, routes = dispatch(x, gates, experts, self.cfg)
        weights = quantized.seeded(self._into, number), quantized.seeded(self.down, number)
        if (groups := routes.groups) is None:
            outputs = self._batched_matmuls(tokens, slot_gates, *weights)
        else:
            outputs = self._grouped_matmuls(tokens, slot_gates, groups, implementation, *weights)
        y, kept = combine(outputs, routes), routes.kept
        if self.biases is not None:
            y += self._output_biases(self.biases.down[...].astype(y.dtype), gates, experts, kept)
        return y, mesh.sum_seq(~kept, axis=(1, 2))

    @property
    def _into(self) -> ExpertWeight:
        """The weight of the first matmul."""
        return self.gate_up if self.gated else self.up

    def _batched_matmuls(
        self, tokens: Array, slot_gates: Array, into: ExpertWeight, down: ExpertWeight
    ) -> Array:
        inner, dims = ("PF", "part expert_ffn") if self.gated else ("F", "expert_ffn")
        equation, dims = f"ERD,ED{inner}->ER{inner}", f"experts capacity {dims}"
        up = dense.dot(equation, tokens, into, dims)
        if self.biases is not None:
            up = dense.biased(up, self.biases.up[...], (0, *range(2, up.ndim)))
        hidden = self._hidden(up, slot_gates)
        return dense.dot("ERF,EDF->ERD", hidden, down, "experts capacity embed")

    def _grouped_matmuls(
        self, tokens: Array, slot_gates: Array, groups: grouped.Groups, implementation: str,
        into: ExpertWeight, down: ExpertWeight,
    ) -> Array:  # fmt: skip
        up = grouped.to_permuted(implementation, tokens, into, groups)
        if self.biases is not None:
            up = grouped.biased(up, self.biases.up[...], groups)
        hidden = self._hidden(up, slot_gates)
        return grouped.from_permuted(implementation, hidden, down, groups)

    def _output_biases(self, biases: Array, gates: Array, experts: Array, kept: Array) -> Array:
        """The sum of bias times gate over a token's experts. `kept` is false for an assignment that
        was dropped."""
        chosen = (experts[..., None] == jnp.arange(self.cfg.count)) & kept[..., None]
        weights = jnp.sum(jnp.where(chosen, gates[..., None], 0.0), axis=-2).astype(biases.dtype)
        spec = mesh.spec("batch shard_seq embed", mesh.ACTIVATION)
        return jnp.einsum("BSE,ED->BSD", weights, biases, out_sharding=spec)

    def _hidden(self, up: Array, slot_gates: Array) -> Array:
        """What is computed between the matmuls: activations times gates."""
        if self.gated:
            blocks = quantized.is_block_scaled(self._into)
            return gating.gated(gating.GATES[self.cfg.activation], up, slot_gates, blocks)
        return gating.squared_relu(up, slot_gates)
