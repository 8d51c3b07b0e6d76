"""GPT-3 5B and 175B (Brown et al. 2020), as the published PaxML benchmark trains them.

Dimensions: google/paxml at commit 4a6bf20, contrib/gpu/scripts_gpu/configs.py (GPT5BBase and
GPT175BBase). Of that program we leave out the dropout of 5B on the input of the first layer, and
initial projections into the residual stream are smaller here, as in Megatron.
"""

from dataclasses import replace

from jaxbench.recipe import flops
from jaxbench.recipe.mixers import AttentionConfig, MlpConfig
from jaxbench.recipe.model import ModelConfig

GPT3_175B = ModelConfig(
    family="gpt3",
    size="175b",
    layers=96,
    embed=12288,
    vocabulary=50257,
    attention=AttentionConfig(heads=96, kv_heads=96, head_dim=128, biases=True),
    mlp=MlpConfig(ffn=49152, activation="gelu_ungated", biases=True),
    norm="layer1p",
    init_std=0.023,
    tied=True,
    learned_positions=2048,
)
GPT3_5B = replace(
    GPT3_175B,
    size="5b",
    layers=24,
    embed=4096,
    vocabulary=50304,
    attention=AttentionConfig(heads=32, kv_heads=32, head_dim=128, biases=True),
    mlp=MlpConfig(ffn=16384, activation="gelu_ungated", biases=True),
    init_std=0.01,
)
MODELS = (GPT3_5B, GPT3_175B)


def gpt3_flops(cfg: ModelConfig, length: int) -> float:
    """S (72 L h^2 + 12 L h S + 6 V h), with the vocabulary rounded up to a multiple of 1024."""
    rounded = replace(cfg, vocabulary=-(-cfg.vocabulary // 1024) * 1024)
    return flops.model_flops(rounded, length, "full")["total"]


SOURCE_FLOPS = {"gpt3": gpt3_flops}
