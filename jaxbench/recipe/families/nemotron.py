"""Nemotron-4 340B (NVIDIA 2024) and the hybrid Nemotron-H 56B (NVIDIA 2025), as the published
benchmarks train them.

Dimensions: NVIDIA/dgxc-benchmarking, nemotron4-340b-synth.yaml at v24.11.1; NVIDIA NeMo's
NemotronHConfig56B at commit 7a8f1cc.
"""

from jaxbench.recipe.model import AttentionConfig, MambaConfig, MlpConfig, ModelConfig, Rope

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
MODELS = (NEMOTRON4_340B, NEMOTRONH_56B)
