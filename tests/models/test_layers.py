"""Layers and the whole decoder against independent references."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import mesh_of, tiny_run

from jaxbench.models import attention, layers, mlp
from jaxbench.models.decoder import Decoder, Stretch, stretches
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.model import ModelConfig, RopeScaling
from jaxbench.recipe.settings import Execution, Precision

EPS32 = np.finfo(np.float32).eps
REFERENCE = Path(__file__).parents[1] / "fixtures" / "llama_reference.npz"


@pytest.fixture(autouse=True)
def _one_device():
    with mesh_of(tiny_run()):
        yield


def test_rms_norm():
    cfg = tiny_run().model
    norm = layers.RMSNorm(cfg)
    rng = np.random.default_rng(0)
    x, gain = rng.normal(size=(2, 5, 64)) * 3, rng.normal(size=64)
    norm.gain = norm.gain.replace(jnp.asarray(gain, jnp.float32))
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gain
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "scaling", [None, RopeScaling(factor=8.0, low=1.0, high=4.0, original_context=8192)]
)
def test_rotary_embedding_turns_complex_pairs(scaling):
    cfg = replace(MODELS["llama31_405b"], rope_scaling=scaling)
    length, half = 300, 64
    frequency = np.array([cfg.rope_base ** (-2 * i / 128) for i in range(half)])
    if scaling:
        bands = []
        for f in frequency:
            wavelength = 2 * np.pi / f
            if wavelength < 8192 / 4:
                bands.append(f)
            elif wavelength > 8192 / 1:
                bands.append(f / 8)
            else:
                u = (8192 / wavelength - 1) / 3
                bands.append((1 - u) * f / 8 + u * f)
        kept, divided = np.sum(np.equal(bands, frequency)), np.sum(np.isclose(bands, frequency / 8))
        assert (kept, divided) == (29, 29)
        frequency = np.array(bands)
    x = np.random.default_rng(0).normal(size=(1, length, 2, 128))
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(
        1j * np.arange(length)[:, None] * frequency
    )[:, None]
    expected = np.concatenate([turned.real, turned.imag], -1)
    actual = layers.rotate(jnp.asarray(x, jnp.float32), layers.rotary_tables(cfg, length))
    # An angle of 300 radians in fp32 is off by up to 300 eps.
    np.testing.assert_allclose(actual, expected, atol=2 * length * EPS32 * np.abs(x).max())


def load_reference(cfg: ModelConfig, weights) -> Decoder:
    """The decoder with the public model's weights in this project's layout."""
    model = Decoder(cfg, key=jax.random.key(0))
    n, k, h = cfg.heads, cfg.kv_heads, cfg.head_dim

    def stack(name, convert=np.transpose):
        found = [weights[f"model.layers.{i}.{name}.weight"] for i in range(cfg.layers)]
        return np.stack([convert(w.astype(np.float32)) for w in found])

    q, key, value = (
        stack(f"self_attn.{c}_proj").reshape(cfg.layers, cfg.embed, k, -1, h) for c in "qkv"
    )
    attention, mlp = model.units[0].layers
    new = [
        (model.embedding.table, weights["model.embed_tokens.weight"]),
        (model.norm.gain, weights["model.norm.weight"]),
        (model.head, weights["lm_head.weight"].T),
        (attention.norm.gain, stack("input_layernorm", np.asarray)),
        (attention.mixer.qkv, np.concatenate([q, key, value], axis=3)),
        (attention.mixer.out, stack("self_attn.o_proj", lambda w: w.reshape(-1, n, h))),
        (mlp.norm.gain, stack("post_attention_layernorm", np.asarray)),
        (mlp.mixer.gate_up, np.stack([stack("mlp.gate_proj"), stack("mlp.up_proj")], axis=2)),
        (mlp.mixer.down, stack("mlp.down_proj", np.asarray)),
    ]
    for variable, array in new:
        assert variable.shape == array.shape
        variable[...] = jnp.asarray(array, jnp.float32)
    return model


@pytest.mark.parametrize("rope", ["plain", "scaled"])
def test_logits_equal_those_of_a_public_implementation(rope):
    """Hugging Face's Llama with random weights; fixtures/llama_reference.py makes the file."""
    arrays = np.load(REFERENCE)
    scaling = RopeScaling(factor=8.0, low=1.0, high=4.0, original_context=32)
    cfg = ModelConfig(
        family="test", size="tiny", layers=2, embed=32, ffn=48, heads=4, kv_heads=2, head_dim=16,
        vocabulary=64, rope_base=10000.0 if rope == "plain" else 500000.0,
        rope_scaling=scaling if rope == "scaled" else None, init_std=0.02,
    )  # fmt: skip
    model = load_reference(cfg, arrays)
    hidden, *_ = model.hidden(jnp.asarray(arrays["tokens"]), Execution(), Precision())
    hidden = model.norm(hidden)
    logits = np.asarray(hidden) @ np.asarray(model.head[...])
    # Two fp32 implementations that sum in different orders; logits reach 4.4.
    np.testing.assert_allclose(logits, arrays[f"logits/{rope}"], atol=2e-5, rtol=0)


