"""Kimi K2 (Moonshot AI 2025, arXiv 2507.20534), as the published benchmark trains it.

It has DeepSeek-V3's layers. Dimensions: NVIDIA-NeMo/Megatron-Bridge at commit e25e494,
models/kimi/kimi_provider.py, which has those of the model's public config.json; confirmed by the
published counts of parameters (1.04T, 32.6B active) and of FLOPs.
"""

from jaxbench.recipe.families import deepseek
from jaxbench.recipe.mixers import ExpertsConfig, LatentAttentionConfig, MlpConfig, Rope, Yarn
from jaxbench.recipe.model import ModelConfig

KIMI_K2 = ModelConfig(
    family="kimi",
    size="k2",
    layers=61,
    embed=7168,
    vocabulary=163840,
    pattern="L-" + 60 * "LE",
    latent_attention=LatentAttentionConfig(
        heads=64,
        query_latent=1536,
        kv_latent=512,
        head_dim=128,
        rope_dim=64,
        value_dim=128,
        rope=Rope(base=50_000.0, yarn=Yarn(factor=32.0, original_context=4096, fast=1.0, slow=1.0)),
    ),
    mlp=MlpConfig(ffn=18432),
    experts=ExpertsConfig(
        count=384,
        top_k=8,
        ffn=2048,
        shared_ffn=2048,
        router="sigmoid",
        gate_scale=2.827,
        bias_rate=1e-3,
        balance_loss=1e-3,
        routing="random",
        # With experts on 8 ranks, a rank sends another 4096 +- 60 tokens of a sequence: 12 % more
        # is 8 standard deviations.
        rank_capacity_factor=1.12,
    ),
    norm_eps=1e-6,
    init_std=0.006,
)
MODELS = (KIMI_K2,)
SOURCE_FLOPS = {"kimi": deepseek.source_flops}
