"""Nemotron-4 340B (NVIDIA 2024) and the hybrid Nemotron-H 56B (NVIDIA 2025), as the published
benchmarks train them.

Dimensions: NVIDIA/dgxc-benchmarking, nemotron4-340b-synth.yaml at v24.11.1; NVIDIA NeMo's
NemotronHConfig56B at commit 7a8f1cc.
"""

from jaxbench.recipe.model import Mamba, ModelConfig

NEMOTRON4_340B = ModelConfig(
    family="nemotron4",
    size="340b",
    layers=96,
    embed=18432,
    ffn=73728,
    heads=96,
    kv_heads=8,
    head_dim=192,
    vocabulary=256_000,
    rope_base=10_000.0,
    rope_fraction=0.5,
    norm="layer1p",
    activation="relu2",
    init_std=0.0063,
)
NEMOTRONH_56B = ModelConfig(
    family="nemotronh",
    size="56b",
    layers=118,
    embed=8192,
    ffn=32768,
    heads=64,
    kv_heads=8,
    head_dim=128,
    vocabulary=131_072,
    rope_base=None,
    activation="relu2",
    mamba=Mamba(heads=256, head_dim=64, state=256, groups=8),
    init_std=0.02,
    pattern=10 * "M-M-M-M*-M-" + "M-M-M-M-",
)
MODELS = (NEMOTRON4_340B, NEMOTRONH_56B)
