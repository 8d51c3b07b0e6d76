"""Initial values of layers, and segments of layers."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny import mesh_of, tiny_run

from jaxbench.models import attention, layers, mlp
from jaxbench.models.decoder import Segment, segments
from jaxbench.ops.remat import Policy
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.mixers import MlpConfig
from jaxbench.recipe.settings import Execution, Precision

EPS32 = np.finfo(np.float32).eps


@pytest.fixture(autouse=True)
def _one_device():
    with mesh_of(tiny_run()):
        yield


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
