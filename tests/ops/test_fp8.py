"""FP8: quantization against ml_dtypes, products and their gradients against float64, the state of
delayed scaling, and FP8 runs against each other."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from arrays import MESHES, on, put
from cases import tiered
from engine import needs_te
from flax import nnx
from steps import new_state, same_sequences, steps_of
from tiny import mesh_of, tiny_run, to_numpy

from jaxbench import mesh
from jaxbench.models.layers import Weight
from jaxbench.ops import dense, quantized, remat
from jaxbench.ops.quantized import per_tensor
from jaxbench.recipe.settings import Precision
from jaxbench.train.step import train_step

FP8 = "precision.dtype=fp8"
FULL = "execution.remat=full"
"""One scan in place of two: compiles faster."""
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [per_tensor.VALUES, per_tensor.GRADIENTS])
def test_scale_inv_is_the_next_bf16_value(dtype):
    amax = np.exp(RNG.uniform(-60, 60, size=1000)).astype(np.float32)
    exact = amax.astype(np.float64) / float(ml_dtypes.finfo(dtype).max)
    scale_inv = np.asarray(per_tensor.scale_inv_of(jnp.asarray(amax), dtype), np.float64)
    np.testing.assert_array_equal(scale_inv, scale_inv.astype(ml_dtypes.bfloat16))
    # Up by less than one unit in the last of 8 bits; the exact value is rounded to fp32 first.
    assert np.all(scale_inv >= exact * (1 - 2**-23))
    assert np.all(scale_inv <= exact * (1 + 2**-7))
    special = per_tensor.scale_inv_of(jnp.array([0.0, np.inf, np.nan]), dtype)
    np.testing.assert_array_equal(special, [1.0, np.inf, np.nan])


@pytest.mark.parametrize("dtype", [per_tensor.VALUES, per_tensor.GRADIENTS])
def test_quantize_as_ml_dtypes_does(dtype):
    largest = float(ml_dtypes.finfo(dtype).max)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, largest, -largest, 1.1 * largest, 1e30, 1e-9]
    x = np.concatenate([special, RNG.normal(size=4096) * np.exp(RNG.uniform(-12, 12, size=4096))])
    x = x.astype(np.float32)
    for scale_inv in (1.0, 0.375, 80.0):
        scaled = x * (np.float32(1) / np.float32(scale_inv))
        expected = np.clip(scaled, -largest, largest).astype(dtype)
        actual = np.asarray(
            jax.jit(per_tensor.quantize, static_argnums=2)(x, jnp.float32(scale_inv), dtype)
        )
        np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


def numpy_quantized(x, dtype, amax, exact=False):
    """A tensor quantized with the scale of `amax`, in float64; an `exact` scale is not rounded to
    bf16."""
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    scale = np.float32(1) / np.float32(per_tensor.scale_inv_of(jnp.float32(amax), dtype))
    scale = largest / np.float32(amax) if exact else scale
    scaled = np.clip(np.asarray(x, np.float32) * scale, -largest, largest)
    return scaled.astype(dtype).astype(np.float64) / float(scale)


EQUATIONS = {
    "in": ("BSD,DKGH->BSKGH", "batch seq embed", "embed kv_heads group head_dim",
           "batch seq kv_heads group head_dim", (8, 16, 64), (64, 4, 3, 8)),
    "out": ("BSF,DF->BSD", "batch seq ffn", "embed ffn", "batch seq embed", (8, 16, 96), (64, 96)),
}  # fmt: skip


class OneProduct(nnx.Module):
    """A unit with a single weight."""

    def __init__(self, kernel):
        self.qkv = Weight(kernel, quantized=True)


def fp8_product(kind, mesh_name, precision, arrays):
    """(y, dx, dw, histories) of one product on a mesh; the scales of delayed scaling are those of
    the arrays themselves."""
    equation, x_dims, w_dims, y_dims, _, _ = EQUATIONS[kind]

    def run(x, kernel, dy, amax):
        stack = OneProduct(mesh.accumulating(kernel[None]))
        histories = [jnp.tile(amax[None, None, :, None], (1, 1, 1, 4))]
        histories = histories if precision.scaling == "delayed" else []
        step = quantized.Quantization.of([stack], histories, precision)

        def product(x, stack, observed):
            (observing,) = step.scaled(observed)
            unit = quantized.attach(*jax.tree.map(lambda leaf: leaf[0], (stack, observing)))
            seq = "gather" if kind == "in" else "scatter"
            return dense.dot(equation, x, unit.qkv, y_dims, seq)

        y, vjp = jax.vjp(product, x, stack, step.probes)
        dx, d_stack, observed = vjp(dy)
        dw = mesh.sum_replicas(d_stack.qkv[...], kernel[None])[0]
        return y, dx, dw, step.next_histories(observed)

    x, w, dy = arrays
    with on(mesh_name):
        outside = "batch shard_seq embed"
        sharded = [
            put(x, outside if kind == "in" else x_dims, dtype=jnp.bfloat16),
            put(w, w_dims, mesh.WEIGHT, dtype=jnp.bfloat16),
            put(dy, y_dims if kind == "in" else outside, dtype=jnp.bfloat16),
        ]
        amax = jnp.array([np.abs(np.asarray(a, np.float32)).max() for a in sharded])
        return jax.jit(run)(*sharded, amax), amax


@pytest.mark.parametrize("implementation", ["xla", pytest.param("te", marks=needs_te)])
@pytest.mark.parametrize("scaling", ["delayed", "current"])
@pytest.mark.parametrize("kind", EQUATIONS)
@pytest.mark.parametrize("mesh_name", MESHES)
def test_product_and_gradients(mesh_name, kind, scaling, implementation, request):
    if implementation == "te":
        request.getfixturevalue("transformer_engine_on_a_cpu")
    equation, *_, x_shape, w_shape = EQUATIONS[kind]
    inputs, out = equation.split("->")
    into, through = inputs.split(",")
    x, w = RNG.normal(size=x_shape), RNG.normal(size=w_shape)
    y_shape = np.einsum(equation, x, w).shape
    x, w, dy = (
        a.astype(ml_dtypes.bfloat16).astype(np.float64) for a in (x, w, RNG.normal(size=y_shape))
    )
    precision = Precision(
        dtype="fp8", scaling=scaling, amax_history=4, implementation=implementation
    )
    (y, dx, dw, histories), amax = fp8_product(kind, mesh_name, precision, (x, w, dy))
    if scaling == "current" and mesh_name != "one device":
        # Each device scales its own part. Rounding to 4 bits (e4m3) moves a factor by up to 2^-4,
        # to 3 bits (e5m2) by 2^-3, and numbers below the smallest exponent by an absolute amount.
        for actual, (eq, a, b), eps in (
            (y, (equation, x, w), 0.14),
            (dx, (f"{out},{through}->{into}", dy, w), 0.2),
            (dw, (f"{into},{out}->{through}", x, dy), 0.2),
        ):
            error = np.abs(np.asarray(actual, np.float64) - np.einsum(eq, a, b))
            assert np.all(error <= eps * np.einsum(eq, np.abs(a), np.abs(b)) + 0.01)
        return
    # What Transformer Engine scales by itself, it scales to the last bit.
    exact = (implementation, scaling) == ("te", "current")
    xq, wq, dyq = (
        numpy_quantized(a, dtype, largest, unrounded)
        for a, dtype, largest, unrounded in zip(
            (x, w, dy), per_tensor.TENSORS, amax, (exact, False, exact), strict=True
        )
    )
    for actual, (eq, a, b) in (
        (y, (equation, xq, wq)),
        (dx, (f"{out},{through}->{into}", dyq, wq)),
        (dw, (f"{into},{out}->{through}", xq, dyq)),
    ):
        exact, size = np.einsum(eq, a, b), np.einsum(eq, np.abs(a), np.abs(b))
        # On a CPU both factors are rounded to bf16 (8 bits), and so are the product and its parts.
        error = np.abs(np.asarray(actual, np.float64) - exact)
        assert np.all(error <= 2**-8 * (2 * size + 4 * np.abs(exact)) + 2**-8 * size)
    if scaling == "delayed":
        (history,) = histories
        np.testing.assert_array_equal(history[0, 0, :, 0], amax)
        np.testing.assert_array_equal(history[0, 0, :, 1:], np.tile(amax[:, None], (1, 3)))


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_a_recomputed_input_keeps_its_scale(scaling):
    """The backward pass reads the gradient for its amax, and the recomputed input not again."""
    equation, *_, y_dims, x_shape, w_shape = EQUATIONS["out"]
    precision = Precision(dtype="fp8", scaling=scaling, amax_history=4)
    policy = remat.Policy(frozenset())

    def apply(x, weights, *_):
        return dense.dot(equation, x, weights[0].qkv, y_dims), ()

    def total(x, unit):
        return remat.checkpoint(apply, policy)(x, (unit,), None, None)[0].sum()

    with on("one device"):
        stack = OneProduct(jnp.ones((1, *w_shape), jnp.bfloat16))
        histories = quantized.init_histories([stack], precision)
        step = quantized.Quantization.of([stack], histories, precision)
        (scaled,) = step.scaled(step.probes)
        unit = quantized.attach(*jax.tree.map(lambda leaf: leaf[0], (stack, scaled)))
        x = jnp.ones(x_shape, jnp.bfloat16)
        program = str(jax.make_jaxpr(jax.grad(total))(x, unit))
    assert program.count("reduce_max[") == 2


@pytest.mark.nightly
def test_delayed_scaling_with_accumulation_4_equals_accumulation_1():
    # Weights stand still: updates would differ by the order in which bf16 gradients are summed.
    still = ("optimizer.learning_rate=0", "optimizer.final_learning_rate=0")
    settings = (FP8, FULL, "precision.amax_history=3", *still)
    whole, parts = tiny_run(*settings), tiny_run(*settings, "batch.microbatch=2")
    assert (whole.accumulation, parts.accumulation) == (1, 4)
    (losses, state), (parts_losses, parts_state) = (steps_of(run, 4) for run in (whole, parts))
    np.testing.assert_allclose(parts_losses, losses, rtol=1e-6)
    for name, history in to_numpy(state.fp8).items():
        assert history.shape == (3, 4, 3, 3)  # layers, products, tensors, steps
        assert np.all(history > 0)
        np.testing.assert_array_equal(to_numpy(parts_state.fp8)[name], history)
    (_, grads), (_, parts_grads) = map(same_sequences, (whole, parts))
    for name, exact in grads.items():
        # Sums of four gradients, each rounded to bf16.
        np.testing.assert_allclose(
            parts_grads[name], exact, atol=2**-7 * np.abs(exact).max(), rtol=0, err_msg=name
        )


@pytest.mark.slow
def test_amax_is_the_largest_over_devices_and_leave_the_optimizer_alone():
    overrides = (FP8, FULL, "parallelism.fsdp=2", "parallelism.tensor=2", "batch.microbatch=1")
    _, one = steps_of(tiny_run(FP8, FULL, "precision.amax_history=2"), 1)
    _, many = steps_of(tiny_run(*overrides, "precision.amax_history=2", devices=8), 1)
    for name, history in to_numpy(one.fp8).items():
        # Sums over tensor ranks are rounded to bf16 in parts. Where one falls on the other side of
        # a rounding to e5m2, whose neighbours differ by a quarter, so does what follows from it.
        np.testing.assert_allclose(to_numpy(many.fp8)[name], history, rtol=0.25, atol=1e-4)
        assert np.all(history[..., 1:] == 0)
    moments = {jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(many.optimizer)}
    assert not any("fp8" in name for name in moments)


def test_history_is_newest_first_and_its_maximum_is_the_scale():
    stack = OneProduct(jnp.full((1, 2, 2), 3.0))
    precision = Precision(dtype="fp8", amax_history=2)
    with mesh_of(tiny_run()):
        histories = quantized.init_histories([stack], precision)
        for x, dy in ((8.0, 1.0), (2.0, 4.0), (1.0, 2.0)):
            step = quantized.Quantization.of([stack], histories, precision)
            histories = step.next_histories([jnp.array([[[[x], [dy]]]])])
        np.testing.assert_array_equal(histories[0][0, 0], [[1, 2], [3, 3], [2, 4]])
        (scaled,) = quantized.Quantization.of([stack], histories, precision).quantized
    exact = np.array([2 / 448, 3 / 448, 4 / 57344])
    np.testing.assert_allclose(scaled.scale_inv[0, 0], exact, rtol=2**-7)


@pytest.mark.parametrize("scaling", tiered([], ["delayed", "current"], ["delayed"]))
def test_gathering_in_fp8_changes_nothing(scaling):
    overrides = (
        FP8, f"precision.scaling={scaling}", "parallelism.fsdp=2", "parallelism.tensor=2", FULL,
    )  # fmt: skip
    runs = [
        tiny_run(*overrides, f"precision.gather={dtype}", devices=8) for dtype in ("fp8", "bf16")
    ]
    (loss, grads), (other_loss, other_grads) = map(same_sequences, runs)
    assert loss == other_loss
    for name, exact in grads.items():
        # The same products; gradients are summed in fp32 in an order that XLA chooses.
        np.testing.assert_allclose(
            other_grads[name], exact, atol=1e-3 * np.abs(exact).max(), rtol=0, err_msg=name
        )


@pytest.mark.slow
def test_layers_one_after_another_observe_what_scanned_ones_do():
    """Two steps with delayed scaling: the second one's scales are what the first one observed."""
    changes = FP8, "parallelism.fsdp=2", "parallelism.tensor=2"
    (losses, state), (other_losses, other) = (
        steps_of(tiny_run(*changes, f"execution.remat={remat}", devices=8), 2)
        for remat in ("full", "none")
    )
    assert other_losses == pytest.approx(losses, rel=1e-3)
    for name, exact in to_numpy(state.fp8).items():
        # In bf16, whose last bit a compiler's fusions may decide.
        np.testing.assert_allclose(to_numpy(other.fp8)[name], exact, rtol=2**-6, err_msg=name)


