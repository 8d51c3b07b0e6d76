"""Routing and dispatch against loops over tokens."""

import math
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import tiered
from experts import reference, tiny_grok
from steps import assert_same, loss_and_gradients, same_sequences
from tiny import mesh_of, to_numpy

from jaxbench import mesh
from jaxbench.base.errors import RecipeError
from jaxbench.models.context import Context, Kernels, Sequences
from jaxbench.models.decoder import Decoder
from jaxbench.models.experts import Experts
from jaxbench.ops import fp32_dot
from jaxbench.ops.draws import Counters
from jaxbench.ops.grouped import NONE
from jaxbench.ops.moe import routing
from jaxbench.ops.moe.dispatch import dispatch
from jaxbench.ops.moe.maps import expert_maps, once_per_rank, rank_maps
from jaxbench.recipe import flops
from jaxbench.recipe.mixers import ExpertsConfig
from jaxbench.train.step import first_sequences
from jaxbench.xla.hlo import Program

EPS32 = np.finfo(np.float32).eps
RNG = np.random.default_rng(0)
SHARED = Context()


def context_of(cfg):
    """The context of a layer whose matmuls are those of these experts."""
    return Context(kernels=Kernels(grouped_matmul="batched" if cfg.slots == "own" else "xla"))


DROPLESS = "model.experts.capacity_factor=null", "model.experts.rank_capacity_factor=8"
"""No token is dropped, whatever up to 8 ranks send each other."""

CASES = {
    "published": (),
    "a larger capacity": ("model.experts.capacity_factor=1.5",),
    "dropless": DROPLESS,
    "slots of each expert": (*DROPLESS, "model.experts.slots=own"),
}
ALL_AXES = ("parallelism.expert=2", "parallelism.context=2", "parallelism.tensor=2")


