"""Layers against independent references, initial values, and segments of layers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import mesh_of, tiny_run

from jaxbench.models import attention, layers, mlp
from jaxbench.models.decoder import Segment, segments
from jaxbench.ops.remat import Policy
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.mixers import MlpConfig, Rope, RopeScaling
from jaxbench.recipe.settings import Execution, Precision

EPS32 = np.finfo(np.float32).eps


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
    cfg = replace(MODELS["llama31_405b"].attention, rope=Rope(base=500_000.0, scaling=scaling))
    length, half = 300, 64
    frequency = np.array([cfg.rope.base ** (-2 * i / 128) for i in range(half)])
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


def test_initial_values_follow_megatron():
    cfg = replace(MODELS["llama31_8b"], layers=4, embed=256, vocabulary=512)
    unit = (
        attention.Attention(cfg, cfg.attention, key=jax.random.key(0)),
        mlp.GatedMlp(cfg, MlpConfig(ffn=512), key=jax.random.key(1)),
    )
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
    cfg = replace(MODELS["llama2_70b"], layers=2, embed=256, vocabulary=512)
    mixer, gated = (
        attention.Attention(cfg, cfg.attention, key=jax.random.key(0)),
        mlp.GatedMlp(cfg, MlpConfig(ffn=512), key=jax.random.key(1)),
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


BOTH = frozenset({0, 1})
"""The mixers of a transformer's layer, by position."""


def test_segments_of_one_remat_policy():
    cfg = replace(MODELS["llama31_8b"], layers=5)
    assert segments(cfg, Execution(remat="query,attention:2,residual:3"), Precision()) == [
        Segment(0, slice(0, 2), Policy(frozenset({"query", "attention", "residual"}))),
        Segment(0, slice(2, 3), Policy(frozenset({"query", "residual"}))),
        Segment(0, slice(3, 5), Policy(frozenset({"query"}))),
    ]
    for remat, kept in (("none", None), ("full", frozenset())):
        assert segments(cfg, Execution(remat=remat), Precision()) == [
            Segment(0, slice(0, 5), Policy(kept))
        ]


def test_segments_of_one_precision():
    cfg = replace(MODELS["llama31_8b"], layers=5)
    precision = Precision(last_bf16_layers=1)
    assert segments(cfg, Execution(remat="query:3"), precision) == [
        Segment(0, slice(0, 3), Policy(frozenset({"query"}))),
        Segment(0, slice(3, 4), Policy(frozenset())),
        Segment(0, slice(4, 5), Policy(frozenset()), BOTH),
    ]
    everything = Precision(last_bf16_layers=9)
    in_bf16 = segments(cfg, Execution(remat="none"), everything)
    assert all(segment.bf16 == BOTH for segment in in_bf16)


def test_segments_of_blocks_of_several_layers():
    """A layer is one mixer here: of two blocks only a part stays in bf16."""
    cfg = MODELS["nemotronh_56b"]
    precision = Precision(last_bf16_layers=3)
    assert segments(cfg, Execution(remat="up:43,mamba:114"), precision) == [
        Segment(0, slice(0, 3), Policy(frozenset({"mamba", "up"}))),
        Segment(0, slice(3, 10), Policy(frozenset({"mamba"}))),
        Segment(1, slice(0, 2), Policy(frozenset({"mamba"}))),
        Segment(1, slice(2, 3), Policy(frozenset()), frozenset({1})),
        Segment(1, slice(3, 4), Policy(frozenset()), BOTH),
    ]
