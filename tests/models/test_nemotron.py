"""Nemotron-4 and Nemotron-H: their layers, the cut of the stack, meshes, and public logits."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import MESHES, assert_same, loss_and_gradients, new_state
from tiny import mesh_of, tiny_run, to_numpy

from jaxbench.errors import RecipeError
from jaxbench.models import layers
from jaxbench.models.decoder import Decoder, cut, repeating_units
from jaxbench.models.mamba2 import Mamba2
from jaxbench.models.mlp import SquaredReluMlp
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.model import Mamba, ModelConfig
from jaxbench.recipe.settings import Execution, Precision
from jaxbench.ssd import xla
from jaxbench.train.optimizer import make_optimizer

EPS32 = np.finfo(np.float32).eps
REFERENCE = Path(__file__).parents[1] / "fixtures" / "nemotron_reference.npz"
FAMILIES = ("nemotron4_340b_bf16", "nemotronh_56b_bf16")
DIMS = {
    "family": "test", "size": "tiny", "embed": 32, "ffn": 48, "heads": 4, "kv_heads": 2,
    "head_dim": 16, "vocabulary": 64, "activation": "relu2", "init_std": 0.02,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    monkeypatch.setattr(xla, "SSD_CHUNK", 4)


@pytest.fixture(scope="module")
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "SSD_CHUNK", 4)
        return {family: loss_and_gradients(tiny_run(family=family)) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name",
    ["fsdp 8", "tensor 4 x data 2", "context 4 x data 2", "fsdp 2 x context 2 x tensor 2"],
)
def test_mesh_changes_neither_loss_nor_gradients(name, family, one_device):
    run = tiny_run(*MESHES[name], devices=8, family=family)
    # As for Llama; a gradient of the decay rates sums terms of both signs over 256 tokens.
    assert_same(loss_and_gradients(run), one_device[family], roundings=300)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("remat", ["none", "full"])
def test_remat_changes_neither_loss_nor_gradients(remat, family, one_device):
    run = tiny_run(f"execution.remat={remat}", family=family)
    assert_same(loss_and_gradients(run), one_device[family], roundings=200)


def test_one_chunk_or_many_give_the_same_gradients(one_device, monkeypatch):
    monkeypatch.setattr(xla, "SSD_CHUNK", 128)
    family = "nemotronh_56b_bf16"
    assert_same(loss_and_gradients(tiny_run(family=family)), one_device[family], roundings=300)


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
    cfg, length = MODELS["nemotron4_340b"], 50
    x = np.random.default_rng(0).normal(size=(1, length, 2, 192))
    turned = (x[..., :48] + 1j * x[..., 48:96]) * np.exp(
        1j * np.arange(length)[:, None] * 10000.0 ** (-2 * np.arange(48) / 96)
    )[:, None]
    expected = np.concatenate([turned.real, turned.imag, x[..., 96:]], -1)
    with mesh_of(tiny_run()):
        tables = layers.rotary_tables(cfg, length)
        actual = layers.rotate(jnp.asarray(x, jnp.float32), tables)
        assert layers.rotary_tables(MODELS["nemotronh_56b"], length) is None
    np.testing.assert_allclose(actual, expected, atol=2 * length * EPS32 * np.abs(x).max())


def test_squared_relu():
    cfg = replace(tiny_run(family="nemotron4_340b_bf16").model, embed=32, ffn=48)
    x = np.random.default_rng(0).normal(size=(2, 5, 32))
    with mesh_of(tiny_run()):
        mlp = SquaredReluMlp(cfg, key=jax.random.key(0))
        out, _ = mlp(jnp.asarray(x, jnp.float32), layers.Pass(None, "xla"))
    up, down = (np.asarray(w[...], np.float64) for w in (mlp.up, mlp.down))
    expected = np.maximum(x @ up, 0) ** 2 @ down.T
    np.testing.assert_allclose(out, expected, atol=100 * EPS32 * np.abs(expected).max(), rtol=0)


def test_the_stack_is_cut_into_few_letters():
    hybrid = MODELS["nemotronh_56b"].letters
    assert len(hybrid) == 118
    assert [hybrid.count(letter) for letter in "M-*"] == [54, 54, 10]
    assert hybrid == "M-M-M-M" + 10 * "*-M-M-M-M-M" + "-"
    assert repeating_units(MODELS["nemotronh_56b"]) == [("M-M-M-M*-M-", 10), ("M-", 4)]
    assert repeating_units(MODELS["nemotron4_340b"]) == [("*-", 96)]
    assert repeating_units(MODELS["llama31_405b"]) == [("*-", 126)]
    assert cut("M-M-M-M*") == [("M-", 3), ("M*", 1)]
    assert cut("-") == [("-", 1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pattern": "M-X"}, "model.pattern: 'X' is none of the letters * - E M"),
        ({"mamba": None}, "model.pattern with M needs model.mamba"),
        ({"layers": 119}, "at least model.layers = 119 letters; it has 118"),
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
        MODELS["nemotronh_56b"], embed=128, mamba=Mamba(heads=128, head_dim=8, state=16, groups=4)
    )
    with mesh_of(tiny_run()):
        mixer = Mamba2(cfg, key=jax.random.key(0))
        mlp = SquaredReluMlp(replace(cfg, ffn=512), key=jax.random.key(1))
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
    run = tiny_run("optimizer.learning_rate=0.1", "optimizer.warmup=0", family=FAMILIES[1])
    optimizer = make_optimizer(run.optimizer, run.steps)

    def updates_without_gradients():
        model = new_state(run).model
        still = jax.tree.map(jnp.zeros_like, model)
        return optimizer.update(still, optimizer.init(model), model)[0]

    with mesh_of(run):
        updates = jax.jit(updates_without_gradients)()
    moved = {name.split(".")[-2] for name, u in to_numpy(updates).items() if np.any(u)}
    assert moved == {"table", "head", "qkv", "out", "up", "down", "in_proj", "taps"}


def load_nemotron4(model, arrays):
    """(variable, array) pairs of Hugging Face's Nemotron."""
    attention, mlp = model.units[0].layers

    def stack(name, convert=np.transpose):
        found = [arrays[f"nemotron4/model.layers.{i}.{name}"] for i in range(model.cfg.layers)]
        return np.stack([convert(w.astype(np.float32)) for w in found])

    qkv = [stack(f"self_attn.{c}_proj.weight").reshape(2, 32, 2, -1, 16) for c in "qkv"]
    out = stack("self_attn.o_proj.weight").transpose(0, 2, 1)
    yield model.embedding.table, arrays["nemotron4/model.embed_tokens.weight"]
    yield model.head, arrays["nemotron4/lm_head.weight"].T
    yield attention.mixer.qkv, np.concatenate(qkv, axis=3)
    yield attention.mixer.out, out.reshape(2, 32, 4, 16)
    yield mlp.mixer.up, stack("mlp.up_proj.weight")
    yield mlp.mixer.down, stack("mlp.down_proj.weight", np.asarray)
    for norm, name in ((attention.norm, "input"), (mlp.norm, "post_attention")):
        yield norm.gain, stack(f"{name}_layernorm.weight", np.asarray)
        yield norm.bias, stack(f"{name}_layernorm.bias", np.asarray)
    yield model.norm.gain, arrays["nemotron4/model.norm.weight"]
    yield model.norm.bias, arrays["nemotron4/model.norm.bias"]