@pytest.mark.parametrize(
    "case",
    tiered([*((case, 1) for case in CASES), ("published", 8)], product(CASES, (1, 8))),
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
        context = context_of(run.model.experts)
        out, ((losses, load, dropped),) = jax.jit(lambda layer, x: layer(x, context))(layer, placed)
    weights = (layer.router, layer.gate_up, layer.down)
    exact = (np.asarray(w[...], np.float64) for w in weights)
    expected = reference(x, *exact, cfg=run.model.experts)
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
            out, losses, *_ = reference(*moved, cfg=run.model.experts)
            ends.append(np.sum(out * cotangent) + np.sum(losses))
        terms = actual[i] * direction
        # fp32 rounding of each term; the differences lose half of float64's digits.
        np.testing.assert_allclose(
            terms.sum(), (ends[0] - ends[1]) / 2e-7, atol=50 * EPS32 * np.abs(terms).sum()
        )


@pytest.mark.parametrize("logit", [-44.0, -50.0, -90.0])
def test_gradients_of_tiny_sigmoids_are_finite(logit):
    """Their sum is far below the smallest number whose square fp32 has."""
    cfg = ExpertsConfig(count=8, top_k=2, ffn=4, router="sigmoid", bias_rate=1e-3)
    logits = jnp.full((1, 1, 8), logit) + jnp.arange(8) * 1e-3

    def value(logits):
        gates, experts = routing.choose(logits, cfg, jnp.zeros(8))
        shares, _ = routing.balance_shares(logits, experts, cfg)
        return jnp.sum(gates * jnp.arange(2)) + jnp.sum(shares * jnp.arange(8))

    with mesh_of(tiny_grok()):
        assert jnp.isfinite(jax.jit(jax.grad(value))(logits)).all()


@pytest.mark.parametrize("axis", tiered([], ["data", "pipeline"]))
def test_balance_loss_of_a_microbatch_on_a_mesh(axis):
    """Two data-parallel ranks have the loss of two microbatches, and a pipeline has it too."""
    microbatch = "model.experts.balance=microbatch"
    settings = "model.experts.balance_loss=0.1", "batch.microbatch=4", "execution.remat=attention"
    axes = "parallelism.context=2", "parallelism.tensor=2"
    axes += ("parallelism.pipeline=2",) if axis == "pipeline" else ()
    family = {"family": "qwen3_30b_a3b_bf16"}
    expected = same_sequences(tiny_grok(microbatch, *settings, **family))
    actual = same_sequences(tiny_grok(microbatch, *settings, *axes, devices=8, **family))
    assert_same(actual, expected, 400)
    _, of_sequences = same_sequences(tiny_grok(*settings, **family))
    (router,) = (name for name in of_sequences if ".router" in name)
    assert np.abs(of_sequences[router] - expected[1][router]).max() > 1e-4


@pytest.mark.nightly
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


@pytest.mark.slow
def test_figures_of_a_step():
    run = tiny_grok()
    with mesh_of(run):
        model = jax.jit(lambda: Decoder(run.model, key=jax.random.key(0)))()
        tokens = jnp.asarray(RNG.integers(0, 64, size=(2, 8, 32)), jnp.int32)
        _, figures = model.loss(Sequences(*tokens), run.execution, run.precision)
    assert 0 < float(figures["tokens_dropped"]) < 1
    assert 1 < float(figures["expert_load_max"]) <= run.model.experts.count / 2
    assert float(figures["expert_load_max"]) == float(jnp.max(figures["layer_load_max"]))
    assert figures["expert_load"].shape == (run.model.experts.count,)
    assert float(jnp.mean(figures["expert_load"])) == pytest.approx(1.0)
    assert float(figures["balance_loss"]) > 0.9


def test_layers_of_a_segment_are_reported_in_their_order():
    """Each block of a hybrid has two layers with experts, and is repeated three times."""

    def layer(*loads):
        load = jnp.array([[[n, 4 - n]] for n in loads])
        return routing.RoutingFigures(jnp.zeros((len(loads), 1)), load, jnp.zeros((len(loads), 1)))

    segments = [(layer(2, 3, 4), layer(4, 2, 3)), (), (layer(3),)]
    _, figures = routing.with_balance_loss(jnp.zeros(()), segments, 0.0)
    assert [*figures["layer_load_max"]] == [1, 2, 1.5, 1, 2, 1.5, 1.5]


@pytest.mark.parametrize("experts", [4, 8, 16])
def test_work_follows_the_active_experts(experts):
    """Products of the compiled forward pass: those of the chosen experts and the router."""
    run = tiny_grok(f"model.experts.count={experts}")
    with mesh_of(run):
        layer = jax.eval_shape(lambda: Experts(run.model, run.model.experts, key=jax.random.key(0)))
        x = jax.ShapeDtypeStruct((8, 32, 64), jnp.float32)
        compiled = jax.jit(lambda layer, x: layer(x, SHARED)[0]).lower(layer, x).compile()
    executed = sum(Program.parse(compiled.as_text()).flops().values())
    counts = flops.model_flops(run.model, 32, "full")
    layers = run.model.layers
    active, router = (8 * counts[name] // layers // 3 for name in ("experts", "router"))
    assert executed == active + router


def test_no_assignment_and_no_gradient_is_lost():
    """The two index maps are inverse, and each function the transpose of the other."""
    run = tiny_grok(*DROPLESS)
    with_capacity, without = tiny_grok().model.experts, run.model.experts
    gates = jnp.asarray(RNG.uniform(size=(1, 32, 2)), jnp.float32)
    experts = jnp.asarray(np.stack([RNG.permutation(8)[:2] for _ in range(32)])[None])
    makers = (
        (lambda *args: (expert_maps(*args), None), with_capacity),
        (lambda _, *args: rank_maps(*args), without),
    )
    for make, cfg in makers:
        with mesh_of(run):
            routes, sent = make(gates, experts, cfg)
        slot, assignment = np.asarray(routes.slot).reshape(-1), np.asarray(routes.assignment)
        placed = np.flatnonzero(slot != NONE)
        np.testing.assert_array_equal(assignment[slot[placed]], placed)
        assert np.sum(assignment != NONE) == placed.size
    np.testing.assert_array_equal(sent[0], np.bincount(experts.reshape(-1), minlength=8))
    assert placed.size == 64


@pytest.mark.parametrize("factor", [4, 1.0], ids=["room for all", "too few slots"])
@pytest.mark.parametrize("top_k", [2, 6], ids=["by number", "by expert"])
def test_a_token_is_sent_once_to_each_rank_of_its_experts(top_k, factor):
    """Four ranks with four experts each. If there are too few slots, no token has a use without a
    slot, nor a slot without a use."""
    cfg = ExpertsConfig(count=16, top_k=top_k, ffn=8, rank_capacity_factor=factor)
    experts = np.stack([RNG.permutation(16)[:top_k] for _ in range(64)])[None]
    with mesh_of(tiny_grok("parallelism.expert=4", devices=4)):
        before, _ = rank_maps(jnp.asarray(experts), cfg)
        maps, crossing, uses = jax.tree.map(
            np.asarray, jax.jit(partial(once_per_rank, cfg=cfg))(jnp.asarray(experts), before)
        )
    slots, of_rank = cfg.token_slots(64, 4), cfg.rank_slots(64, 4)
    assert uses.slot.shape == (4 * slots, min(top_k, 4))
    ranks, kept = experts[0] // 4, maps.slot[0] != NONE
    if factor == 4:
        assert kept.all()
    for rank in range(4):
        sent = crossing.assignment[rank * slots : (rank + 1) * slots]
        tokens = sent[sent != NONE] // top_k
        wanted = np.flatnonzero((ranks == rank).any(axis=1))
        if factor == 4:
            np.testing.assert_array_equal(tokens, wanted)
        assert np.all(np.diff(tokens) > 0)
        assert set(tokens) <= set(wanted)
        for i in range(slots):
            used = uses.slot[rank * slots + i]
            # The assignments' slots, in which the rank finds the token's expert.
            found = np.sort(used[used != NONE])
            token = sent[i] // top_k if sent[i] != NONE else None
            here = (
                [] if token is None else maps.slot[0, token][kept[token] & (ranks[token] == rank)]
            )
            np.testing.assert_array_equal(
                found, np.sort(here) - (rank * of_rank if len(here) else 0)
            )
            for number, slot in enumerate(used):
                if slot != NONE:
                    assert uses.use[rank * of_rank + slot] == i * used.size + number
    assert np.sum(uses.use != NONE) == np.sum(uses.slot != NONE) == kept.sum()
    # Each token's first assignment to a rank has its slot, the others have none.
    first = np.array([[r not in row[:j] for j, r in enumerate(row)] for row in ranks])
    if factor == 4:
        np.testing.assert_array_equal(crossing.slot[0] != NONE, first)
    assert not first.all()


def test_the_bytes_of_an_exchange_are_those_of_distinct_tokens():
    """Eight ranks with two experts each, in bf16: forward and backward, there and back."""
    settings = "count: 16, top_k: 6, capacity_factor: null"
    run = tiny_grok("parallelism.expert=8", f"model.experts={{{settings}}}", devices=8)
    cfg = run.model.experts
    with mesh_of(run):
        layer = jax.jit(lambda: Experts(run.model, cfg, key=jax.random.key(0)))()

        def value(layer, x):
            return jnp.sum(layer(x, context_of(cfg))[0].astype(jnp.float32))

        spec = mesh.spec("batch shard_seq embed", mesh.ACTIVATION)
        x = jax.device_put(jnp.zeros((8, 64, 64), jnp.bfloat16), spec)
        compiled = jax.jit(jax.value_and_grad(value, (0, 1))).lower(layer, x).compile()
    # An array for each of the ranks.
    to_rank = cfg.token_slots(64, 8) * 64
    moved = [
        math.prod(dims)
        for i, _, _ in Program.parse(compiled.as_text()).walk()
        if i.kind == "all-to-all"
        for _, dims in i.arrays
    ]
    assert moved.count(to_rank) == 4 * 8
    assert sum(moved) - 4 * 8 * to_rank < to_rank  # slots and gates
    assert to_rank < cfg.rank_slots(64, 8) * 64


def test_experts_have_whole_blocks_of_slots():
    cfg = ExpertsConfig(count=2, top_k=1, ffn=8, slots="own", rank_capacity_factor=1.2)
    assert cfg.capacity(400) == 256  # two blocks for 1.2 times 200 tokens
    assert cfg.capacity(100) == 128


def dense(layer, x, kept, cfg):
    """Every expert for every token, and the shared one; assignments that are not `kept` add
    nothing."""
    logits = x @ layer.router[...]
    chosen = jax.lax.top_k(logits, cfg.top_k)[1][..., None] == jnp.arange(cfg.count)
    gates = jax.nn.softmax(jnp.where(jnp.any(chosen, axis=-2), logits, -jnp.inf))
    gate, up = jnp.moveaxis(jnp.einsum("bsd,edpf->bsepf", x, layer.gate_up[...]), 3, 0)
    hidden = jax.nn.gelu(gate) * up * (gates * kept)[..., None]
    out = jnp.einsum("bsef,edf->bsd", hidden, layer.down[...])
    if layer.shared is not None:
        gate, up = jnp.moveaxis(jnp.einsum("bsd,dpf->bspf", x, layer.shared.gate_up[...]), 2, 0)
        out += jnp.einsum("bsf,df->bsd", jax.nn.gelu(gate) * up, layer.shared.down[...])
    return out


@pytest.mark.parametrize("shared", [False, True], ids=["top 1", "top 2 and a shared expert"])
@pytest.mark.parametrize(
    "case",
    tiered(
        [(1.5, "shared", 8), (8, "own", 32)],
        [(8, "shared", 8), (1.5, "shared", 8), (32, "own", 32), (8, "own", 32)],
    ),
    ids=str,
)
def test_one_expert_that_gets_all(case, shared):
    """With slots for all of them on its rank every token has its output and its gradient; with
    fewer, those that have no slot are counted, and all others are right. Tokens that find a slot on
    their way but none where they arrive count as dropped too."""
    factor, slots, count = case
    top_k = ("top_k: 2", "shared_ffn: 96") if shared else ("top_k: 1",)
    of_experts = f"count: {count}, slots: {slots}"
    settings = f"capacity_factor: null, rank_capacity_factor: {factor}", *top_k, of_experts
    run = tiny_grok(
        "parallelism.expert=8", f"model.experts={{{', '.join(settings)}}}", devices=8
    )  # fmt: skip
    cfg = run.model.experts
    x, cotangent = RNG.normal(size=(2, 8, 32, 64)).astype(np.float32)
    x[..., 0] = 10

    def values(function, layer, x):
        def scalar(layer, x):
            out, aux = function(layer, x)
            return jnp.sum(out * cotangent), (out, aux)

        (_, result), grads = jax.jit(jax.value_and_grad(scalar, (0, 1), has_aux=True))(layer, x)
        return *result, to_numpy(grads)

    with mesh_of(run):
        layer = jax.jit(lambda: Experts(run.model, cfg, key=jax.random.key(0)))()
        # A router that prefers expert 5 for every token.
        biased = np.asarray(layer.router[...]) * 0.01
        biased[0, 5] = 10
        layer.router[...] = jax.device_put(biased, layer.router[...].sharding)
        spec = mesh.spec("batch shard_seq embed", mesh.ACTIVATION)
        placed = jax.device_put(jnp.asarray(x), spec)
        context = context_of(cfg)
        out, ((_, load, dropped),), grads = values(
            lambda layer, x: layer(x, context), layer, placed
        )
    assert np.all(np.asarray(load)[:, 5] == 32)
    chosen = np.argsort(-(x @ biased), axis=-1)[..., : cfg.top_k]
    assigned = np.sum(chosen[..., None] == np.arange(count), axis=2)
    if slots == "shared":
        # Each rank has one expert, and slots for so many of the assignments of a sequence.
        most = min(32, int(np.ceil(32 * cfg.top_k / 8 * factor)))
        kept = assigned * (np.cumsum(assigned, axis=1) <= most)
    else:
        # The expert takes the first ones of all sequences, each of which is on one device.
        order = np.cumsum(assigned.reshape(-1, count), axis=0).reshape(assigned.shape)
        kept = assigned * (order <= cfg.capacity(8 * 32))
    np.testing.assert_array_equal(dropped, np.sum(assigned - kept, axis=(1, 2)))
    assert (np.max(dropped) > 0) == ((factor, slots) in [(1.5, "shared"), (8, "own")])
    # Weights without a mesh.
    layer = jax.tree.map(lambda w: jnp.asarray(np.asarray(w)), layer)
    expected, _, exact = values(
        lambda *xs: (dense(*xs, kept=kept, cfg=cfg), None), layer, jnp.asarray(x)
    )
    # Sums of up to 256 products in fp32.
    np.testing.assert_allclose(out, expected, atol=200 * EPS32 * np.abs(expected).max())
    assert grads.keys() == exact.keys()
    for name, gradient in exact.items():
        largest = np.abs(gradient).max()
        np.testing.assert_allclose(grads[name], gradient, atol=400 * EPS32 * largest, err_msg=name)


@pytest.mark.parametrize("slots", tiered(["shared"], ["shared", "own"]))
def test_assignments_without_a_slot_are_counted_and_add_nothing(slots):
    """Four ranks with four experts each, and too few slots for tokens with several uses. The
    layer's outputs and gradients are those of all experts for the assignments that it keeps."""
    factor = "capacity_factor: null, rank_capacity_factor: 0.8"
    axes = "parallelism.expert=2", "parallelism.tensor=2", "parallelism.context=2"
    settings = f"model.experts={{count: 16, top_k: 6, slots: {slots}, {factor}}}"
    run = tiny_grok(*axes, settings, devices=8)
    cfg = run.model.experts
    x, cotangent = RNG.normal(size=(2, 8, 32, 64)).astype(np.float32)

    def value(layer, x):
        out, ((_, _, dropped),) = layer(x, context_of(cfg))
        return jnp.sum(out * cotangent), (out, dropped)

    def assignments(layer, x):
        spec = mesh.spec("batch shard_seq assignment", mesh.ACTIVATION)
        gates, experts = routing.choose(fp32_dot.dot(x, layer.router[...], spec), cfg)
        return experts, dispatch(x, gates, experts, cfg)[2].kept

    with mesh_of(run):
        layer = jax.jit(lambda: Experts(run.model, cfg, key=jax.random.key(0)))()
        spec = mesh.spec("batch shard_seq embed", mesh.ACTIVATION)
        placed = jax.device_put(jnp.asarray(x), spec)
        backward = jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))
        (_, (out, dropped)), grads = backward(layer, placed)
        experts, kept = map(np.asarray, jax.jit(assignments)(layer, placed))
        grads = to_numpy(grads)
    np.testing.assert_array_equal(dropped, np.sum(~kept, axis=(1, 2)))
    assert 0.05 < np.mean(~kept) < 0.5
    of_expert = np.any((experts[..., None] == np.arange(16)) & kept[..., None], axis=2)
    layer = jax.tree.map(lambda w: jnp.asarray(np.asarray(w)), layer)

    def exact(layer, x):
        out = dense(layer, x, of_expert, cfg)
        return jnp.sum(out * cotangent), out

    (_, expected), wanted = jax.value_and_grad(exact, (0, 1), has_aux=True)(layer, jnp.asarray(x))
    # Sums of up to 256 products in fp32.
    np.testing.assert_allclose(out, expected, atol=200 * EPS32 * np.abs(expected).max())
    for name, gradient in to_numpy(wanted).items():
        largest = np.abs(gradient).max()
        np.testing.assert_allclose(grads[name], gradient, atol=400 * EPS32 * largest, err_msg=name)


