"""Qwen3 30B-A3B and 235B-A22B (Qwen Team 2025), as the published benchmarks train them.

Dimensions: the models' public config.json, confirmed by the published counts of parameters (30.5B,
3.3B active; 235B, 22B active) and of FLOPs; norms, biases and initialisation:
NVIDIA-NeMo/Megatron-Bridge at commit 067f987, models/qwen/qwen3_moe_bridge.py and
recipes/qwen/h100/qwen3_moe.py; the router's dtype: no recipe that is published sets
`moe_router_dtype`.
"""

from dataclasses import replace

from jaxbench.recipe import flops
from jaxbench.recipe.mixers import AttentionConfig, ExpertsConfig, Rope
from jaxbench.recipe.model import ModelConfig

ATTENTION = AttentionConfig(
    heads=32, kv_heads=4, head_dim=128, rope=Rope(base=1_000_000.0), qk_norm=True
)
# With random routing and experts on 8 ranks, each sends another 4096 +- 58 tokens of a sequence: a
# tenth more is 7 standard deviations.
EXPERTS = ExpertsConfig(
    count=128,
    top_k=8,
    ffn=768,
    router_dtype="bf16",
    balance_loss=1e-3,
    balance="microbatch",
    routing="random",
)

QWEN3_30B_A3B = ModelConfig(
    family="qwen3",
    size="30b_a3b",
    layers=48,
    embed=2048,
    vocabulary=151936,
    pattern="*E",
    attention=ATTENTION,
    experts=EXPERTS,
    norm_eps=1e-6,
    init_std=0.02,
)
QWEN3_235B_A22B = replace(
    QWEN3_30B_A3B,
    size="235b_a22b",
    layers=94,
    embed=4096,
    attention=replace(ATTENTION, heads=64),
    experts=replace(EXPERTS, ffn=1536),
)
MODELS = (QWEN3_30B_A3B, QWEN3_235B_A22B)
SOURCE_FLOPS = {"qwen3": flops.causal_without_router}