def mamba_weights(get, m: Mamba):
    """A mixer of Hugging Face in this layout: columns z, x, b, c, dt, ordered by group."""
    inner, state = m.inner * m.groups, m.state * m.groups

    def by_group(w, *sizes):
        parts = np.split(w, np.cumsum(sizes)[:-1], axis=0)
        return np.concatenate([p.reshape(m.groups, -1, *w.shape[1:]) for p in parts], axis=1)

    projection = by_group(get("in_proj.weight"), inner, inner, state, state, m.heads)
    taps = by_group(get("conv1d.weight")[:, 0], inner, state, state)
    return {
        "in_proj": projection.transpose(2, 0, 1),
        "out": get("out_proj.weight").reshape(-1, m.groups, m.inner),
        "groups.taps": taps.transpose(0, 2, 1),
        "groups.bias": by_group(get("conv1d.bias"), inner, state, state),
        "groups.dt_bias": get("dt_bias").reshape(m.groups, -1),
        "groups.a_log": get("A_log").reshape(m.groups, -1),
        "groups.d": get("D").reshape(m.groups, -1),
        "groups.gain": get("norm.weight").reshape(m.groups, -1),
    }


def load_nemotronh(model, arrays):
    """(variable, array) pairs of Hugging Face's Nemotron-H."""
    cfg, index = model.cfg, 0
    yield model.embedding.table, arrays["nemotronh/model.embeddings.weight"]
    yield model.head, arrays["nemotronh/lm_head.weight"].T
    yield model.norm.gain, arrays["nemotronh/model.norm_f.weight"]
    for stack, (letters, times) in zip(model.units, repeating_units(cfg), strict=True):
        for position, letter in enumerate(letters):
            layer, found = stack.layers[position], []
            for repeat in range(times):
                number = index + repeat * len(letters) + position

                def get(name, where=f"nemotronh/model.layers.{number}."):
                    return arrays[f"{where}mixer.{name}"].astype(np.float32)

                if letter == "M":
                    weights = mamba_weights(get, cfg.mamba)
                elif letter == "*":
                    parts = [get(f"{c}_proj.weight").T.reshape(32, 2, -1, 16) for c in "qkv"]
                    out = get("o_proj.weight").reshape(32, 4, 16)
                    weights = {"qkv": np.concatenate(parts, axis=2), "out": out}
                else:
                    weights = {"up": get("up_proj.weight").T, "down": get("down_proj.weight")}
                found.append(weights | {
                    "norm": arrays[f"nemotronh/model.layers.{number}.norm.weight"]
                })  # fmt: skip
            for name in found[0]:
                variable = layer.norm.gain if name == "norm" else layer.mixer
                for attribute in name.split(".") if name != "norm" else ():
                    variable = getattr(variable, attribute)
                yield variable, np.stack([weights[name] for weights in found])
        index += times * len(letters)