@pytest.mark.parametrize("dtype", tiered([], ["fp32", "bf16"]))
def test_logits_in_the_dtype_of_the_router(dtype):
    """Expert 1 has the larger logits by 2^-10, which bf16 does not hold: of equal ones the first is
    chosen. In an fp32 run the hidden state has no other dtype."""
    run = tiny_grok("model.experts.top_k=1", f"model.experts.router_dtype={dtype}", *DROPLESS)
    with mesh_of(run):
        layer = jax.jit(lambda: Experts(run.model, run.model.experts, key=jax.random.key(0)))()
        router = np.zeros((64, 8), np.float32)
        router[0, :2] = 1, 1 + 2**-10
        layer.router[...] = jnp.asarray(router)
        for hidden in (jnp.bfloat16, jnp.float32):
            layer.gate_up[...], layer.down[...] = (
                w[...].astype(hidden) for w in (layer.gate_up, layer.down)
            )
            _, ((_, load, _),) = layer(jnp.ones((8, 32, 64), hidden), SHARED)
            chosen = 0 if (dtype, hidden) == ("bf16", jnp.bfloat16) else 1
            assert np.all(np.asarray(load) == 32 * np.eye(8)[chosen])


def test_projections_back_into_the_residual_stream_start_smaller():
    """Megatron draws them with `output_layer_init_method`, that out of a latent space too."""
    run = tiny_grok("model.experts.latent=64", family="nemotron3_nano_30b_a3b_bf16")
    std = run.model.init_std
    with mesh_of(run):
        layer = jax.jit(lambda: Experts(run.model, run.model.experts, key=jax.random.key(0)))()
    for weight, expected in (
        (layer.up, std), (layer.into_latent, std), (layer.shared.up, std),
        (layer.down, std / 2), (layer.out_of_latent, std / 2), (layer.shared.down, std / 2),
    ):  # fmt: skip
        # 4 layers; of 4096 numbers and more the deviation is known to 1.1 %.
        assert float(jnp.std(weight[...])) == pytest.approx(expected, rel=0.05)


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
    ):
        with pytest.raises(RecipeError, match=message):
            tiny_grok("parallelism.expert=4", "precision.dtype=fp8", text, devices=8)


