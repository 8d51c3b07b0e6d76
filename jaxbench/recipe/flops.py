"""Parameters and FLOPs of a model by mixer, and the conventions that turn step times into MFU.

Model FLOPs are those of one sequence in one training step: three times the forward pass, one
multiply-add being 2, no recomputation. Norms, activations, rotary embedding, softmax and residual
additions are not counted, the embedding lookup is free (Kaplan et al. 2020; Narayanan et al. 2021,
without their recomputation).
"""

from jaxbench.recipe.model import (
    AttentionConfig,
    ExpertsConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
)

CONVENTIONS = ("causal", "full", "published")
"""`causal` counts half of the S x S attention scores, `full` all of them, `published` follows the
source's own formula."""

COUNTED_CHUNK = 128
"""Tokens of a chunk in the Mamba-2 scan as it is counted: Megatron's default, which the published
runs left as it is. Ours may be computed in others (`recipe.model.SSD_CHUNK`)."""

NORM_VECTORS = {"rms": 1, "layer1p": 2}


def parameters(cfg: ModelConfig) -> dict[str, int]:
    """Parameter count by component; `total` is their sum."""
    embed, experts, mamba = cfg.embed, cfg.each(ExpertsConfig), cfg.each(MambaConfig)
    norms_per_mixer = 2 if cfg.post_norm else 1
    counts = {
        "embedding": cfg.vocabulary * embed,
        "attention": sum(_attention_weights(embed, mixer) for mixer in cfg.each(AttentionConfig)),
        "mlp": sum(_mlp_weights(embed, mixer) for mixer in cfg.each(MlpConfig)),
        "experts": sum(_expert_weights(embed, mixer, mixer.count) for mixer in experts),
        "mamba": sum(_mamba_projections(embed, mixer) + _mamba_rest(mixer) for mixer in mamba),
        "router": sum(_router_weights(embed, mixer) for mixer in experts),
        "norms": (norms_per_mixer * len(cfg.mixers) + 1) * embed * NORM_VECTORS[cfg.norm]
        + sum(2 * mixer.head_dim for mixer in cfg.each(AttentionConfig) if mixer.qk_norm),
        "head": 0 if cfg.tied else cfg.vocabulary * embed,
    }
    return {**counts, "total": sum(counts.values())}


def _attention_weights(embed: int, mixer: AttentionConfig) -> int:
    return 2 * embed * (mixer.heads + mixer.kv_heads) * mixer.head_dim


def _mlp_weights(embed: int, mixer: MlpConfig | ExpertsConfig) -> int:
    return mixer.matrices * embed * mixer.ffn


def _expert_weights(embed: int, mixer: ExpertsConfig, count: int) -> int:
    """Of a number of experts, their latent projections, and the shared one."""
    shared = _mlp_weights(embed, mixer.shared) if mixer.shared else 0
    projections = 2 * embed * (mixer.latent or 0)
    return count * _mlp_weights(mixer.latent or embed, mixer) + projections + shared


def _router_weights(embed: int, mixer: ExpertsConfig) -> int:
    return mixer.count * (embed + (mixer.bias_rate is not None))


def _mamba_projections(embed: int, m: MambaConfig) -> int:
    """In: gate, scan input, two state maps, time steps. Out: the gated result."""
    inner, maps = m.groups * m.inner, m.groups * m.state
    return embed * (2 * inner + 2 * maps + m.heads) + inner * embed


def _mamba_rest(m: MambaConfig) -> int:
    """Four taps and a bias for each convolved channel; decay, skip and time-step bias for each
    head; the norm's gain."""
    inner, maps = m.groups * m.inner, m.groups * m.state
    return 5 * (inner + 2 * maps) + 3 * m.heads + inner


def model_flops(cfg: ModelConfig, length: int, convention: str = "full") -> dict[str, int]:
    """Training FLOPs of one sequence by component; `total` is their sum.

    Per token a weight costs 2 FLOPs forward and 4 backward. Scores (QK^T and PV) cost 4 S heads
    head_dim per token forward with the `full` matrix. Of the experts those count that a token
    chooses, dropped or not, and the shared one. The Mamba-2 scan is counted in chunks of
    `COUNTED_CHUNK`, which both conventions take as square; its convolution and the decay of states
    between chunks are not counted.
    """
    embed, per_weight = cfg.embed, 6 * length
    attention, mlps = cfg.each(AttentionConfig), cfg.each(MlpConfig)
    scores = sum(2 * per_weight * length * a.heads * a.head_dim for a in attention)
    flops = {
        "attention projections": sum(per_weight * _attention_weights(embed, a) for a in attention),
        "attention scores": scores // 2 if convention == "causal" else scores,
        "mlp": sum(per_weight * _mlp_weights(embed, mixer) for mixer in mlps),
        "head": per_weight * embed * cfg.vocabulary,
    }
    if experts := cfg.each(ExpertsConfig):
        flops["experts"] = sum(per_weight * _expert_weights(embed, e, e.top_k) for e in experts)
        flops["router"] = sum(per_weight * embed * e.count for e in experts)
    if mamba := cfg.each(MambaConfig):
        chunk = min(COUNTED_CHUNK, length)
        flops["mamba projections"] = sum(per_weight * _mamba_projections(embed, m) for m in mamba)
        flops["mamba scan"] = sum(scan_flops(m, length, chunk) for m in mamba)
    return {**flops, "total": sum(flops.values())}


def scan_flops(m: MambaConfig, length: int, chunk: int) -> int:
    """Training FLOPs of one Mamba-2 scan over a sequence. Forward, per token and group: b and c
    of a chunk multiplied, 2 Q N; that times x, 2 Q inner; states of chunks and back, 4 N inner."""
    per_group = 2 * chunk * (m.state + m.inner) + 4 * m.state * m.inner
    return 3 * length * m.groups * per_group


def mfu(flops_per_second: float, peak: float | None) -> float | None:
    """Model FLOPs utilisation: achieved FLOP/s of one device over its peak in TFLOP/s."""
    return flops_per_second / (peak * 1e12) if peak else None


def days_per_1t_tokens(tokens_per_second: float) -> float:
    """Days to train on 1e12 tokens."""
    return 1e12 / tokens_per_second / 86400