@pytest.mark.slow
def test_a_layer_kept_in_bf16_inside_of_a_block():
    """Blocks of five layers: the last seven are one and two layers of another. Only products in FP8
    observe an amax."""
    changes = "model.pattern=M*-M-", "precision.last_bf16_layers=7", FULL
    run = tiny_run(FP8, *changes, family="nemotronh_56b_bf16")
    _, state = steps_of(run, 1)
    (stack,), (history,) = state.model.stacks, np.asarray(state.fp8)
    positions = [int(name.split(".")[1]) for name in quantized.quantized_weights(stack)]
    expected = [[5 * block + position < 3 for position in positions] for block in range(2)]
    np.testing.assert_array_equal(history[:, :, 0].max(axis=-1) > 0, expected)


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("scaling", tiered(["delayed"], ["delayed", "current"]))
def test_what_is_not_finite_reaches_the_loss(scaling, value):
    run = tiny_run(FP8, f"precision.scaling={scaling}", "precision.amax_history=2", FULL)
    with mesh_of(run):
        state = new_state(run)
        kernel = state.model.stacks[0].layers[1].mixer.gate_up
        kernel[...] = kernel[...].at[1, 3, 0, 5].set(value)
        tokens = jnp.zeros((1, 2, 32), jnp.int32)
        losses = []
        for _ in range(2):
            state, figures = jax.jit(train_step, static_argnums=3)(state, tokens, tokens, run)
            losses.append(float(figures["loss"]))
    # Delayed scaling saturates an infinity at first; the next step scales by it.
    assert not np.isfinite(losses[-1])