@pytest.mark.slow
def test_random_logits():
    """Standard normal, alike on any mesh, with the gradient of the logits; others in another layer,
    sequence and position."""
    shape = (8, 32, 64)
    logits = jnp.asarray(RNG.normal(size=shape), jnp.float32)
    random_logits = partial(routing.random_logits, cfg=ExpertsConfig(count=64, top_k=2, ffn=1))
    drawn = []
    for devices, axes in ((1, ()), (8, ALL_AXES)):
        with mesh_of(tiny_grok(*axes, devices=devices)):
            spec = mesh.spec("batch shard_seq assignment", mesh.ACTIVATION)
            placed = jax.device_put(logits, spec)
            value, transpose = jax.vjp(lambda x: random_logits(x, Counters(0, 0)), placed)
            drawn.append(np.asarray(value))
            np.testing.assert_array_equal(transpose(placed)[0], logits)
    np.testing.assert_array_equal(*drawn)
    with mesh_of(tiny_grok()):  # not of the weights, whose last bits differ between meshes
        np.testing.assert_array_equal(random_logits(2 * logits, Counters(0, 0)), drawn[0])
    # The mean and the variance of 16384 numbers, and correlations of any two tokens' 64.
    assert abs(drawn[0].mean()) < 4 / 128
    assert abs(drawn[0].var() - 1) < 4 * 2**0.5 / 128
    tokens = drawn[0].reshape(-1, 64)
    assert np.abs(np.corrcoef(tokens) - np.eye(len(tokens))).max() < 6 / 8
    with mesh_of(tiny_grok()):
        for place in ((0, 1), (8, 0), (0, 0, 1)):
            other = np.asarray(random_logits(logits, Counters(*place)))
            assert np.abs(np.corrcoef(other.reshape(-1), drawn[0].reshape(-1))[0, 1]) < 4 / 128
        later = random_logits(logits, Counters(4, 0))
        one_expert = random_logits(logits[..., :1], Counters(0, 0))
    np.testing.assert_array_equal(later[:4], drawn[0][4:])
    assert abs(np.asarray(one_expert).std() - 1) < 0.2