def test_initial_values_follow_megatron():
    cfg = replace(MODELS["llama31_8b"], layers=4, embed=256, ffn=512, vocabulary=512)
    unit = attention.Attention(cfg, key=jax.random.key(0)), mlp.GatedMlp(cfg, key=jax.random.key(1))
    residual = cfg.init_std / np.sqrt(2 * cfg.layers)
    for weight, std in (
        (unit[0].qkv, cfg.init_std), (unit[0].out, residual), (unit[1].gate_up, cfg.init_std),
        (unit[1].down, residual),
        (layers.Embedding(cfg, key=jax.random.key(2)).table, cfg.init_std),
    ):  # fmt: skip
        sample = np.asarray(weight[...])
        # The standard deviation of n normal draws has a relative error of 1/sqrt(2 n).
        assert abs(sample.std() / std - 1) < 5 / np.sqrt(2 * sample.size)
        assert abs(sample.mean()) < 5 * std / np.sqrt(sample.size)


def test_initial_values_follow_maxtext():
    cfg = replace(MODELS["llama2_70b"], layers=2, embed=256, ffn=512, vocabulary=512)
    mixer, gated = (
        attention.Attention(cfg, key=jax.random.key(0)),
        mlp.GatedMlp(cfg, key=jax.random.key(1)),
    )
    qkv = np.asarray(mixer.qkv[...])
    for sample, std, truncated in (
        (qkv[:, :, :-2], (256 * 128) ** -0.5, False), (qkv[:, :, -2:], 256**-0.5, False),
        (mixer.out[...], (64 * 128) ** -0.5, False), (gated.gate_up[...], 256**-0.5, True),
        (gated.down[...], 512**-0.5, True),
        (layers.Embedding(cfg, key=jax.random.key(2)).table[...], 256**-0.5, False),
    ):  # fmt: skip
        sample = np.asarray(sample)
        assert abs(sample.std() / std - 1) < 5 / np.sqrt(2 * sample.size)
        assert (np.abs(sample).max() < 2.3 * std) == truncated


def test_stretches_of_one_remat_policy():
    cfg = replace(MODELS["llama31_8b"], layers=5)
    assert stretches(cfg, Execution(remat="query,attention:2,residual:3"), Precision()) == [
        Stretch(0, slice(0, 2), frozenset({"query", "attention", "residual"}), False),
        Stretch(0, slice(2, 3), frozenset({"query", "residual"}), False),
        Stretch(0, slice(3, 5), frozenset({"query"}), False),
    ]
    for remat, kept in (("none", None), ("full", frozenset())):
        found = stretches(cfg, Execution(remat=remat), Precision())
        assert found == [Stretch(0, slice(0, 5), kept, False)]


def test_stretches_of_one_precision():
    cfg = replace(MODELS["llama31_8b"], layers=5)
    precision = Precision(first_bf16_layers=1, last_bf16_layers=1)
    assert stretches(cfg, Execution(remat="query:3"), precision) == [
        Stretch(0, slice(0, 1), frozenset({"query"}), True),
        Stretch(0, slice(1, 3), frozenset({"query"}), False),
        Stretch(0, slice(3, 4), frozenset(), False),
        Stretch(0, slice(4, 5), frozenset(), True),
    ]
    everything = Precision(first_bf16_layers=3, last_bf16_layers=9)
    found = stretches(cfg, Execution(remat="none"), everything)
    assert all(stretch.bf16 for stretch in found)


def test_stretches_of_units_of_several_layers():
    cfg = MODELS["nemotronh_56b"]
    precision = Precision(first_bf16_layers=2, last_bf16_layers=2)
    assert stretches(cfg, Execution(remat="up:43,mamba:114"), precision) == [
        Stretch(0, slice(0, 1), frozenset({"mamba", "up"}), True),
        Stretch(0, slice(1, 3), frozenset({"mamba", "up"}), False),
        Stretch(0, slice(3, 10), frozenset({"mamba"}), False),
        Stretch(1, slice(0, 2), frozenset({"mamba"}), False),
        Stretch(1, slice(2, 3), frozenset(), False),
        Stretch(1, slice(3, 4), frozenset(), True),
    ]
