"""Grok-1 (xAI 2024), as the published benchmark trains it.

The benchmark's recipe keeps the widths of the released model, and otherwise trains a standard
block: two norms, no soft cap, untied embedding without multipliers, another rotary base and
tokenizer, top-2 before softmax, and experts with a capacity (NVIDIA/dgxc-benchmarking v25.02
grok1/grok1_314b.yaml, Megatron-LM core_v0.10.0).
"""

from jaxbench.recipe import flops
from jaxbench.recipe.mixers import AttentionConfig, ExpertsConfig, Rope
from jaxbench.recipe.model import ModelConfig

GROK1 = ModelConfig(
    family="grok1",
    size="314b",
    layers=64,
    embed=6144,
    vocabulary=128256,
    pattern="*E",
    attention=AttentionConfig(heads=48, kv_heads=8, head_dim=128, rope=Rope(base=1_000_000.0)),
    experts=ExpertsConfig(
        count=8,
        top_k=2,
        ffn=32768,
        activation="gelu_tanh",
        balance_loss=0.01,
        capacity_factor=1.0,
    ),
    init_std=0.008,
)
MODELS = (GROK1,)
SOURCE_FLOPS = {"grok1": flops.causal_without_router}
"""S (12 L h^2 (1 + kv/heads + S/h/2) + 18 L f h k + 6 V h)."""
