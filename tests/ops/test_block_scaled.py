"""Products in block-scaled formats: against float64 by the formats' own definitions, on meshes, and
in runs; the kernels against XLA, bit for bit, in Pallas's interpreter."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from arrays import on, put
from cases import tiered
from engine import needs_te
from flax import nnx
from steps import new_state, projection, same_sequences, sequences
from test_blocks import numpy_mxfp8, numpy_nvfp4
from tiny import mesh_of, tiny_run

from jaxbench import mesh
from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import PLANNED
from jaxbench.models.layers import Weight
from jaxbench.ops import dense, draws, quantized
from jaxbench.ops.quantized import block_scaled, hadamard, kernels, te_blocks
from jaxbench.ops.quantized.block_formats import mxfp8, nvfp4
from jaxbench.recipe.settings import Precision
from jaxbench.train.program_checks import check_run
from jaxbench.train.step import gradients

RNG = np.random.default_rng(3)
# On 8 ranks a device has 16 rows of the first weight, half a block of MXFP8, and 32 of the second.
PRODUCTS = {
    "in": ("BSD,DPF->BSPF", "batch seq embed", "embed part ffn", "batch seq part ffn",
           (8, 128, 128), (128, 2, 128)),
    "out": ("BSF,DF->BSD", "batch seq ffn", "embed ffn", "batch seq embed",
            (8, 128, 128), (256, 128)),
    "experts": ("ERD,EDF->ERF", "experts capacity embed", "experts expert_embed expert_ffn",
                "experts capacity expert_ffn", (4, 256, 128), (4, 128, 96)),
}  # fmt: skip


class OneProduct(nnx.Module):
    """A block with a single weight."""

    def __init__(self, kernel, *, experts):
        self.w = Weight(kernel, quantized=True, experts=experts)


def product(kind, mesh_name, precision, arrays, implementation="xla"):
    """(y, dx, dw) of one product on a mesh."""
    precision = replace(precision, implementation=implementation)
    equation, x_dims, w_dims, y_dims, _, _ = PRODUCTS[kind]
    tensor_parallel = kind != "experts"

    def run(x, kernel, dy):
        stack = OneProduct(mesh.accumulating(kernel[None]), experts=kind == "experts")
        (scaled,) = quantized.Quantization.of([stack], [], precision).quantized

        def dot(x, stack):
            block = quantized.attach(*jax.tree.map(lambda leaf: leaf[0], (stack, scaled)))
            if kind == "in":
                x = mesh.gather_seq(x)
            y = dense.dot(equation, x, block.w, y_dims)
            return mesh.scatter_seq(y) if kind == "out" else y

        y, vjp = jax.vjp(dot, x, stack)
        dx, d_stack = vjp(dy)
        return y, dx, mesh.sum_replicas(d_stack.w[...], kernel[None])[0]

    x, w, dy = arrays
    with on(mesh_name):
        outside = "batch shard_seq embed" if tensor_parallel else None
        sharded = [
            put(x, outside if kind == "in" else x_dims, dtype=jnp.bfloat16),
            put(w, w_dims, mesh.WEIGHT, dtype=jnp.bfloat16),
            put(dy, outside if kind == "out" else y_dims, dtype=jnp.bfloat16),
        ]
        return [np.asarray(a, np.float64) for a in jax.jit(run)(*sharded)]


def operands(kind):
    """(input, weight, gradient of the output), values of bf16."""
    equation, *_, x_shape, w_shape = PRODUCTS[kind]
    y_shape = np.einsum(equation, np.zeros(x_shape), np.zeros(w_shape)).shape
    scale = np.exp(RNG.normal(size=x_shape[-1]))  # features of unlike sizes
    arrays = RNG.normal(size=x_shape) * scale, RNG.normal(size=w_shape), RNG.normal(size=y_shape)
    return [a.astype(ml_dtypes.bfloat16).astype(np.float64) for a in arrays]


def in_mxfp8(x, axis):
    """`x` as MXFP8 represents it with blocks along `axis`, in float64."""
    moved = np.ascontiguousarray(np.moveaxis(x, axis, -1))
    values, exponents = numpy_mxfp8(moved.astype(np.float32))
    scales = np.repeat(np.ldexp(1.0, exponents.astype(int) - 127), 32, -1)
    return np.moveaxis(values.astype(np.float64) * scales, -1, axis)


def in_nvfp4(x, axis, *, amax=None, square=False):
    """`x` as NVFP4 represents it with blocks along `axis`, or square ones of it and the first."""
    moved = np.moveaxis(x, axis, -1)
    rows = moved.reshape(-1, moved.shape[-1]).astype(np.float32)
    values, scales, inverse = numpy_nvfp4(rows, np.abs(rows).max(), square)
    scales = np.repeat(scales.astype(np.float64), 16, -1)
    scales = np.repeat(scales, 16, 0) if square else scales
    wide = (values.astype(np.float64) * scales * inverse).reshape(moved.shape)
    return np.moveaxis(wide, -1, axis)


def expected(kind, x, w, dy, quantize, quantize_weight, turn=lambda a, axis: a):
    """(y, dx, dw) in float64 of operands quantized along each product's contraction."""
    equation = PRODUCTS[kind][0]
    inputs, out = equation.split("->")
    into, through = inputs.split(",")
    first, last = int(kind == "experts"), w.ndim - 1
    forward, backward = (last, first) if kind == "out" else (first, last)
    tokens = 1
    xt, dyt = (quantize(turn(a, tokens), tokens) for a in (x, dy))
    return (
        np.einsum(equation, quantize(x, x.ndim - 1), quantize_weight(w, forward)),
        np.einsum(
            f"{out},{through}->{into}", quantize(dy, dy.ndim - 1), quantize_weight(w, backward)
        ),
        np.einsum(f"{into},{out}->{through}", xt, dyt),
    )  # fmt: skip


