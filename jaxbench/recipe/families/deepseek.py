"""DeepSeek-V3 671B (DeepSeek-AI 2024), as the published benchmark trains it.

Dimensions: the model's public config.json, confirmed by the published counts of parameters (671B,
37B active, and multi-token prediction) and of FLOPs; recipe: NVIDIA-NeMo/Megatron-Bridge at commit
067f987, recipes/deepseek/h100/deepseek_v3.py.
"""

from jaxbench.recipe import flops
from jaxbench.recipe.mixers import ExpertsConfig, LatentAttentionConfig, MlpConfig, Rope, Yarn
from jaxbench.recipe.model import ModelConfig, PredictionConfig

LATENT_ATTENTION = LatentAttentionConfig(
    heads=128,
    query_latent=1536,
    kv_latent=512,
    head_dim=128,
    rope_dim=64,
    value_dim=128,
    rope=Rope(base=10_000.0, yarn=Yarn(factor=40.0, original_context=4096)),
)
EXPERTS = ExpertsConfig(
    count=256,
    top_k=8,
    ffn=2048,
    shared_ffn=2048,
    router="sigmoid",
    gate_scale=2.5,
    groups=8,
    top_groups=4,
    bias_rate=1e-3,
    balance_loss=1e-4,
    routing="random",
)
DEEPSEEK_V3 = ModelConfig(
    family="deepseek",
    size="v3",
    layers=61,
    embed=7168,
    vocabulary=129280,
    pattern=3 * "L-" + 58 * "LE",
    latent_attention=LATENT_ATTENTION,
    mlp=MlpConfig(ffn=18432),
    experts=EXPERTS,
    prediction=PredictionConfig(pattern="LE"),
    norm_eps=1e-6,
    init_std=0.006,
)
MODELS = (DEEPSEEK_V3,)


def source_flops(cfg: ModelConfig, length: int) -> float:
    """The causal count without the router, and 6 S for each gain of the norms of latents and in
    front of multi-token prediction's block."""
    depth = cfg.prediction.depth if cfg.prediction else 0
    mixers = (*cfg.mixers, *depth * cfg.predicting)
    attention = [m for m in mixers if isinstance(m, LatentAttentionConfig)]
    norms = sum(m.query_latent + m.kv_latent for m in attention) + 3 * depth * cfg.embed
    return flops.causal_without_router(cfg, length) + 6 * length * norms


SOURCE_FLOPS = {"deepseek": source_flops}
