"""Grok-1 (xAI 2024), as the published benchmark trains it and as it was released.

The benchmark's recipe keeps the widths, and otherwise trains a standard block: two norms, no soft
cap, untied embedding without multipliers, another rotary base and tokenizer, top-2 before softmax,
and experts with a capacity (NVIDIA/dgxc-benchmarking v25.02 grok1/grok1_314b.yaml, Megatron-LM
core_v0.10.0). The original: xai-org/grok-1 model.py and run.py at commit 7050ed2; how it was
initialised and trained is not public, so it takes the recipe's.
"""

from dataclasses import replace

from jaxbench.recipe import flops
from jaxbench.recipe.attention_config import AttentionConfig, Rope
from jaxbench.recipe.model import ExpertsConfig, ModelConfig

EXPERTS = ExpertsConfig(
    count=8,
    top_k=2,
    ffn=32768,
    activation="gelu_tanh",
    balance_loss=0.01,
    capacity_factor=1.0,
)
GROK1 = ModelConfig(
    family="grok1",
    size="314b",
    layers=64,
    embed=6144,
    vocabulary=128256,
    pattern="*E",
    attention=AttentionConfig(heads=48, kv_heads=8, head_dim=128, rope=Rope(base=1_000_000.0)),
    experts=EXPERTS,
    init_std=0.008,
)
GROK1_ORIGINAL = replace(
    GROK1,
    size="314b_original",
    vocabulary=131072,
    attention=AttentionConfig(
        heads=48, kv_heads=8, head_dim=128, rope=Rope(base=10_000.0), softcap=30.0
    ),
    experts=replace(
        EXPERTS,
        router="softmax_topk",
        balance_loss=0.0,
        capacity_factor=None,
        rank_capacity_factor=8,
    ),
    post_norm=True,
    tied=True,
    embedding_scale=78.38367176906169,
    logit_scale=0.5773502691896257,
)
MODELS = (GROK1, GROK1_ORIGINAL)
SOURCE_FLOPS = {"grok1": flops.causal_without_router}
"""S (12 L h^2 (1 + kv/heads + S/h/2) + 18 L f h k + 6 V h)."""
