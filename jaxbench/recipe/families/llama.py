"""Llama 2 and 3.1 (Touvron et al. 2023, Grattafiori et al. 2024), as the published benchmarks train
them.

The 8B and 70B benchmarks are titled 3.1 but train the Llama 3 recipe, without rotary scaling;
parameters and FLOPs are the same either way. Dimensions: NVIDIA NeMo's Llama 3 recipes at commit
d2b2155, MaxText's llama2-70b.yml at 02a8f5c.
"""

from jaxbench.recipe.mixers import AttentionConfig, MlpConfig, Rope, RopeScaling
from jaxbench.recipe.model import ModelConfig

SCALING = RopeScaling(factor=8.0, low=1.0, high=4.0, original_context=8192)

LLAMA2_70B = ModelConfig(
    family="llama2",
    size="70b",
    layers=80,
    embed=8192,
    vocabulary=32000,
    attention=AttentionConfig(heads=64, kv_heads=8, head_dim=128, rope=Rope(base=10_000.0)),
    mlp=MlpConfig(ffn=28672),
)
LLAMA31_8B = ModelConfig(
    family="llama3.1",
    size="8b",
    layers=32,
    embed=4096,
    vocabulary=128256,
    attention=AttentionConfig(heads=32, kv_heads=8, head_dim=128, rope=Rope(base=500_000.0)),
    mlp=MlpConfig(ffn=14336),
    init_std=0.01,
)
LLAMA31_70B = ModelConfig(
    family="llama3.1",
    size="70b",
    layers=80,
    embed=8192,
    vocabulary=128256,
    attention=AttentionConfig(heads=64, kv_heads=8, head_dim=128, rope=Rope(base=500_000.0)),
    mlp=MlpConfig(ffn=28672),
    init_std=0.008944,
)
LLAMA31_405B = ModelConfig(
    family="llama3.1",
    size="405b",
    layers=126,
    embed=16384,
    vocabulary=128256,
    attention=AttentionConfig(
        heads=128, kv_heads=8, head_dim=128, rope=Rope(base=500_000.0, scaling=SCALING)
    ),
    mlp=MlpConfig(ffn=53248),
    init_std=0.02,
)
MODELS = (LLAMA2_70B, LLAMA31_8B, LLAMA31_70B, LLAMA31_405B)
