"""Parameters and FLOPs of a model by mixer, and the conventions that turn step times into MFU.

Model FLOPs are the FLOPs of one sequence in one training step, without recomputation: three times
the forward pass, with 2 FLOPs for a multiply-add. Norms, activations, rotary embedding, softmax and
residual additions are not counted, and the embedding lookup is free (Kaplan et al. 2020; Narayanan
et al. 2021, without their recomputation).
"""

from collections.abc import Sequence

from jaxbench.recipe.mixers import (
    AnyAttentionConfig,
    AttentionConfig,
    ExpertsConfig,
    MambaConfig,
    Mixer,
    MlpConfig,
)
from jaxbench.recipe.model import Kind, ModelConfig

CONVENTIONS = ("causal", "full", "published")
"""`causal` counts half of the S x S attention scores, `full` all of them. Within a window W, `full`
counts S x W scores, and `causal` the scores that are not masked. `published` follows the source's
own formula."""

COUNTED_CHUNK = 128
"""The chunk length in tokens for which we count the FLOPs of the Mamba-2 scan: Megatron's default,
which the published runs use. Our scan may be computed in other chunks
(`recipe.mixers.SSD_CHUNK`)."""

NORM_VECTORS = {"rms": 1, "layer1p": 2}


def parameters(cfg: ModelConfig) -> dict[str, int]:
    """The parameter count by component. `total` is their sum."""
    embed, mixers = cfg.embed, (*cfg.mixers, *cfg.predicting)
    attention = [mixer for mixer in mixers if isinstance(mixer, AnyAttentionConfig)]
    experts, mamba = _each(ExpertsConfig, mixers), _each(MambaConfig, mixers)
    norms = len(mixers) + (4 if cfg.prediction else 1)
    counts = {
        "embedding": (cfg.vocabulary + (cfg.learned_positions or 0)) * embed,
        "attention": sum(
            _attention_weights(embed, mixer) + _attention_vectors(embed, mixer)
            for mixer in attention
        ),
        "mlp": sum(
            _mlp_weights(embed, mixer) + (mixer.ffn + embed) * mixer.biases
            for mixer in _each(MlpConfig, mixers)
        ),
        "experts": sum(
            mixer.count * (_expert_weights(embed, mixer) + _expert_biases(embed, mixer))
            for mixer in experts
        ),
        "beside experts": sum(_weights_beside_experts(embed, mixer) for mixer in experts),
        "mamba": sum(_mamba_projections(embed, mixer) + _mamba_rest(mixer) for mixer in mamba),
        "router": sum(_router_weights(embed, mixer) for mixer in experts),
        "norms": norms * embed * NORM_VECTORS[cfg.norm] + sum(map(_attention_norms, attention)),
        "prediction": _prediction_weights(cfg),
        "head": 0 if cfg.tied else cfg.vocabulary * embed,
    }
    return {**counts, "total": sum(counts.values())}


def _each(kind: type[Kind], mixers: Sequence[Mixer]) -> list[Kind]:
    return [mixer for mixer in mixers if isinstance(mixer, kind)]


def _attention_weights(embed: int, mixer: AnyAttentionConfig) -> int:
    if isinstance(mixer, AttentionConfig):
        return 2 * embed * (mixer.heads + mixer.kv_heads) * mixer.head_dim
    queries = mixer.query_latent * (mixer.head_dim + mixer.rope_dim)
    keys_values = mixer.kv_latent * (mixer.head_dim + mixer.value_dim)
    latents = embed * (mixer.query_latent + mixer.kv_latent + mixer.rope_dim)
    return latents + mixer.heads * (queries + keys_values + mixer.value_dim * embed)


def _attention_norms(mixer: AnyAttentionConfig) -> int:
    if isinstance(mixer, AttentionConfig):
        return 2 * mixer.head_dim if mixer.qk_norm else 0
    return mixer.query_latent + mixer.kv_latent


def _prediction_weights(cfg: ModelConfig) -> int:
    """Weights of the projection of the next token's embedding, concatenated with the hidden
    state."""
    return 2 * cfg.embed**2 if cfg.prediction else 0


