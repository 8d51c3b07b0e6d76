"""GPT-OSS 120B (OpenAI 2025), as the published benchmarks train it.

Dimensions, sinks, biases and activation: Hugging Face transformers, models/gpt_oss, which is the
released model, confirmed by the published counts of parameters (116.83B) and of FLOPs. Window and
routing: NVIDIA-NeMo/Megatron-Bridge at commit 067f987, models/gpt_oss and perf_recipes/gpt_oss,
which leave `moe_router_dtype` unset. No load-balance loss.
"""

from jaxbench.recipe import flops
from jaxbench.recipe.mixers import AttentionConfig, ExpertsConfig, Rope, Yarn
from jaxbench.recipe.model import ModelConfig

YARN = Yarn(factor=32.0, original_context=4096, rounded=False)
# With random routing and experts on 8 ranks, each sends another 2048 +- 42 tokens of a sequence: a
# tenth more is 5 standard deviations.
EXPERTS = ExpertsConfig(
    count=128,
    top_k=4,
    ffn=2880,
    activation="swiglu_clamped",
    biases=True,
    router_dtype="bf16",
    routing="random",
)

GPT_OSS_120B = ModelConfig(
    family="gpt_oss",
    size="120b",
    layers=36,
    embed=2880,
    vocabulary=201088,
    pattern="WE*E",
    attention=AttentionConfig(
        heads=64,
        kv_heads=8,
        head_dim=64,
        rope=Rope(base=150_000.0, yarn=YARN),
        window=128,
        sinks=True,
        biases=True,
    ),
    experts=EXPERTS,
    init_std=0.02,
)
MODELS = (GPT_OSS_120B,)
SOURCE_FLOPS = {"gpt_oss": flops.causal_without_router}
