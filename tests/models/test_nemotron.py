"""Nemotron-4 and Nemotron-H: their layers, the cut of the stack, initial values."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import new_state
from tiny import mesh_of, tiny_run, to_numpy

from jaxbench.base.errors import RecipeError
from jaxbench.models import layers
from jaxbench.models.context import Context
from jaxbench.models.mamba2 import Mamba2
from jaxbench.models.mlp import UngatedMlp
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.mixers import MambaConfig, MlpConfig
from jaxbench.recipe.model import cut, repeating_blocks
from jaxbench.train.optimizer import make_optimizer

EPS32 = np.finfo(np.float32).eps


def test_layer_norm_1p():
    rng = np.random.default_rng(0)
    x, gain, bias = rng.normal(size=(2, 5, 64)) * 3 + 1, rng.normal(size=64), rng.normal(size=64)
    with mesh_of(tiny_run()):
        norm = layers.LayerNorm1P(tiny_run().model)
        assert not np.any(norm.gain[...])
        assert not np.any(norm.bias[...])
        norm.gain[...] = jnp.asarray(gain, jnp.float32)
        norm.bias[...] = jnp.asarray(bias, jnp.float32)
        out = norm(jnp.asarray(x, jnp.float32))
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * (1 + gain) + bias
    np.testing.assert_allclose(out, expected, atol=20 * EPS32 * np.abs(expected).max(), rtol=0)


def test_rotary_embedding_of_half_the_features():
    cfg, length = MODELS["nemotron4_340b"].attention, 50
    x = np.random.default_rng(0).normal(size=(1, length, 2, 192))
    turned = (x[..., :48] + 1j * x[..., 48:96]) * np.exp(
        1j * np.arange(length)[:, None] * 10000.0 ** (-2 * np.arange(48) / 96)
    )[:, None]
    expected = np.concatenate([turned.real, turned.imag, x[..., 96:]], -1)
    with mesh_of(tiny_run()):
        tables = layers.rotary_tables(cfg, length)
        actual = layers.rotate(jnp.asarray(x, jnp.float32), tables)
        assert layers.rotary_tables(MODELS["nemotronh_56b"].attention, length) is None
    np.testing.assert_allclose(actual, expected, atol=2 * length * EPS32 * np.abs(x).max())


def test_squared_relu():
    cfg = replace(tiny_run(family="nemotron4_340b_bf16").model, embed=32)
    x = np.random.default_rng(0).normal(size=(2, 5, 32))
    with mesh_of(tiny_run()):
        mlp = UngatedMlp(cfg, MlpConfig(ffn=48, activation="relu2"), key=jax.random.key(0))
        out, _ = mlp(jnp.asarray(x, jnp.float32), Context())
    up, down = (np.asarray(w[...], np.float64) for w in (mlp.up, mlp.down))
    expected = np.maximum(x @ up, 0) ** 2 @ down.T
    np.testing.assert_allclose(out, expected, atol=100 * EPS32 * np.abs(expected).max(), rtol=0)


def test_the_stack_is_cut_into_few_letters():
    hybrid = "".join(MODELS["nemotronh_56b"].layer_patterns)
    assert len(hybrid) == 118
    assert [hybrid.count(letter) for letter in "M-*"] == [54, 54, 10]
    assert hybrid == "M-M-M-M" + 10 * "*-M-M-M-M-M" + "-"
    assert repeating_blocks(MODELS["nemotronh_56b"]) == [("M-M-M-M*-M-", 10), ("M-", 4)]
    assert repeating_blocks(MODELS["nemotron4_340b"]) == [("*-", 96)]
    assert repeating_blocks(MODELS["llama31_405b"]) == [("*-", 126)]
    assert cut(tuple("M-M-M-M*")) == [("M-", 3), ("M*", 1)]
    assert cut(("*-", "*-", "*E")) == [("*-", 2), ("*E", 1)]
    assert cut(("-",)) == [("-", 1)]


def test_letters_of_attention_with_and_without_a_window():
    cfg = MODELS["gpt_oss_120b"]
    assert repeating_blocks(cfg) == [("WE*E", 18)]
    windows = [mixer.window for mixer in cfg.mixers[:4:2]]
    assert windows == [128, None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pattern": "M-X"}, "model.pattern: 'X' is none of the letters * W L - E M"),
        ({"mamba": None}, "model.pattern with M needs model.mamba"),
        ({"pattern": "MW-"}, "model.attention.window = None: expected a window with W"),
        (
            {"attention": replace(MODELS["nemotronh_56b"].attention, window=128)},
            "model.attention.window = 128: expected a window with W",
        ),
        ({"pattern": "M-"}, "model.attention needs * or W in model.pattern"),
    ],
)
def test_a_pattern_that_means_nothing_is_a_mistake(change, message):
    with pytest.raises(RecipeError) as error:
        replace(MODELS["nemotronh_56b"], **change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.mamba={heads: 6, head_dim: 8, state: 8, groups: 4}",), "must divide"),
        (("model.mamba={heads: 8, head_dim: 8, state: 8, groups: 1}", "parallelism.tensor=2"),
         "parallelism.tensor = 2 must divide model.mamba.groups = 1"),
        (("batch.sequence_length=258",), "the Mamba chunk = 256 must divide"),
    ],
)  # fmt: skip
def test_bad_mamba_settings(overrides, message):
    with pytest.raises(RecipeError, match=message):
        tiny_run(*overrides, devices=2, family="nemotronh_56b_bf16")


def test_initial_values_follow_megatron():
    cfg = replace(
        MODELS["nemotronh_56b"],
        embed=128,
        mamba=MambaConfig(heads=128, head_dim=8, state=16, groups=4),
    )
    with mesh_of(tiny_run()):
        mixer = Mamba2(cfg, cfg.mamba, key=jax.random.key(0))
        mlp = UngatedMlp(cfg, MlpConfig(ffn=512, activation="relu2"), key=jax.random.key(1))
    groups = mixer.groups
    dt, a = jax.nn.softplus(groups.dt_bias[...]), jnp.exp(groups.a_log[...])
    assert (dt.shape, a.shape) == ((4, 32), (4, 32))
    taps, bias = groups.taps[...], groups.bias[...]
    for sample, low, high in ((jnp.log(dt), np.log(1e-3), np.log(0.1)), (a, 1, 16),
                              (taps, -0.5, 0.5), (bias, -0.5, 0.5)):  # fmt: skip
        sample = np.asarray(sample)
        assert low - 1e-3 < sample.min() < low + 0.1 * (high - low)
        assert high - 0.1 * (high - low) < sample.max() < high + 1e-3
        assert abs(sample.mean() - (low + high) / 2) < 2 * (high - low) / np.sqrt(sample.size)
    assert np.all(np.asarray(groups.d[...]) == 1)
    assert np.all(np.asarray(groups.gain[...]) == 1)
    residual = 0.02 / np.sqrt(118)
    for weight, std in ((mixer.in_proj, 0.02), (mixer.out, residual),
                        (mlp.up, 0.02), (mlp.down, residual)):  # fmt: skip
        sample = np.asarray(weight[...])
        assert abs(sample.std() / std - 1) < 5 / np.sqrt(2 * sample.size)


def test_only_matrices_and_taps_decay():
    run = tiny_run("optimizer.learning_rate=0.1", "optimizer.warmup=0", family="nemotronh_56b_bf16")
    optimizer = make_optimizer(run.optimizer, run.steps)

    def updates_without_gradients():
        model = new_state(run).model
        still = jax.tree.map(jnp.zeros_like, model)
        return optimizer.update(still, optimizer.init(model), model)[0]

    with mesh_of(run):
        updates = jax.jit(updates_without_gradients)()
    moved = {name.split(".")[-2] for name, u in to_numpy(updates).items() if np.any(u)}
    assert moved == {"table", "head", "qkv", "out", "up", "down", "in_proj", "taps"}
