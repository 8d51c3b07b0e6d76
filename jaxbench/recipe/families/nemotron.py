"""Nemotron-4 340B (NVIDIA 2024) and the hybrids Nemotron-H 56B, Nemotron 3 Nano 30B-A3B and Super
120B-A12B (NVIDIA 2025), as the published benchmarks train them.

Dimensions: NVIDIA/dgxc-benchmarking, nemotron4-340b-synth.yaml at v24.11.1; NVIDIA NeMo's
NemotronHConfig56B at commit 7a8f1cc; NVIDIA-NeMo/Megatron-Bridge at commit 067f987,
recipes/nemotronh/h100.
"""

from dataclasses import replace

from jaxbench.recipe import flops
from jaxbench.recipe.mixers import AttentionConfig, ExpertsConfig, MambaConfig, MlpConfig, Rope
from jaxbench.recipe.model import ModelConfig, PredictionConfig

NEMOTRON4_340B = ModelConfig(
    family="nemotron4",
    size="340b",
    layers=96,
    embed=18432,
    vocabulary=256_000,
    attention=AttentionConfig(
        heads=96, kv_heads=8, head_dim=192, rope=Rope(base=10_000.0, fraction=0.5)
    ),
    mlp=MlpConfig(ffn=73728, activation="relu2"),
    norm="layer1p",
    init_std=0.0063,
)
NEMOTRONH_56B = ModelConfig(
    family="nemotronh",
    size="56b",
    layers=118,
    embed=8192,
    vocabulary=131_072,
    pattern=10 * "M-M-M-M*-M-" + "M-M-M-M-",
    attention=AttentionConfig(heads=64, kv_heads=8, head_dim=128),
    mlp=MlpConfig(ffn=32768, activation="relu2"),
    mamba=MambaConfig(heads=256, head_dim=64, state=256, groups=8),
    init_std=0.02,
)
NANO_EXPERTS = ExpertsConfig(
    count=128,
    top_k=6,
    ffn=1856,
    activation="relu2",
    shared_ffn=3712,
    router="sigmoid",
    gate_scale=2.5,
    bias_rate=1e-3,
    balance_loss=1e-4,
    routing="random",
)
NEMOTRON3_NANO_30B_A3B = ModelConfig(
    family="nemotron3",
    size="nano_30b_a3b",
    layers=52,
    embed=2688,
    vocabulary=131_072,
    pattern=5 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME",
    attention=AttentionConfig(heads=32, kv_heads=2, head_dim=128),
    experts=NANO_EXPERTS,
    mamba=MambaConfig(heads=64, head_dim=64, state=128, groups=8),
    init_std=0.0173,
)
NEMOTRON3_SUPER_120B_A12B = replace(
    NEMOTRON3_NANO_30B_A3B,
    size="super_120b_a12b",
    layers=88,
    embed=4096,
    pattern=3 * "MEMEMEM*E" + 4 * "MEMEMEMEM*E" + "MEMEMEM*E" + "MEMEMEME",
    experts=replace(
        NANO_EXPERTS, count=512, top_k=22, ffn=2688, latent=1024, shared_ffn=5376, gate_scale=5.0
    ),
    mamba=MambaConfig(heads=128, head_dim=64, state=128, groups=8),
    prediction=PredictionConfig(pattern="*E", depth=2, loss=0.3),
    init_std=0.014,
)

MODELS = (NEMOTRON4_340B, NEMOTRONH_56B, NEMOTRON3_NANO_30B_A3B, NEMOTRON3_SUPER_120B_A12B)


def nemotron4_flops(cfg: ModelConfig, length: int) -> float:
    """S (24 L h^2 + 12 L h S + 48 L h^2 + 6 V h), whose first term takes keys and values to be as
    wide as queries: 17 % above the full count."""
    wider = sum((a.heads - a.kv_heads) * a.head_dim for a in cfg.each(AttentionConfig))
    full = flops.model_flops(cfg, length, "full")["total"]
    return full + 6 * length * 2 * cfg.embed * wider


def nemotronh_flops(cfg: ModelConfig, length: int) -> float:
    """The full count, with the scan in chunks of 256."""
    full = flops.model_flops(cfg, length, "full")
    scans = sum(flops.scan_flops(m, length, 256) for m in cfg.each(MambaConfig))
    return full["total"] - full.get("mamba scan", 0) + scans


def nemotron3_flops(cfg: ModelConfig, length: int) -> float:
    """The causal count without the router and the projection of multi-token prediction, and of a
    Mamba-2 mixer 3 S (2 h (2 d + 2 g n + heads) + 7 d n + 2 d h) with d = 2 h whatever its width,
    which for Nano is 1.27 times its count (Megatron-Bridge, training/utils/flop_utils.py)."""
    causal, h = flops.model_flops(cfg, length, "causal"), cfg.embed
    left_out = ("router", "prediction", "mamba projections", "mamba scan")
    mamba = sum(
        2 * h * (4 * h + 2 * m.groups * m.state + m.heads) + 14 * h * m.state + 4 * h * h
        for m in cfg.each(MambaConfig)
    )
    return causal["total"] - sum(causal.get(name, 0) for name in left_out) + 3 * length * mamba


SOURCE_FLOPS = {
    "nemotron4": nemotron4_flops,
    "nemotronh": nemotronh_flops,
    "nemotron3": nemotron3_flops,
}
