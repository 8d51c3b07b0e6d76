"""Grok-1, the whole model against numpy, with a head of its own and with a tied one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import attention_reference
from experts import reference, softmax, tiny_grok
from tiny import mesh_of

from jaxbench import mesh
from jaxbench.models.context import Sequences
from jaxbench.models.decoder import Decoder
from jaxbench.recipe import recipes
from jaxbench.train.step import compute_weights

EPS32 = np.finfo(np.float32).eps
TENSOR = ("parallelism.fsdp=2", "parallelism.expert=2", "parallelism.tensor=2")


def norm(x, gain):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gain


def rotate(x, base):
    """Pairs (i, i + H/2) as complex numbers, turned by position x frequency."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None, None] * base ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


def logits_reference(model, tokens, cfg):
    """Logits of the decoder in float64."""
    table = np.asarray(model.embedding.table[...], np.float64)
    attention, experts = model.stacks[0].layers
    x, heads = table[tokens], cfg.attention
    for i in range(cfg.layers):

        def w(variable, i=i):
            return np.asarray(variable[...], np.float64)[i]

        y = norm(x, w(attention.norm.gain))
        qkv = np.einsum("bsd,dkgh->bskgh", y, w(attention.mixer.qkv))
        query = qkv[..., :-2, :].reshape(*y.shape[:2], heads.heads, heads.head_dim)
        query, key = rotate(query, heads.rope.base), rotate(qkv[..., -2, :], heads.rope.base)
        y = attention_reference(query, key, qkv[..., -1, :])
        x = x + np.einsum("bsnh,dnh->bsd", y, w(attention.mixer.out))
        y = norm(x, w(experts.norm.gain))
        mixer = experts.mixer
        x = x + reference(y, w(mixer.router), w(mixer.gate_up), w(mixer.down), cfg.experts)[0]
    head = table.T if cfg.tied else np.asarray(model.head[...], np.float64)
    return norm(x, np.asarray(model.norm.gain[...], np.float64)) @ head


@pytest.mark.parametrize(
    "overrides",
    [(), ("model.tied=true",), pytest.param(TENSOR, marks=pytest.mark.slow)],
    ids=["one device", "tied", "fsdp x expert x tensor"],
)
def test_loss_against_numpy(overrides):
    run = tiny_grok(*overrides, devices=8 if overrides == TENSOR else 1)
    tokens, targets = np.random.default_rng(0).integers(0, 64, size=(2, 8, 32), dtype=np.int32)
    with mesh_of(run):
        model = jax.jit(lambda: different_gains(run))()
        spec = mesh.spec("batch seq", mesh.ACTIVATION)
        placed = [jax.device_put(x, spec) for x in (tokens, targets)]
        loss = jax.jit(
            lambda model, *batch: compute_weights(model, jnp.float32).loss(
                Sequences(*batch), execution=run.execution, precision=run.precision
            )[0]
        )(model, *placed)
    shares = softmax(logits_reference(model, tokens, run.model))
    expected = -np.log(np.take_along_axis(shares, targets[..., None], -1)).mean()
    # Two layers of fp32 sums over 64 numbers; the loss is a mean over 256 tokens.
    assert abs(float(loss) - expected) < 50 * EPS32 * expected


def different_gains(run):
    """The initial model with norm gains that differ from 1 and from each other."""
    model = Decoder(run.model, key=jax.random.key(0))
    norms = [layer.norm for layer in model.stacks[0].layers]
    for n, layer_norm in enumerate([*norms, model.norm]):
        gain = layer_norm.gain[...]
        layer_norm.gain[...] = gain + 0.3 * jnp.cos(n + jnp.arange(gain.shape[-1]))
    return model


def test_the_published_ranks_have_the_published_capacity():
    run = recipes.resolve(recipes.load("grok1_314b_bf16"), 512)
    # The published ranks hold 1024 tokens: 256 slots for each expert.
    assert run.model.experts.capacity(1024) == 256