@pytest.mark.parametrize("family", ["nemotron4", "nemotronh"])
def test_logits_equal_those_of_a_public_implementation(family):
    """Hugging Face's models with random weights; fixtures/nemotron_reference.py makes the file."""
    arrays = np.load(REFERENCE)
    if family == "nemotron4":
        cfg = ModelConfig(**DIMS, layers=2, rope_base=10000.0, rope_fraction=0.5, norm="layer1p")
    else:
        mamba = Mamba(heads=8, head_dim=8, state=16, groups=2)
        cfg = ModelConfig(**DIMS, layers=12, rope_base=None, mamba=mamba, pattern="M-M*-M-M*-M-")
    load = {"nemotron4": load_nemotron4, "nemotronh": load_nemotronh}[family]
    with mesh_of(tiny_run()):
        model = Decoder(cfg, key=jax.random.key(0))
        loaded = 0
        for variable, array in load(model, arrays):
            assert variable.shape == array.shape
            variable[...] = jnp.asarray(array, jnp.float32)
            loaded += array.size
        assert loaded == sum(x.size for x in jax.tree.leaves(model))
        hidden, *_ = model.hidden(jnp.asarray(arrays["tokens"]), Execution(), Precision())
        hidden = model.norm(hidden)
    logits = np.asarray(hidden) @ np.asarray(model.head[...])
    # Two fp32 implementations that sum in different orders.
    tolerance = 5e-6 * np.abs(arrays[f"{family}/logits"]).max()
    np.testing.assert_allclose(logits, arrays[f"{family}/logits"], atol=tolerance, rtol=0)