def assert_rounded(actual, exact, sums):
    """Equal but for the rounding of the result to bf16, 2^-9 of it, of sums in fp32, and of parts
    of a sum that devices round to bf16 before they add them up: 2^-8 of the absolute sum."""
    for a, e in zip(actual, exact, strict=True):
        np.testing.assert_allclose(a, e, rtol=2**-8, atol=sums * np.abs(e).max())


IMPLEMENTATIONS = ["xla", pytest.param("te", marks=needs_te)]


@pytest.fixture
def implementation(request):
    """Transformer Engine by its fallback in plain JAX."""
    if request.param == "te":
        request.getfixturevalue("transformer_engine_on_a_cpu")
    return request.param


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("mesh_name", tiered(["one device"], ["one device", "all"]))
def test_mxfp8_products_and_gradients(mesh_name, kind, implementation):
    if kind == "experts" and mesh_name != "one device":
        pytest.skip("dimensions of experts have meshes of their own: test_runs_on_meshes")
    arrays = operands(kind)
    actual = product(kind, mesh_name, Precision(dtype="mxfp8"), arrays, implementation)
    exact = expected(kind, *arrays, quantize=in_mxfp8, quantize_weight=in_mxfp8)
    assert_rounded(actual, exact, 2**-8 if mesh_name != "one device" else 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
def test_nvfp4_products_and_gradients(implementation, monkeypatch):
    if implementation == "te":  # on a CPU its own have NaN (test_te.py)
        monkeypatch.setattr(te_blocks.TeMatmuls, "quantize", block_scaled.Matmuls.quantize)
    x, w, dy = operands("out")  # numpy's square blocks are of matrices
    precision = Precision(dtype="nvfp4", stochastic_rounding=False, hadamard=False)
    actual = product("out", "one device", precision, (x, w, dy), implementation)
    assert_rounded(actual, expected("out", x, w, dy, in_nvfp4, in_square_blocks), 1e-5)


def in_square_blocks(w, axis):
    return in_nvfp4(w, 1, square=True)


def test_nvfp4_transforms_the_weight_gradient_alone():
    x, w, dy = operands("out")
    settings = {"dtype": "nvfp4", "stochastic_rounding": False}
    plain, turned = (
        product("out", "one device", Precision(**settings, hadamard=on), (x, w, dy))
        for on in (False, True)
    )

    def turn(a, axis):
        return np.asarray(hadamard.transformed(jnp.asarray(a, jnp.bfloat16), axis), np.float64)

    for a, b in zip(plain[:2], turned[:2], strict=True):
        np.testing.assert_array_equal(a, b)
    assert_rounded(turned, expected("out", x, w, dy, in_nvfp4, in_square_blocks, turn), 1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["in", "out"])
def test_nvfp4_on_meshes_is_as_near_to_the_exact_product(kind):
    """Each device takes the fp32 scale of its own part, and draws of its own."""
    arrays = operands(kind)
    as_it_is = {name: lambda x, axis: x for name in ("quantize", "quantize_weight")}
    exact = expected(kind, *arrays, **as_it_is)
    one, many = (
        [np.linalg.norm(a - e) / np.linalg.norm(e) for a, e in zip(actual, exact, strict=True)]
        for actual in (
            product(kind, name, Precision(dtype="nvfp4"), arrays) for name in ("one device", "all")
        )
    )
    # e2m1 rounds by 2^-2 at most, blocks of normal numbers by 0.1 in the mean square.
    assert max(one) < 0.25
    np.testing.assert_allclose(many, one, rtol=0.1)


def test_stochastic_rounding_draws_anew_and_is_repeatable():
    x, w, dy = operands("out")
    once, again = (product("out", "one device", Precision(dtype="nvfp4"), (x, w, dy)) for _ in "ab")
    for a, b in zip(once, again, strict=True):
        np.testing.assert_array_equal(a, b)
    seeds = draws.fold(jnp.uint32(0), 0, jnp.arange(4)[:, None], jnp.arange(3))
    later = draws.fold(seeds, 7, 0)
    assert np.unique(np.r_[np.ravel(seeds), np.ravel(later)]).size == 24


WIDTHS = {sizes.features: sizes for sizes in kernels.CANDIDATES}
"""One of the sizes that a tuner may choose for each width of a tile. The interpreter ignores
`Launch`."""


def assert_parts_alone_are_the_same(quantize, both):
    """A kernel that quantizes along one dimension gives what it gives along both."""
    for wanted, part in zip(((True, False), (False, True)), both, strict=True):
        (alone,) = quantize(wanted)
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(part), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("width", tiered([128], WIDTHS))
@pytest.mark.parametrize("shape", tiered([(3, 32, 96)], [(1, 128, 256), (3, 32, 96)]))
def test_the_kernel_of_mxfp8_is_the_definition(shape, width):
    x = jnp.asarray(RNG.normal(size=shape), jnp.bfloat16)
    quantize = partial(kernels.quantize_mxfp8, x, None, sizes=WIDTHS[width])
    both = quantize(kernels.BOTH)
    assert_parts_alone_are_the_same(quantize, both)
    for got, axes in zip(both, ((), (1, 2)), strict=True):
        want = mxfp8(x.swapaxes(*axes) if axes else x, 2).packed()
        np.testing.assert_array_equal(got.values, want.values)
        np.testing.assert_array_equal(got.scales, want.scales)


@pytest.mark.parametrize("turn", tiered([True], [False, True]))
@pytest.mark.parametrize("seeds", tiered([(5, 77)], [None, (5, 77)]))
@pytest.mark.parametrize("width", tiered([64], WIDTHS))
def test_the_kernels_of_nvfp4_are_the_definition(width, seeds, turn):
    x = jnp.asarray(RNG.normal(size=(2, 128, 192)), jnp.bfloat16)
    seeds = None if seeds is None else jnp.asarray(seeds, jnp.uint32)
    quantize = partial(kernels.quantize_nvfp4, x, seeds, turn, None, sizes=WIDTHS[width])
    both = quantize(kernels.BOTH)
    assert_parts_alone_are_the_same(quantize, both)
    transposed = (hadamard.transformed(x, 1) if turn else x).swapaxes(1, 2)
    for n, (got, exact) in enumerate(zip(both, (x, transposed), strict=True)):
        uniform = None if seeds is None else partial(draws.uniform, seeds[n])
        amax = jnp.max(jnp.abs(exact)).astype(jnp.float32)
        want = nvfp4(exact, (2,), amax, uniform).packed()
        np.testing.assert_array_equal(got.values, want.values)
        np.testing.assert_array_equal(got.scales, want.scales)
        assert got.inverse == want.inverse


WIDE = (
    "model.embed=256", "model.attention={heads: 8, kv_heads: 4, head_dim: 32}",
    "model.mlp.ffn=256", "model.init_std=0.02", "execution.remat=full", "batch.sequence_length=128",
)  # fmt: skip
"""Sizes that blocks divide on every mesh."""

SLICED = "model.experts={count: 12, top_k: 4}"
"""Eight ranks do not divide these experts, so each holds slices of them at rest."""

RUNS = {
    "fsdp 2 x context 2 x tensor 2": (
        "parallelism.fsdp=2", "parallelism.context=2", "parallelism.tensor=2",
    ),
    "pipeline 2 x fsdp 2 x tensor 2": (
        "parallelism.pipeline=2", "parallelism.fsdp=2", "parallelism.tensor=2",
        "model.layers=4", "batch.microbatch=1",
    ),
    "dropless experts, fsdp 2 x expert 2 x tensor 2": (
        "parallelism.fsdp=2", "parallelism.expert=2", "parallelism.tensor=2",
    ),
    "all experts on each rank, fsdp 4 x data 2": ("parallelism.fsdp=4",),
    "summed in layers, fsdp 2 x tensor 2 x data 2": (
        "parallelism.fsdp=2", "parallelism.tensor=2", "execution.replica_sums=layer",
    ),
    # 16 rows of a weight on a rank: copies with blocks along rows are made where it is gathered.
    "all experts on each rank, fsdp 8 in half blocks": (
        "parallelism.fsdp=8", "model.embed=128", SLICED,
    ),
    "experts on two ranks, fsdp 4 in half blocks": (
        "parallelism.fsdp=4", "parallelism.expert=2", "model.embed=64", SLICED,
    ),
    "all experts on each rank, fsdp 8 in half square blocks": (
        "parallelism.fsdp=8", "model.embed=64", SLICED,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "name"), list(zip(("nvfp4", *["mxfp8"] * 6, "nvfp4"), RUNS, strict=True))
)
def test_runs_on_meshes(dtype, name):
    sizes = [change for change in RUNS[name] if change.startswith("model.")]
    family, settings = "llama31_8b_bf16", (*WIDE, f"precision.dtype={dtype}")
    if "experts" in name:
        family = "qwen3_30b_a3b_bf16"
        settings = (*(s for s in settings if "mlp" not in s), "model.experts.ffn=64")
    one = same_sequences(tiny_run(*settings, *sizes, family=family))
    many = same_sequences(tiny_run(*settings, *RUNS[name], devices=8, family=family))
    assert many[0] == pytest.approx(one[0], rel=2e-4 if dtype == "mxfp8" else 5e-4)
    # MXFP8 has the same blocks on all meshes; sums in another order fall on other sides of
    # roundings to 4 bits. NVFP4 has other fp32 scales and other draws: noise, orthogonal to the
    # gradient.
    along, apart = projection(many[1], one[1]), np.sqrt(
        sum(np.sum((many[1][n] - g) ** 2) for n, g in one[1].items())
        / sum(np.sum(g**2) for g in one[1].values())
    )  # fmt: skip
    assert along == pytest.approx(1, abs=0.01 if dtype == "mxfp8" else 0.05)
    assert apart < {"mxfp8": 0.05, "nvfp4": 0.5}[dtype]


@pytest.mark.nightly
def test_last_layers_in_bf16():
    """Beside a layer in bf16, and with a scan of one layer: near bf16's loss, and not equal."""
    settings = (*WIDE, "model.layers=2")
    bf16, mixed = (
        same_sequences(tiny_run(*settings, *changes))[0]
        for changes in (
            ("precision.dtype=bf16",), ("precision.dtype=nvfp4", "precision.last_bf16_layers=1")
        )
    )  # fmt: skip
    assert mixed == pytest.approx(bf16, rel=0.01)
    assert mixed != bf16


def test_sizes_that_blocks_do_not_divide():
    run = tiny_run("precision.dtype=mxfp8", "model.mlp.ffn=72")
    with mesh_of(run):
        state, batch = new_state(run), sequences(run)
        with pytest.raises(RecipeError, match="32 must divide the 72 columns of a weight"):
            jax.eval_shape(partial(gradients, run=run), state, *batch)


def test_a_gpu_without_the_format_is_refused_before_anything_is_compiled():
    run = tiny_run("precision.dtype=mxfp8")
    check_run(run, "gpu", PLANNED["b200"])
    with pytest.raises(RecipeError, match="mxfp8: H100 does not support it; b200"):
        check_run(run, "gpu", PLANNED["h100"])


def test_parts_of_a_microbatch_round_by_numbers_of_their_own():
    operand = quantized.Operand(
        weight=jnp.zeros(1), stored=None, scale_inv=None, observed=None, seed=jnp.uint32(3),
        name="down", precision=Precision(dtype="nvfp4"),
    )  # fmt: skip
    assert len({int(quantized.seeded(operand, part).seed) for part in range(4)}) == 4
    assert quantized.seeded(operand, 0) is operand
    assert quantized.seeded(None, 1) is None
