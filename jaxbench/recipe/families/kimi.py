"""Kimi K2 (Moonshot AI 2025, arXiv 2507.20534), as the published benchmark trains it.

It has DeepSeek-V3's layers, so only what differs is written here. Dimensions:
NVIDIA-NeMo/Megatron-Bridge at commit e25e494, models/kimi/kimi_provider.py, which has those of the
model's public config.json. Our count of FLOPs is the published one. We count 1.026T parameters,
32.9B of them active with the embedding and 31.7B without; the paper has 1.04T and 32.6B.
"""

from dataclasses import replace

from jaxbench.recipe.families import deepseek
from jaxbench.recipe.mixers import Rope, Yarn

KIMI_K2 = replace(
    deepseek.DEEPSEEK_V3,
    family="kimi",
    size="k2",
    vocabulary=163840,
    pattern="L-" + 60 * "LE",
    latent_attention=replace(
        deepseek.LATENT_ATTENTION,
        heads=64,
        rope=Rope(base=50_000.0, yarn=Yarn(factor=32.0, original_context=4096, fast=1.0, slow=1.0)),
    ),
    experts=replace(
        deepseek.EXPERTS,
        count=384,
        gate_scale=2.827,
        groups=1,
        top_groups=1,
        balance_loss=1e-3,
    ),
    prediction=None,
)
MODELS = (KIMI_K2,)
SOURCE_FLOPS = {"kimi": deepseek.source_flops}