def drawn_without_replacement(shares, k):
    """The probability that each of a few experts is among k that are drawn by their shares."""
    loads = np.zeros(len(shares))
    for order in permutations(range(len(shares)), k):
        rest = 1 - np.cumsum([0, *shares[list(order[:-1])]])
        loads[list(order)] += np.prod(shares[list(order)] / rest)
    return loads


@pytest.mark.slow
@pytest.mark.parametrize(("k", "groups"), [(1, 1), (2, 1), (2, 4)])
def test_loads_of_skewed_routing_follow_the_power_law(k, groups):
    """In another order in each layer, alike on any mesh, whatever the bias of the router is. In
    groups, of which a token uses two, the popular experts still have the larger loads."""
    skewed = (
        "model.experts.routing=skewed", "model.experts.skew=1.5", f"model.experts.top_k={k}",
        "model.experts.router=sigmoid", "model.experts.bias_rate=0.001",
        f"model.experts.groups={groups}", f"model.experts.top_groups={min(groups, 2)}",
    )  # fmt: skip
    orders, bias = [], jnp.asarray(RNG.normal(size=8), jnp.float32)
    for layer, devices in ((0, 1), (0, 8), (1, 1)):
        run = tiny_grok(*skewed, *(ALL_AXES if devices > 1 else ()), devices=devices)
        cfg = run.model.experts
        with mesh_of(run):
            spec = mesh.spec("batch shard_seq assignment", mesh.ACTIVATION)
            zeros = jax.device_put(jnp.zeros((64, 64, cfg.count)), spec)

            @jax.jit
            def experts(zeros, cfg=cfg, layer=layer):
                logits = routing.random_logits(zeros, Counters(0, layer), cfg)
                return routing.choose(logits, cfg, bias)[1]

            chosen = np.asarray(experts(zeros))
        orders.append(np.bincount(chosen.ravel(), minlength=cfg.count))
    np.testing.assert_array_equal(orders[0], orders[1])
    assert (np.argsort(orders[0]) != np.argsort(orders[2])).any()
    shares = np.arange(1, cfg.count + 1) ** -1.5
    expected = drawn_without_replacement(shares / shares.sum(), k)
    tokens = 64 * 64
    for loads in orders:
        measured = np.sort(loads)[::-1] / tokens
        if groups == 1:  # five standard deviations of a count of tokens
            deviation = np.sqrt(expected * (1 - expected) / tokens)
            assert (np.abs(measured - expected) < 5 * deviation).all()
        else:
            assert measured[0] > 4 * measured[-1]


