"""Routing and dispatch against loops over tokens."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except
from experts import reference, tiny_grok
from steps import loss_and_gradients, new_state
from tiny import mesh_of, to_numpy

from jaxbench import mesh
from jaxbench.errors import RecipeError
from jaxbench.experts import routing
from jaxbench.models.decoder import Decoder
from jaxbench.models.experts import Experts
from jaxbench.models.layers import ForwardContext
from jaxbench.recipe import flops, published, recipes
from jaxbench.train.step import make_program
from jaxbench.xla.hlo import Program

EPS32 = np.finfo(np.float32).eps
RNG = np.random.default_rng(0)
SHARED = ForwardContext(rotary=None, kernel="xla")


CASES = {
    "published": (),
    "a larger capacity": ("model.experts.capacity_factor=1.5",),
    "dropless": ("model.experts.capacity_factor=null",),
    "the original's router": (
        "model.experts.router=softmax_topk",
        "model.experts.capacity_factor=null",
    ),
    "softmax first, with drops": ("model.experts.router=softmax_topk",),
}
ALL_AXES = ("parallelism.expert=2", "parallelism.context=2", "parallelism.tensor=2")


@pytest.mark.parametrize(
    "case",
    slow_except([*((case, 1) for case in CASES), ("published", 8)], product(CASES, (1, 8))),
    ids=lambda case: f"{case[0]}, {case[1]} devices",
)
def test_experts_against_a_loop_over_tokens(case):
    name, devices = case
    run = tiny_grok(*CASES[name], *(ALL_AXES if devices > 1 else ()), devices=devices)
    x = RNG.normal(size=(8, 32, 64))
    with mesh_of(run):
        layer = jax.jit(lambda: Experts(run.model, run.model.experts, key=jax.random.key(0)))()
        placed = jax.device_put(
            jnp.asarray(x, jnp.float32), mesh.spec("batch shard_seq embed", mesh.ACTIVATION)
        )
        out, ((losses, load, dropped),) = jax.jit(lambda layer, x: layer(x, SHARED))(layer, placed)
    weights = (layer.router, layer.gate_up, layer.down)
    expected = reference(x, *(np.asarray(w[...], np.float64) for w in weights), run.model.experts)
    # Sums of 64 and 48 products in fp32, each of numbers up to about 10.
    np.testing.assert_allclose(out, expected[0], atol=200 * EPS32 * np.abs(expected[0]).max())
    np.testing.assert_allclose(losses, expected[1], rtol=20 * EPS32)
    np.testing.assert_array_equal(load, expected[2])
    np.testing.assert_array_equal(dropped, expected[3])
    assert (np.sum(dropped) > 0) == (run.model.experts.capacity_factor is not None)


def test_gradients_against_finite_differences():
    """The gradient along a random direction, through gates, drops and the load-balance loss."""
    run = tiny_grok("model.experts.balance_loss=0.5", "model.layers=1")
    with mesh_of(run):
        layer = jax.jit(lambda: Experts(run.model, run.model.experts, key=jax.random.key(0)))()
        x, cotangent = RNG.normal(size=(2, 8, 32, 64))

        def value(layer, x):
            out, ((losses, *_),) = layer(x, SHARED)
            return jnp.sum(out * cotangent) + jnp.sum(losses)

        grads = jax.jit(jax.grad(value, argnums=(0, 1)))(layer, jnp.asarray(x, jnp.float32))
    weights = [np.asarray(w[...], np.float64) for w in (layer.router, layer.gate_up, layer.down)]
    operands = [x, *weights]
    actual = [np.asarray(g, np.float64) for g in (grads[1], grads[0].router[...],
              grads[0].gate_up[...], grads[0].down[...])]  # fmt: skip
    for i, operand in enumerate(operands):
        direction = RNG.normal(size=operand.shape)
        ends = []
        # Small enough that no token changes its experts and no expert its tokens.
        for step in (1e-7, -1e-7):
            moved = [o + step * direction if j == i else o for j, o in enumerate(operands)]
            out, losses, *_ = reference(*moved, run.model.experts)
            ends.append(np.sum(out * cotangent) + np.sum(losses))
        terms = actual[i] * direction
        # fp32 rounding of each term; the differences lose half of float64's digits.
        np.testing.assert_allclose(
            terms.sum(), (ends[0] - ends[1]) / 2e-7, atol=50 * EPS32 * np.abs(terms).sum()
        )


@pytest.mark.slow
def test_accumulation_and_balance_loss():
    """The reported loss is the cross entropy; the load-balance loss changes gradients alone."""
    with_loss, without = (
        loss_and_gradients(tiny_grok(f"model.experts.balance_loss={c}", "batch.microbatch=4"))
        for c in (0.1, 0.0)
    )
    assert with_loss[0] == without[0]
    router = [name for name in without[1] if "router" in name]
    assert router
    for name in router:
        assert np.abs(with_loss[1][name] - without[1][name]).max() > 1e-4


def test_balanced_routing_drops_nothing_and_is_no_published_work():
    run = tiny_grok("model.experts.routing=balanced")
    with mesh_of(run):
        state = new_state(run)
        _, figures = make_program(run)(state)
    assert {name: float(figures[name]) for name in
            ("tokens_dropped", "expert_load_max", "balance_loss")} == {
        "tokens_dropped": 0.0, "expert_load_max": 1.0, "balance_loss": pytest.approx(1.0),
    }  # fmt: skip
    row = recipes.resolve(
        recipes.load("grok1_314b_bf16"),
        512,
        overrides=recipes.parse_overrides(["model.experts.routing=balanced"]),
    )
    assert published.lookup(row) is None


def test_figures_of_a_step():
    run = tiny_grok()
    with mesh_of(run):
        model = jax.jit(lambda: Decoder(run.model, key=jax.random.key(0)))()
        tokens = jnp.asarray(RNG.integers(0, 64, size=(2, 8, 32)), jnp.int32)
        _, (figures, _) = model.loss(*tokens, run.execution, run.precision)
    assert 0 < float(figures["tokens_dropped"]) < 1
    assert 1 < float(figures["expert_load_max"]) <= run.model.experts.count / 2
    assert figures["expert_load"].shape == (run.model.experts.count,)
    assert float(jnp.mean(figures["expert_load"])) == pytest.approx(1.0)
    assert float(figures["balance_loss"]) > 0.9


@pytest.mark.parametrize("experts", [4, 8, 16])
@pytest.mark.parametrize("case", ["published", "dropless"])
def test_work_follows_the_active_experts(case, experts):
    """Products of the compiled forward pass: those of the chosen experts and the router."""
    run = tiny_grok(*CASES[case], f"model.experts.count={experts}")
    with mesh_of(run):
        layer = jax.eval_shape(lambda: Experts(run.model, run.model.experts, key=jax.random.key(0)))
        x = jax.ShapeDtypeStruct((8, 32, 64), jnp.float32)
        compiled = jax.jit(lambda layer, x: layer(x, SHARED)[0]).lower(layer, x).compile()
    executed = sum(Program.parse(compiled.as_text()).flops().values())
    counts = flops.model_flops(run.model, 32, "full")
    layers = run.model.layers
    active, router = (8 * counts[name] // layers // 3 for name in ("experts", "router"))
    if case == "published":
        assert executed == active + router
    else:
        # Each expert's last block may be padded.
        assignments = 8 * 32 * 2
        padding = experts * (routing.block_slots(assignments, run.model.experts) - 1)
        assert active < executed - router <= active * (assignments + padding) / assignments


def test_no_assignment_and_no_gradient_is_lost():
    """The two index maps are inverse, and each function the transpose of the other."""
    cfg = tiny_grok().model.experts
    gates = jnp.asarray(RNG.uniform(size=(1, 32, 2)), jnp.float32)
    experts = jnp.asarray(np.stack([RNG.permutation(8)[:2] for _ in range(32)])[None])
    for make in (routing.capacity_routes, routing.dropless_routes):
        routes = make(gates, experts, cfg)
        slot, assignment = np.asarray(routes.slot).reshape(-1), np.asarray(routes.assignment)
        placed = np.flatnonzero(slot != routing.NONE)
        np.testing.assert_array_equal(assignment[slot[placed]], placed)
        assert np.sum(assignment != routing.NONE) == placed.size
    assert placed.size == 64
    assert to_numpy(routes)


def test_overrides_that_cannot_be():
    for text, message in (
        (
            "model.experts.capacity_tokens=24",
            "model.experts.capacity_tokens = 24 must divide the tokens of a",
        ),
        (
            "model.experts.top_k=9",
            "model.experts.top_k = 9 must be at most model.experts.count = 8",
        ),
        ("parallelism.expert=3", "must divide the number of devices = 8"),
        ("model.experts.count=6", "expert x tensor = 4 must divide model.experts.count = 6"),
        ("model.experts.capacity_factor=0", "model.experts.capacity_factor = 0.0 must be above 0"),
        (
            "model.experts.capacity_factor=null",
            "experts without model.experts.capacity_factor have no FP8",
        ),
    ):
        with pytest.raises(RecipeError, match=message):
            tiny_grok("parallelism.expert=4", "precision.dtype=fp8", text, devices=8)
