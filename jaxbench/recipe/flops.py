"""Parameters and FLOPs of a model by layer kind, and the conventions that turn step times into MFU.

Model FLOPs are those of one sequence in one training step: three times the forward pass, one
multiply-add being 2, no recomputation. Norms, activations, rotary embedding, softmax and residual
additions are not counted, the embedding lookup is free (Kaplan et al. 2020; Narayanan et al. 2021,
without their recomputation).
"""

from jaxbench.recipe.model import Mamba, ModelConfig

CONVENTIONS = ("causal", "full", "published")
"""`causal` counts half of the S x S attention scores, `full` all of them, `published` follows the
source's own formula."""

COUNTED_CHUNK = 128
"""Tokens of a chunk in the Mamba-2 scan as it is counted: Megatron's default, which the published
runs left as it is. Ours may be computed in others (`recipe.model.SSD_CHUNK`)."""

NORM_VECTORS = {"rms": 1, "layer1p": 2}


def parameters(cfg: ModelConfig) -> dict[str, int]:
    """Parameter count by component; `total` is their sum."""
    per_letter = {
        "*": ("attention", _attention_weights(cfg)),
        "-": ("mlp", _mlp_weights(cfg)),
        "E": ("experts", cfg.experts * _mlp_weights(cfg)),
    }
    if cfg.mamba is not None:
        per_letter["M"] = ("mamba", _mamba_projections(cfg, cfg.mamba) + _mamba_rest(cfg.mamba))
    letters, norm = cfg.layer_pattern, cfg.embed * NORM_VECTORS[cfg.norm]
    norms_per_layer = 2 if cfg.post_norm else 1
    counts = {
        "embedding": cfg.vocabulary * cfg.embed,
        **{name: letters.count(letter) * size for letter, (name, size) in per_letter.items()},
        "router": letters.count("E") * cfg.embed * cfg.experts,
        "norms": (norms_per_layer * len(letters) + 1) * norm,
        "head": 0 if cfg.tied else cfg.vocabulary * cfg.embed,
    }
    return {**counts, "total": sum(counts.values())}


def _attention_weights(cfg: ModelConfig) -> int:
    return 2 * cfg.embed * (cfg.heads + cfg.kv_heads) * cfg.head_dim


def _mlp_weights(cfg: ModelConfig) -> int:
    matrices = 2 if cfg.activation == "relu2" else 3
    return matrices * cfg.embed * cfg.ffn


def _mamba_projections(cfg: ModelConfig, m: Mamba) -> int:
    """In: gate, scan input, two state maps, time steps. Out: the gated result."""
    inner, maps = m.groups * m.inner, m.groups * m.state
    return cfg.embed * (2 * inner + 2 * maps + m.heads) + inner * cfg.embed


def _mamba_rest(m: Mamba) -> int:
    """Four taps and a bias for each convolved channel; decay, skip and time-step bias for each
    head; the norm's gain."""
    inner, maps = m.groups * m.inner, m.groups * m.state
    return 5 * (inner + 2 * maps) + 3 * m.heads + inner


def model_flops(cfg: ModelConfig, length: int, convention: str = "full") -> dict[str, int]:
    """Training FLOPs of one sequence by component; `total` is their sum.

    Per token a weight costs 2 FLOPs forward and 4 backward. Scores (QK^T and PV) cost 4 S heads
    head_dim per token forward with the `full` matrix. Of the experts those count that a token
    chooses, dropped or not. The Mamba-2 scan is counted in chunks of `COUNTED_CHUNK`, which both
    conventions take as square; its convolution and the decay of states between chunks are not
    counted.
    """
    letters = cfg.layer_pattern
    scores = letters.count("*") * 12 * length * length * cfg.heads * cfg.head_dim
    flops = {
        "attention projections": letters.count("*") * 6 * length * _attention_weights(cfg),
        "attention scores": scores // 2 if convention == "causal" else scores,
        "mlp": letters.count("-") * 6 * length * _mlp_weights(cfg),
        "head": 6 * length * cfg.embed * cfg.vocabulary,
    }
    if layers := letters.count("E"):
        flops["experts"] = layers * 6 * length * cfg.experts_per_token * _mlp_weights(cfg)
        flops["router"] = layers * 6 * length * cfg.embed * cfg.experts
    if (m := cfg.mamba) is not None:
        layers = letters.count("M")
        flops["mamba projections"] = layers * 6 * length * _mamba_projections(cfg, m)
        flops["mamba scan"] = layers * scan_flops(m, length, min(COUNTED_CHUNK, length))
    return {**flops, "total": sum(flops.values())}


def scan_flops(m: Mamba, length: int, chunk: int) -> int:
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