@pytest.mark.parametrize(("kind", "moved"), [("random", False), ("learned", True)])
def test_biases_change_only_what_a_router_has_learned(kind, moved):
    run = tiny_grok(f"model.experts.routing={kind}", "model.experts.router=sigmoid",
                    "model.experts.bias_rate=0.001")  # fmt: skip
    cfg = run.model.experts
    logits, bias = (
        jnp.asarray(RNG.normal(size=shape), jnp.float32)
        for shape in ((1, 64, cfg.count), cfg.count)
    )
    with mesh_of(run):
        even, biased = (routing.choose(logits, cfg, b)[1] for b in (None, bias))
    assert (even != biased).any() == moved


RANDOM = (
    "model.experts.routing=random", "model.prediction={pattern: LE, depth: 2, loss: 0.3}",
    "model.layers=5", "model.pattern=L-LELELELE", "batch.microbatch=8",
    "precision.accumulate=fp32",
)  # fmt: skip
MESHES = {
    "microbatches": (1, "batch.microbatch=2"),
    "expert, context and tensor": (8, *ALL_AXES, "batch.microbatch=2"),
    "interleaved pipeline": (
        8, "parallelism.pipeline=2", "parallelism.virtual_stages=2", "parallelism.expert=2",
        "batch.microbatch=1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", tiered([], MESHES), ids=str)
def test_random_routing_is_that_of_one_microbatch_on_one_device(name):
    """Other draws for each sequence of a step, and the same ones however the batch is divided: each
    expert has as many tokens, and all gradients are equal but for the order of sums."""
    devices, *axes = MESHES[name]
    family = {"family": "deepseek_v3_bf16"}
    expected = same_sequences(tiny_grok(*RANDOM, **family))
    actual = same_sequences(tiny_grok(*RANDOM, *axes, devices=devices, **family))
    loads = [key for key in expected[1] if "mixer" in key and ".bias" in key]
    assert len(loads) == 2
    for key in loads:
        np.testing.assert_array_equal(actual[1][key], expected[1][key])
    assert_same(actual, expected, 400)


def test_a_seed_has_draws_of_its_own():
    """Sequences count from 0 with seed 0, and from another number with another one."""
    tokens = jnp.zeros((2, 4, 1))
    numbers = [np.asarray(first_sequences(jnp.int32(1), tokens, seed)) for seed in (0, 1, 2)]
    np.testing.assert_array_equal(numbers[0], [8, 12])
    apart = [abs(int(a[0]) - int(b[0])) for a, b in combinations(numbers, 2)]
    assert min(apart) > 2**28


@pytest.mark.nightly
def test_every_application_of_a_shared_block_draws_anew():
    """Two equal draws would give each expert of multi-token prediction an even number of tokens."""
    # In one group, since all experts of a group would have as many tokens.
    one_group = "model.experts={groups: 1, top_groups: 1}"
    _, grads = same_sequences(tiny_grok(*RANDOM, one_group, family="deepseek_v3_bf16"))
    (*_, load) = (g for key, g in grads.items() if "mixer" in key and ".bias" in key)
    assert load.sum() == 2 * 8 * 32 * 4
    assert np.any(load % 2)


@pytest.mark.parametrize(
    ("devices", "scaling", "slots"),
    [
        pytest.param(1, "current", "shared", marks=pytest.mark.slow),
        pytest.param(1, "delayed", "shared", marks=pytest.mark.nightly),
        pytest.param(8, "current", "shared", marks=pytest.mark.nightly),
        pytest.param(1, "current", "own", marks=pytest.mark.nightly),
        pytest.param(8, "current", "own", marks=pytest.mark.slow),
    ],
)
def test_dropless_experts_in_fp8_are_those_of_a_capacity_for_all(devices, scaling, slots):
    """With a capacity of all tokens nothing is dropped: the same products, scales and sums. One
    layer, since a second one's router would turn a rounding into other experts."""
    axes = ALL_AXES if devices > 1 else ()
    fp8 = "precision.dtype=fp8", f"precision.scaling={scaling}", "model.layers=1"
    slots = f"model.experts.slots={slots}"
    loss, grads = same_sequences(tiny_grok(*axes, *fp8, *DROPLESS, slots, devices=devices))
    expected = same_sequences(
        tiny_grok(*axes, *fp8, "model.experts.capacity_factor=8", devices=devices)
    )
    assert loss == pytest.approx(expected[0], rel=2**-12)
    for name, exact in expected[1].items():
        # Mostly equal, but sums in another order turn some numbers into the next one of FP8, which
        # is up to a quarter away. (FP8 itself changes these gradients by 20 to 50 %.)
        difference = np.linalg.norm(grads[name] - exact)
        assert difference < 2**-5 * np.linalg.norm(exact), name


def test_the_busiest_rank_has_the_shares_of_its_experts():
    """One draw of a token: the load of a rank is the sum of its experts' shares. The busiest of two
    experts with shares 2/3 and 1/3 has 4/3 of an average load."""
    two = ExpertsConfig(count=2, top_k=1, ffn=8, routing="skewed", skew=1.0)
    assert routing.busiest_share(two, 2) == pytest.approx(4 / 3, rel=0.01)
    even = replace(two, count=16, skew=1e-9)
    assert routing.busiest_share(even, 4) == pytest.approx(1.0, abs=0.02)
    assert routing.busiest_share(two, 1) == 1.0
    assert routing.busiest_share(replace(two, routing="random"), 2) == 1.0


@pytest.mark.slow
def test_the_busiest_rank_is_that_of_the_programs_draws():
    """The sample of plans next to what `random_logits` and `choose` draw."""
    cfg = ExpertsConfig(
        count=32, top_k=4, ffn=8, groups=8, top_groups=4, router="sigmoid", routing="skewed",
        skew=0.5, gate_scale=1.0,
    )  # fmt: skip
    busiest = []
    with mesh_of(tiny_grok()):
        spec = mesh.spec("batch shard_seq assignment", mesh.ACTIVATION)
        zeros = jax.device_put(jnp.zeros((8, 256, 32)), spec)

        @jax.jit
        def experts(layer):
            logits = routing.random_logits(zeros, Counters(0, layer), cfg)
            return routing.choose(logits, cfg)[1]

        for layer in range(16):
            load = np.bincount(np.ravel(experts(layer)) // 8, minlength=4)
            busiest.append(load.max() / load.mean())
    deviation = np.std(busiest) / np.sqrt(len(busiest))
    assert routing.busiest_share(cfg, 4) == pytest.approx(np.mean(busiest), abs=3 * deviation)
