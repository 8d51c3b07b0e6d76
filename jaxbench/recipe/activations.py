"""The activations of a model by name, and the bytes of the activations that are offloaded to host
memory."""

from dataclasses import dataclass
from functools import cache

from jaxbench.recipe import flops
from jaxbench.recipe.mixers import (
    SSD_CHUNK,
    AttentionConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    MambaConfig,
)
from jaxbench.recipe.model import ModelConfig, repeating_blocks
from jaxbench.recipe.settings import INPUT, SAVEABLE, Execution, Run

BF16 = 2
"""Bytes of a bf16 number."""


@dataclass(frozen=True)
class Activation:
    """An activation, summed over all layers: its features per token, and the FLOPs per token to
    recompute it."""

    features: float
    flops: float


@cache
def activations(cfg: ModelConfig, length: int, pattern: str | None = None) -> dict[str, Activation]:
    """The activations of a model by name (`settings.SAVEABLE`), for sequences of `length` tokens;
    with a `pattern`, those of the layers that it names."""
    result: dict[str, Activation] = {}

    def add(name: str, features: float, work: float) -> None:
        before = result.get(name, Activation(0, 0))
        result[name] = Activation(before.features + features, before.flops + work)

    for mixer in cfg.mixers if pattern is None else map(cfg.mixer, pattern):
        if isinstance(mixer, AttentionConfig):
            queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
            add("query", queries, 2 * cfg.embed * queries)
            add("key", keys, 2 * cfg.embed * keys)
            add("value", keys, 2 * cfg.embed * keys)
            add("attention", queries, 4 * min(length, mixer.window or length) * queries)
            add("residual", cfg.embed, 2 * queries * cfg.embed)
        elif isinstance(mixer, LatentAttentionConfig):
            latents, heads = mixer.query_latent + mixer.kv_latent + mixer.rope_dim, mixer.heads
            key_dim, value_dim = mixer.score_widths
            add("latent", latents, 2 * cfg.embed * latents)
            add("query", heads * key_dim, 2 * mixer.query_latent * heads * key_dim)
            add("key", heads * key_dim, 2 * mixer.kv_latent * heads * mixer.head_dim)
            add("value", heads * value_dim, 2 * mixer.kv_latent * heads * value_dim)
            add("attention", heads * value_dim, 2 * length * heads * (key_dim + value_dim))
            add("residual", cfg.embed, 2 * heads * value_dim * cfg.embed)
        elif isinstance(mixer, MambaConfig):
            scan = flops.scan_flops(mixer, SSD_CHUNK, SSD_CHUNK) / SSD_CHUNK / 3
            add("mamba", mixer.groups * mixer.inner, scan)
        else:
            width: float = mixer.ffn
            work: float = 2 * cfg.embed * mixer.ffn
            if isinstance(mixer, ExpertsConfig):
                slots = mixer.slots_per_token
                inner, shared = mixer.latent or cfg.embed, mixer.shared_ffn or 0
                add("dispatched", slots * inner, 0)
                width = slots * mixer.ffn + shared
                shared_slots = mixer.dropless and mixer.slots == "shared"
                tokens = mixer.top_k if shared_slots else slots
                product_flops = 2 * inner * tokens * mixer.ffn
                if mixer.latent:
                    add("latent", inner, product_flops)
                work = product_flops + 2 * cfg.embed * shared
            for name in ("gate", "up") if mixer.gated else ("up",):
                add(name, width, work)
    return {name: result[name] for name in SAVEABLE if name in result}


def offloaded_features(cfg: ModelConfig, length: int, execution: Execution) -> float:
    """The features per token that all layers together keep in host memory.

    A block that does not repeat keeps its activations on the device, and so needs no host memory.
    The last block of a stack keeps them there too, but its place in host memory is allocated.
    """
    mixers, stop, result = len(cfg.layer_patterns[0]), 0, 0.0
    for pattern, times in repeating_blocks(cfg):
        features = {name: a.features for name, a in activations(cfg, length, pattern).items()}
        features[INPUT] = cfg.embed
        for _ in range(times):
            stop += len(pattern) // mixers
            _, on_host = execution.kept(stop, cfg.layers)
            result += sum(features.get(name, 0) for name in on_host if times > 1)
    return result


def host_bytes(run: Run) -> float:
    """Bytes of host memory for the offloaded activations of one device during a step, before the
    step is compiled. Microbatches share the memory."""
    features = offloaded_features(run.model, run.batch.sequence_length, run.execution)
    return BF16 * run.device_tokens * features
