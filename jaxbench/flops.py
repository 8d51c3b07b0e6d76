"""Parameters and FLOPs per letter of a model, the peaks of GPUs, and the conventions that turn step
times into MFU.

Model FLOPs are those of one sequence in one training step: three times the forward pass, one
multiply-add being 2, no recomputation. Norms, activations, rotary embedding, softmax and residual
additions are not counted, the embedding lookup is free (Kaplan et al. 2020; Narayanan et al. 2021,
without their recomputation).
"""

from collections.abc import Callable

from jaxbench.config import ModelConfig

CONVENTIONS = ("causal", "full", "published")
"""`causal` counts half of the S x S attention scores, `full` all of them, `published` follows the
source's own formula."""

PEAK_TFLOPS = {
    "A100": {"bf16": 312.0},
    "H100": {"bf16": 989.0, "fp8": 1979.0},
    "H200": {"bf16": 989.0, "fp8": 1979.0},
    "B200": {"bf16": 2250.0, "fp8": 4500.0},
    "B300": {"bf16": 2250.0, "fp8": 4500.0},
    "GB200": {"bf16": 2450.0, "fp8": 4900.0},
    "GB300": {"bf16": 2450.0, "fp8": 4900.0},
}
"""Dense peak per GPU. A100, H100, H200: published benchmark documents and pytorch/torchtitan
tools/utils.py. Blackwell: NVIDIA/dgxc-benchmarking README.md v26.02 (torchtitan has 2500 for the
GB200's bf16)."""


def peak_tflops(device_kind: str, dtype: str) -> float | None:
    """Dense peak of one device in TFLOP/s by the name its driver gives; None when it has none in
    the table."""
    names = [name for name in PEAK_TFLOPS if name in device_kind.replace("-", " ").split()]
    return PEAK_TFLOPS[names[0]].get(dtype) if names else None


def parameters(cfg: ModelConfig) -> dict[str, int]:
    """Parameter count by component; `total` is their sum."""
    per_letter: dict[str, Callable[[ModelConfig], int]] = {
        "*": _attention_weights,
        "-": _mlp_weights,
        "E": lambda cfg: cfg.experts * _mlp_weights(cfg),
    }
    letters = cfg.letters
    norms_per_layer = 2 if cfg.post_norm else 1
    counts = {
        "embedding": cfg.vocabulary * cfg.embed,
        "attention": letters.count("*") * per_letter["*"](cfg),
        "mlp": letters.count("-") * per_letter["-"](cfg),
        "experts": letters.count("E") * per_letter["E"](cfg),
        "router": letters.count("E") * cfg.embed * cfg.experts,
        "norms": (norms_per_layer * len(letters) + 1) * cfg.embed,
        "head": 0 if cfg.tied else cfg.vocabulary * cfg.embed,
    }
    return {**counts, "total": sum(counts.values())}


def active_parameters(cfg: ModelConfig) -> int:
    """Parameters that one token uses: all but the experts that it does not choose."""
    idle = cfg.experts - cfg.experts_per_token
    return parameters(cfg)["total"] - cfg.letters.count("E") * idle * _mlp_weights(cfg)


def _attention_weights(cfg: ModelConfig) -> int:
    return 2 * cfg.embed * (cfg.heads + cfg.kv_heads) * cfg.head_dim


def _mlp_weights(cfg: ModelConfig) -> int:
    return 3 * cfg.embed * cfg.ffn


def model_flops(cfg: ModelConfig, length: int, convention: str = "full") -> dict[str, int]:
    """Training FLOPs of one sequence by component; `total` is their sum.

    Per token a weight costs 2 FLOPs forward and 4 backward. Scores (QK^T and PV) cost 4 S heads
    head_dim per token forward with the `full` matrix. Of the experts those count that a token
    chooses, dropped or not.
    """
    attention_layers, expert_layers = cfg.letters.count("*"), cfg.letters.count("E")
    scores = attention_layers * 12 * length * length * cfg.heads * cfg.head_dim
    flops = {
        "attention projections": attention_layers * 6 * length * _attention_weights(cfg),
        "attention scores": scores // 2 if convention == "causal" else scores,
        "mlp": cfg.letters.count("-") * 6 * length * _mlp_weights(cfg),
        "experts": expert_layers * 6 * length * cfg.experts_per_token * _mlp_weights(cfg),
        "router": expert_layers * 6 * length * cfg.embed * cfg.experts,
        "head": 6 * length * cfg.embed * cfg.vocabulary,
    }
    return {**flops, "total": sum(flops.values())}


def mfu(flops_per_second: float, peak: float | None) -> float | None:
    """Model FLOPs utilisation: achieved FLOP/s of one device over its peak in TFLOP/s."""
    return flops_per_second / (peak * 1e12) if peak else None


def days_per_1t_tokens(tokens_per_second: float) -> float:
    """Days to train on 1e12 tokens."""
    return 1e12 / tokens_per_second / 86400
