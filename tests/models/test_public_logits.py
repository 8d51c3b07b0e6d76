"""Logits and gradients of Hugging Face's models with random weights (`fixtures/references.py`)."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import tiered
from public_weights import deepseek, gpt2, gpt_oss, hybrid, transformer
from steps import last_hidden
from tiny import mesh_of, tiny_run

from jaxbench.models.context import Sequences, make_context
from jaxbench.models.decoder import Decoder, prediction_segment
from jaxbench.ops.layer_stack import LayerLoop
from jaxbench.recipe.mixers import (
    AttentionConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    MambaConfig,
    MlpConfig,
    Rope,
    RopeScaling,
    Yarn,
)
from jaxbench.recipe.model import ModelConfig, PredictionConfig
from jaxbench.recipe.settings import Execution, Precision

FIXTURES = Path(__file__).parents[1] / "fixtures"
FP32 = Precision(dtype="fp32")


def config(rope=None, activation="silu", **changes):
    return ModelConfig(
        family="test", size="tiny", embed=32, vocabulary=64, init_std=0.02,
        attention=AttentionConfig(heads=4, kv_heads=2, head_dim=16, rope=rope),
        mlp=MlpConfig(ffn=48, activation=activation), **changes,
    )  # fmt: skip


SCALING = RopeScaling(factor=8.0, low=1.0, high=4.0, original_context=32)
ROPE = Rope(base=500000.0, scaling=SCALING)
NEMOTRON = {"activation": "relu2", "layers": 2, "rope": Rope(base=10000.0, fraction=0.5)}
HYBRID = {
    "activation": "relu2", "layers": 12, "pattern": "M-M*-M-M*-M-",
    "mamba": MambaConfig(heads=8, head_dim=8, state=16, groups=2),
}  # fmt: skip
NEMOTRON3 = ExpertsConfig(
    count=8, top_k=4, ffn=24, activation="relu2", shared_ffn=40, router="sigmoid", bias_rate=1e-3
)


def nemotron3(**changes):
    return ModelConfig(
        family="test", size="tiny", layers=8, embed=32, vocabulary=64, pattern="ME*E",
        attention=AttentionConfig(heads=4, kv_heads=2, head_dim=16), mamba=HYBRID["mamba"],
        experts=replace(NEMOTRON3, **changes),
    )  # fmt: skip


QWEN3 = ModelConfig(
    family="test", size="tiny", layers=2, embed=32, vocabulary=64, pattern="*E", norm_eps=1e-6,
    attention=AttentionConfig(
        heads=4, kv_heads=2, head_dim=16, rope=Rope(base=1000000.0), qk_norm=True
    ),
    experts=ExpertsConfig(count=8, top_k=3, ffn=24),
)  # fmt: skip
DEEPSEEK3 = ModelConfig(
    family="test", size="tiny", layers=3, embed=32, vocabulary=64, pattern="L-LELE", norm_eps=1e-6,
    latent_attention=LatentAttentionConfig(
        heads=4, query_latent=24, kv_latent=16, head_dim=16, rope_dim=8, value_dim=12,
        rope=Rope(base=1e4, yarn=Yarn(factor=8.0, original_context=32, fast=8.0)),
    ),
    mlp=MlpConfig(ffn=48),
    experts=ExpertsConfig(
        count=8, top_k=4, ffn=24, shared_ffn=24, router="sigmoid", bias_rate=1e-3, gate_scale=2.5,
        groups=4, top_groups=2,
    ),
    prediction=PredictionConfig(pattern="LE", loss=0.3),
)  # fmt: skip
KIMI2 = replace(
    DEEPSEEK3, prediction=None,
    latent_attention=replace(
        DEEPSEEK3.latent_attention,
        rope=Rope(base=5e4, yarn=Yarn(factor=32.0, original_context=32, fast=1.0)),
    ),
    experts=replace(DEEPSEEK3.experts, count=12, gate_scale=2.827, groups=1, top_groups=1),
)  # fmt: skip
GPT_OSS = ModelConfig(
    family="test", size="tiny", layers=4, embed=32, vocabulary=64, pattern="WE*E",
    attention=AttentionConfig(
        heads=4, kv_heads=2, head_dim=16, window=8, sinks=True, biases=True,
        rope=Rope(
            base=150000.0, yarn=Yarn(factor=32.0, original_context=4096, rounded=False)
        ),
    ),
    experts=ExpertsConfig(
        count=8, top_k=3, ffn=24, activation="swiglu_clamped", biases=True, rank_capacity_factor=8
    ),
)  # fmt: skip
GPT2 = ModelConfig(
    family="test", size="tiny", layers=2, embed=32, vocabulary=64, norm="layer1p", tied=True,
    learned_positions=64,
    attention=AttentionConfig(heads=4, kv_heads=4, head_dim=8, biases=True),
    mlp=MlpConfig(ffn=48, activation="gelu_ungated", biases=True),
)  # fmt: skip
MODELS = {
    "llama": (transformer, config(layers=2, rope=Rope(base=10000.0))),
    "llama_scaled": (transformer, config(layers=2, rope=ROPE)),
    "nemotron4": (transformer, config(**NEMOTRON, norm="layer1p")),
    "nemotronh": (hybrid, config(**HYBRID)),
    "nemotron3_groups": (hybrid, nemotron3(groups=4, top_groups=2)),
    "nemotron3_latent": (hybrid, nemotron3(top_k=3, latent=16, gate_scale=2.5)),
    "qwen3": (transformer, QWEN3),
    "deepseek3": (deepseek, DEEPSEEK3),
    "kimi2": (deepseek, KIMI2),
    "gpt_oss": (gpt_oss, GPT_OSS),
    "gpt2": (gpt2, GPT2),
}
"""By file of `fixtures`: how its weights are read, and the model."""

QUICK = ("llama_scaled", "nemotron4", "qwen3")
"""The models that take seconds; the others run with `--slow`."""


def loaded(name, key):
    """(arrays of the fixture, our model with its weights), on the current mesh."""
    pairs, cfg = MODELS[name]
    arrays = np.load(FIXTURES / f"{name}.npz")
    model, size = Decoder(cfg, key=key), 0

    def weight(name):
        # Norms of GPT-2 multiply by their weight, ours by one more than the gain.
        return arrays[name].astype(np.float32) - bool(re.search(r"\.ln_[12f]\.weight", name))

    for variable, array in pairs(model, weight):
        assert variable.shape == array.shape
        variable[...] = jnp.asarray(array)
        size += array.size
    assert size == sum(x.size for x in jax.tree.leaves(model))
    return arrays, model


def assert_logits(hidden, model, expected):
    logits = np.asarray(hidden) @ np.asarray(model.head_weight())
    # Two fp32 implementations that sum in different orders.
    np.testing.assert_allclose(logits, expected, atol=5e-6 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("name", tiered(QUICK, MODELS, slow=MODELS.keys() - {*QUICK, "kimi2"}))
def test_logits_equal_those_of_a_public_implementation(name):
    with mesh_of(tiny_run()):
        arrays, model = loaded(name, jax.random.key(0))
        hidden = last_hidden(model, jnp.asarray(arrays["tokens"]), Execution(), FP32)
        assert_logits(model.norm(hidden), model, arrays["logits"])


@pytest.mark.slow
def test_multi_token_prediction_equals_that_of_a_public_implementation():
    """Logits of the tokens after the next ones; the last position has none."""
    with mesh_of(tiny_run()):
        arrays, model = loaded("deepseek3", jax.random.key(0))
        tokens = jnp.asarray(arrays["tokens"])
        hidden = last_hidden(model, tokens, Execution(), FP32)
        embedded = model.embedding.table[...][tokens[:, 1:]]
        x = model.prediction(embedded, model.norm(hidden)[:, :-1])
        ctx = make_context(model.cfg, x.shape[1], Execution(), FP32)
        segment = prediction_segment(model.cfg, Execution(), Precision())
        x, _ = model.run_segment(segment, x, ctx, (), LayerLoop())
        assert_logits(model.prediction.norm(x), model, arrays["mtp/logits"])


@pytest.mark.parametrize("name", tiered(["qwen3"], MODELS, slow=["gpt2"]))
def test_gradients_equal_those_of_a_public_implementation(name):
    """Of embedding, head, and all weights of a layer of each kind."""
    pairs, _ = MODELS[name]
    with mesh_of(tiny_run()):
        arrays, model = loaded(name, jax.random.key(0))
        tokens = jnp.asarray(arrays["tokens"])
        batch = Sequences(tokens, jnp.roll(tokens, -1, axis=1))
        grads = jax.jit(jax.grad(lambda m: m.loss(batch, Execution(), FP32)[0]))(model)
    read = set()

    def gradient(weight):
        name = f"gradient/{weight}"
        if name not in arrays:
            return np.full(arrays[weight].shape, np.nan)
        read.add(name)
        return arrays[name].astype(np.float64)

    for variable, expected in pairs(grads, gradient):
        kept = ~np.isnan(expected)
        if not kept.any():
            continue
        # Sums over 96 tokens in other orders: at most 35 roundings of the largest entry were seen,
        # and 70 for decay rates of Mamba-2, sums of terms of both signs.
        tolerance = 150 * np.finfo(np.float32).eps * np.abs(expected[kept]).max()
        error = np.abs(np.asarray(variable[...]) - expected)[kept]
        assert error.max() <= tolerance, (variable.shape, error.max(), tolerance)
    assert read == {name for name in arrays if name.startswith("gradient/")}
