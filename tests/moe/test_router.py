"""Routers and their biases against an independent one of plain numpy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts import tiny_grok
from tiny import mesh_of

from jaxbench import mesh
from jaxbench.models.layers import LoadBias
from jaxbench.ops.moe import routing
from jaxbench.recipe.mixers import ExpertsConfig
from jaxbench.train.optimizer import balance

RNG = np.random.default_rng(0)
SIGMOID = {"router": "sigmoid", "bias_rate": 1e-3, "gate_scale": 2.5}
ROUTERS = {
    "softmax over the chosen": {},
    "sigmoid": {"router": "sigmoid", "gate_scale": 2.5},
    "sigmoid, bias": SIGMOID,
    "sigmoid, bias, groups": {**SIGMOID, "groups": 4, "top_groups": 2},
}


def by_hand(logits, bias, cfg):
    """(gates over all experts, loads, balance loss) of tokens, one by one."""
    exponential = np.exp(logits - logits.max(-1, keepdims=True))
    softmax = exponential / exponential.sum(-1, keepdims=True)
    sigmoid = 1 / (1 + np.exp(-logits))
    gates, counted = np.zeros_like(logits), np.zeros(cfg.count)
    for t in range(len(logits)):
        score = sigmoid[t] + bias if cfg.router == "sigmoid" else logits[t]
        groups = np.split(np.arange(cfg.count), cfg.groups)
        best = cfg.top_k // cfg.top_groups
        ranked = sorted(groups, key=lambda g: -np.sort(score[g])[::-1][:best].sum())
        allowed = np.concatenate(ranked[: cfg.top_groups])
        chosen = sorted(allowed, key=lambda e: -score[e])[: cfg.top_k]
        if cfg.router == "topk_softmax":
            gates[t, chosen] = exponential[t, chosen] / exponential[t, chosen].sum()
        else:
            gates[t, chosen] = sigmoid[t, chosen] / (sigmoid[t, chosen].sum() + 1e-20)
        counted[np.argsort(-logits[t])[: cfg.top_k]] += 1
    probability = softmax
    if cfg.router == "sigmoid":
        probability = sigmoid / sigmoid.sum(-1, keepdims=True)
    balance_loss = cfg.count * np.sum(counted / counted.sum() * probability.mean(0))
    return gates * cfg.gate_scale, np.count_nonzero(gates, axis=0), balance_loss


def chosen(logits, bias, cfg):
    """The same by `routing`; loads by the gradient of the bias."""

    def gates_of(bias):
        gates, experts = routing.choose(logits, cfg, bias)
        losses, load = routing.balance_loss(logits, experts, cfg)
        hot = experts[..., None] == jnp.arange(cfg.count)
        return jnp.sum(jnp.where(hot, gates[..., None], 0), axis=2), (losses, load)

    if bias is None:
        gates, (losses, load) = gates_of(None)
        return gates, jnp.sum(load, axis=0), losses
    gates, transpose, (losses, load) = jax.vjp(gates_of, bias, has_aux=True)
    (counted,) = transpose(jnp.ones_like(gates))
    np.testing.assert_array_equal(counted, jnp.sum(load, axis=0))
    return gates, counted, losses


@pytest.mark.parametrize("name", ROUTERS)
def test_router(name):
    cfg = ExpertsConfig(count=16, top_k=4, ffn=8, **ROUTERS[name])
    logits = RNG.normal(size=(2, 32, 16))
    bias = RNG.normal(size=16) * 0.1 if cfg.bias_rate else None
    expected = [by_hand(x, 0.0 if bias is None else bias, cfg) for x in logits]
    with mesh_of(tiny_grok()):
        gates, load, losses = chosen(
            jnp.asarray(logits, jnp.float32),
            None if bias is None else jnp.asarray(bias, jnp.float32),
            cfg,
        )
    np.testing.assert_allclose(gates, [e[0] for e in expected], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(load, sum(e[1] for e in expected))
    np.testing.assert_allclose(losses, [e[2] for e in expected], rtol=1e-5)


@pytest.mark.parametrize("router", ["topk_softmax", "sigmoid"])
def test_balance_loss_of_a_microbatch(router):
    """Of all sequences that a rank computes at once, with its gradient; with one each it is that of
    the sequence."""
    cfg = ExpertsConfig(count=16, top_k=4, ffn=8, router=router, balance="microbatch")
    logits = RNG.normal(size=(4, 32, 16)) + np.linspace(-1, 1, 4 * 16).reshape(4, 1, 16)

    def losses(logits, cfg=cfg):
        return routing.balance_loss(logits, routing.choose(logits, cfg)[1], cfg)[0]

    for devices, groups in ((1, logits.reshape(1, -1, 16)), (2, logits.reshape(2, -1, 16))):
        with mesh_of(tiny_grok(devices=devices)):
            spec = mesh.spec("batch shard_seq assignment", mesh.ACTIVATION)
            placed = jax.device_put(jnp.asarray(logits, jnp.float32), spec)
            grad = jax.jit(jax.grad(lambda logits: jnp.mean(losses(logits))))(placed)
            actual = np.asarray(jax.jit(losses)(placed))
        expected = [by_hand(x, 0.0, cfg)[2] for x in groups]
        np.testing.assert_allclose(actual, np.repeat(expected, 4 // devices), rtol=1e-5)
        # Along a direction in which no token changes its experts.
        direction, ends = RNG.normal(size=logits.shape), []
        for step in (1e-7, -1e-7):
            moved = (logits + step * direction).reshape(groups.shape)
            ends.append(np.mean([by_hand(x, 0.0, cfg)[2] for x in moved]))
        along = np.sum(np.asarray(grad, np.float64) * direction)
        # fp32 rounding of 2048 terms; the differences lose half of float64's digits.
        scale = np.abs(np.asarray(grad) * direction).sum()
        assert along == pytest.approx((ends[0] - ends[1]) / 2e-7, abs=1e-5 * scale)
    with mesh_of(tiny_grok()):
        each = losses(jnp.asarray(logits, jnp.float32), replace(cfg, balance="sequence"))
        one = [losses(jnp.asarray(x[None], jnp.float32))[0] for x in logits]
    np.testing.assert_allclose(one, each, rtol=1e-6)


def test_biases_after_20_steps_are_those_of_numpy():
    """From loads that are far from equal: each step moves a bias by the rate, or not at all where
    the load is the mean."""
    cfg = ExpertsConfig(count=16, top_k=4, ffn=8, **SIGMOID)
    skew = np.linspace(-0.5, 0.5, 16)
    ours, bias = LoadBias(jnp.zeros(16)), np.zeros(16)
    spread = []
    with mesh_of(tiny_grok()):
        for _ in range(20):
            logits = (RNG.normal(size=(2, 64, 16)) + skew).astype(np.float32)
            _, load, _ = chosen(jnp.asarray(logits), ours[...], cfg)
            ours = balance(ours, LoadBias(load), cfg.bias_rate)
            load = sum(by_hand(x.astype(np.float64), bias, cfg)[1] for x in logits)
            bias += cfg.bias_rate * np.sign(load.mean() - load)
            spread.append(load.std())
            np.testing.assert_allclose(ours[...], bias, atol=1e-7)
    assert np.abs(bias).max() > 0.015
    assert np.mean(spread[-5:]) < np.mean(spread[:5])