def _attention_vectors(embed: int, mixer: AnyAttentionConfig) -> int:
    """Parameters of sinks and biases."""
    if not isinstance(mixer, AttentionConfig):
        return 0
    biases = (mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim + embed if mixer.biases else 0
    return biases + mixer.heads * mixer.sinks


def _mlp_weights(embed: int, mixer: MlpConfig | ExpertsConfig) -> int:
    return mixer.matrices * embed * mixer.ffn


def _expert_weights(embed: int, mixer: ExpertsConfig) -> int:
    return _mlp_weights(mixer.latent or embed, mixer)


def _expert_biases(embed: int, mixer: ExpertsConfig) -> int:
    return ((mixer.matrices - 1) * mixer.ffn + (mixer.latent or embed)) * mixer.biases


def _weights_beside_experts(embed: int, mixer: ExpertsConfig) -> int:
    """Weights that all tokens pass through: the latent projections and the shared expert."""
    shared = _mlp_weights(embed, mixer.shared) if mixer.shared else 0
    return 2 * embed * (mixer.latent or 0) + shared


def _router_weights(embed: int, mixer: ExpertsConfig) -> int:
    return mixer.count * (embed + (mixer.bias_rate is not None) + mixer.biases)


def _mamba_projections(embed: int, m: MambaConfig) -> int:
    """Weights of the input projection (gate, scan input, two state maps, time steps) and of the
    output projection."""
    inner, maps = m.groups * m.inner, m.groups * m.state
    return embed * (2 * inner + 2 * maps + m.heads) + inner * embed


def _mamba_rest(m: MambaConfig) -> int:
    """Four taps and a bias for each convolved channel; decay, skip and time-step bias for each
    head; the norm's gain."""
    inner, maps = m.groups * m.inner, m.groups * m.state
    return 5 * (inner + 2 * maps) + 3 * m.heads + inner


def model_flops(cfg: ModelConfig, length: int, convention: str = "full") -> dict[str, int]:
    """Training FLOPs of one sequence by component. `total` is their sum.

    A weight costs 2 FLOPs forward and 4 backward per token. Attention scores (QK^T and PV) cost 2 S
    heads (key head dim + value head dim) forward per token with the `full` matrix. Multi-token
    prediction, including its use of the head, counts as often as it is applied. The `top_k` experts
    of a token count even if the token is dropped, and the shared expert counts too. The Mamba-2
    scan is counted in chunks of `COUNTED_CHUNK`, and every convention counts their square matrices
    in full. The scan's convolution and the decay of states between chunks are not counted.
    """
    embed, per_weight = cfg.embed, 6 * length
    depth = cfg.prediction.depth if cfg.prediction else 0
    mixers = (*cfg.mixers, *depth * cfg.predicting)
    attention = [mixer for mixer in mixers if isinstance(mixer, AnyAttentionConfig)]
    mlps = _each(MlpConfig, mixers)
    scores = sum(
        3 * a.heads * sum(a.score_widths) * _twice_scores(a, length, convention) for a in attention
    )
    flops = {
        "attention projections": sum(per_weight * _attention_weights(embed, a) for a in attention),
        "attention scores": scores,
        "mlp": sum(per_weight * _mlp_weights(embed, mixer) for mixer in mlps),
        "head": per_weight * embed * cfg.vocabulary * (1 + depth),
    }
    if depth:
        flops["prediction"] = per_weight * depth * _prediction_weights(cfg)
    if experts := _each(ExpertsConfig, mixers):
        flops["experts"] = sum(
            per_weight * (e.top_k * _expert_weights(embed, e) + _weights_beside_experts(embed, e))
            for e in experts
        )
        flops["router"] = sum(per_weight * embed * e.count for e in experts)
    if mamba := _each(MambaConfig, mixers):
        chunk = min(COUNTED_CHUNK, length)
        flops["mamba projections"] = sum(per_weight * _mamba_projections(embed, m) for m in mamba)
        flops["mamba scan"] = sum(scan_flops(m, length, chunk) for m in mamba)
    return {**flops, "total": sum(flops.values())}


def causal_without_router(cfg: ModelConfig, length: int) -> int:
    """Training FLOPs of one sequence by the `causal` count, without the router. Several sources use
    this formula."""
    causal = model_flops(cfg, length, "causal")
    return causal["total"] - causal.get("router", 0)


def _twice_scores(mixer: AnyAttentionConfig, length: int, convention: str) -> int:
    """Twice the number of scores that a convention counts per head and sequence."""
    causal, window = convention == "causal", min(mixer.window or length, length)
    if window == length:
        return length * length * (1 if causal else 2)
    return 2 * length * window - (window * (window - 1) if causal else 0)


def scan_flops(m: MambaConfig, length: int, chunk: int) -> int:
    """Training FLOPs of one Mamba-2 scan over a sequence. Forward, per token and group: 2 Q N to
    multiply b and c of a chunk, 2 Q inner to multiply the result by x, and 4 N inner for the states
    of chunks and back."""
    per_group = 2 * chunk * (m.state + m.inner) + 4 * m.state * m.inner
    return 3 * length * m.groups * per_group


def mfu(flops_per_second: float, peak: float | None) -> float | None:
    """Model FLOPs utilization: the FLOP/s that one device achieves over its peak. `peak` is in
    TFLOP/s."""
    return flops_per_second / (peak * 1e12) if peak else None


def days_per_1t_tokens(tokens_per_second: float) -> float:
    """Days to train on 1e12 tokens."""
    return 1e12 / tokens_per_second / 86400
