"""Every implementation of grouped matmuls against float64, row by row; the Pallas kernels in
Pallas's interpreter."""

import re
from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on, put
from cases import tiered
from compiled import needs_compiler
from test_block_scaled import OneProduct, assert_rounded, in_mxfp8

from jaxbench import mesh
from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import PLANNED
from jaxbench.ops import grouped, quantized
from jaxbench.ops.grouped import BLOCK, NONE, batched, pallas, scaled, xla
from jaxbench.ops.grouped.groups import take_bytes
from jaxbench.ops.implementations import Task
from jaxbench.ops.kernel_sizes import Choices, using
from jaxbench.ops.pallas_call import ignoring_pallas_deprecation
from jaxbench.ops.quantized import block_scaled, kernels
from jaxbench.ops.quantized.block_formats import FORMATS
from jaxbench.ops.quantized.per_tensor import GRADIENTS, VALUES
from jaxbench.plan.absent import compile_only_devices
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.settings import Execution, Precision

EPS32, EPS16 = np.finfo(np.float32).eps, 2**-8
RNG = np.random.default_rng(0)
SLOTS, D, N = 200, 128, 64
RECEIVED = {
    "some": np.array([[50, 0, 100, 7], [0, 0, 150, 50], [3, 1, 0, 0]]),
    "one group has all": np.array([[0, 0, 200, 0], [0, 0, 200, 0]]),
    "nothing arrives": np.array([[0, 0, 0, 0]]),
    "whole blocks": np.array([[128, 0, 0, 0], [0, 0, 0, 128]]),
}
"""Rows of each of four groups from each rank."""


PRODUCTS = {
    "xla": (xla.to_permuted, xla.from_permuted, xla.weights),
    "pallas": (pallas.to_permuted, pallas.from_permuted, pallas.weights),
    "batched": (batched.to_permuted, batched.from_permuted, batched.weights),
}


def groups_of(name, received):
    """The groups of an implementation. Equal ones have room for all rows."""
    received = jnp.asarray(received)
    if name == "batched":
        return grouped.equal_groups(received, SLOTS, 4 * BLOCK)
    return grouped.group(received, SLOTS, expected=1)


@pytest.fixture(params=RECEIVED)
def received(request):
    return RECEIVED[request.param]


def test_each_row_has_one_place_in_its_group(received):
    groups = grouped.group(jnp.asarray(received), SLOTS, expected=1)
    row, place, of_block, ends = map(
        np.asarray, (groups.row, groups.place, groups.group, groups.ends)
    )
    assert row.size == of_block.size * BLOCK
    placed = np.flatnonzero(place != NONE)
    np.testing.assert_array_equal(row[place[placed]], placed)
    assert np.sum(row != NONE) == placed.size == received.sum()
    for rank, counts in enumerate(received):
        of_row = np.repeat(np.arange(4), counts)
        places = place[rank * SLOTS : rank * SLOTS + of_row.size]
        np.testing.assert_array_equal(of_block[places // BLOCK], of_row)
    # Work follows the rows: no block is without any, but for those behind the last group's.
    blocks = -(-received.sum(0) // BLOCK)
    np.testing.assert_array_equal(ends, np.cumsum(blocks))
    assert np.all(of_block[: ends[-1]] < 4)
    assert np.all(of_block[ends[-1] :] == 4)


def test_rows_beyond_the_capacity_of_a_group_have_no_place():
    """The ranks take turns in their order; a group that overflows leaves the others alone."""
    received = RECEIVED["some"]
    groups = grouped.equal_groups(jnp.asarray(received), SLOTS, BLOCK)
    row, place = np.asarray(groups.row), np.asarray(groups.place)
    arrived = [r * SLOTS + np.arange(n.sum()) for r, n in enumerate(received)]
    of = [np.repeat(np.arange(4), n) for n in received]
    for e in range(4):
        rows = np.concatenate([a[o == e] for a, o in zip(arrived, of, strict=True)])
        kept, lost = rows[:BLOCK], rows[BLOCK:]
        np.testing.assert_array_equal(row[e * BLOCK :][: kept.size], kept)
        np.testing.assert_array_equal(place[kept], e * BLOCK + np.arange(kept.size))
        assert np.all(place[lost] == NONE)
        assert np.all(row[e * BLOCK + kept.size : (e + 1) * BLOCK] == NONE)
    assert received.sum(0).max() > BLOCK


@pytest.mark.parametrize(
    "case",
    tiered(
        [(name, "some", "bfloat16") for name in PRODUCTS],
        [
            case
            for case in product(PRODUCTS, RECEIVED, ("float32", "bfloat16"))
            if case[::2] != ("pallas", "float32")  # refused
        ],
    ),
    ids="-".join,
)
def test_products_of_each_row(case):
    name, received, dtype = case
    received, dtype = RECEIVED[received], jnp.dtype(dtype)
    groups = groups_of(name, received)
    place, of_block = np.asarray(groups.place), np.asarray(groups.group)
    filled = np.flatnonzero(place != NONE)
    group = of_block[place[filled] // BLOCK]
    # What has not arrived is undefined.
    x, y = np.full((place.size, D), np.nan), np.zeros((of_block.size * BLOCK, N))
    x[filled] = RNG.normal(size=(filled.size, D))
    y[place[filled]] = RNG.normal(size=(filled.size, N))
    x, y, w = (jnp.asarray(a, dtype) for a in (x, y, RNG.normal(size=(4, D, N))))
    exact = [np.asarray(a, np.float64) for a in (x, y, w)]

    permuted, back, gradient = np.zeros(y.shape), np.zeros((len(y), D)), np.zeros(w.shape)
    permuted[place[filled]] = np.einsum("RD,RDN->RN", exact[0][filled], exact[2][group])
    back[place[filled]] = np.einsum("RN,RDN->RD", exact[1][place[filled]], exact[2][group])
    for row, e in zip(filled, group, strict=True):
        gradient[e] += np.outer(exact[0][row], exact[1][place[row]])

    to_permuted, from_permuted, weights = PRODUCTS[name]
    # Sums of up to 400 products in fp32; one rounding of the result.
    eps = EPS32 * 30 if dtype == jnp.float32 else EPS16
    taken = np.repeat(of_block < 4, BLOCK)
    for actual, expected in (
        (to_permuted(x, w, groups), permuted),
        (jnp.where(taken[:, None], from_permuted(y, w, groups), 0), back),
        (weights(x, y, groups), gradient),
    ):
        actual = np.asarray(actual, np.float64)
        assert actual.shape == expected.shape
        tolerance = eps * np.abs(expected).max(initial=1)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def tokens_with_uses(name, uses):
    """(tokens, groups of their uses, a copy of the token for each use, groups of the copies)."""
    groups, count = groups_of(name, [[60, 0, 110, 30]]), 64
    tokens = jnp.asarray(RNG.normal(size=(count, D)), jnp.bfloat16)
    kept = count * uses
    # Only so many rows arrive: the others have no place.
    place = jnp.where(jnp.arange(SLOTS) < kept, groups.place, NONE)[:kept]
    row = jnp.where(groups.row < kept, groups.row, NONE)
    alone = replace(groups, row=row, place=place)
    return tokens, replace(alone, uses=uses), jnp.repeat(tokens, uses, axis=0), alone


@pytest.mark.parametrize("name", PRODUCTS)
def test_rows_with_several_uses(name):
    """The results are those of a copy of the token for each use."""
    uses = 3
    tokens, several, copies, alone = tokens_with_uses(name, uses)
    w = jnp.asarray(RNG.normal(size=(4, D, N)), jnp.bfloat16)
    y = jnp.where(alone.row[:, None] == NONE, 0, RNG.normal(size=(alone.row.size, N)))
    y = y.astype(jnp.bfloat16)
    to_permuted, from_permuted, weights = PRODUCTS[name]
    np.testing.assert_array_equal(to_permuted(tokens, w, several), to_permuted(copies, w, alone))
    np.testing.assert_array_equal(weights(tokens, y, several), weights(copies, y, alone))
    each = np.asarray(alone.arriving(from_permuted(y, w, alone)), np.float64)
    total = np.asarray(several.arriving(from_permuted(y, w, several)), np.float64)
    expected = each.reshape(-1, uses, D).sum(1)
    np.testing.assert_allclose(total, expected, rtol=EPS16, atol=EPS16 * np.abs(each).max())


@pytest.mark.parametrize(
    "case",
    tiered(
        [],
        product(pallas.FASTEST, ["bfloat16", "float8_e4m3fn"]),
        slow=[(name, "float8_e4m3fn") for name in pallas.FASTEST],
    ),
    ids="-".join,
)
def test_a_matmul_is_the_same_with_all_sizes_that_a_tuner_may_choose(case):
    """Sums of small whole numbers are exact in any order. The interpreter ignores `Launch`."""
    name, dtype = case
    groups = grouped.group(jnp.asarray(RECEIVED["some"]), SLOTS, expected=400)
    shapes = {"x": (groups.place.size, 512), "w": (4, 512, 256), "y": (groups.row.size, 256)}
    values = {k: jnp.asarray(RNG.integers(-2, 3, shape), dtype) for k, shape in shapes.items()}
    operands = {"to_permuted": "xw", "from_permuted": "yw", "weights": "xy"}[name]
    scales = (jnp.ones(1), jnp.ones(1)) if values["x"].itemsize == 1 else None
    multiply = partial(getattr(pallas, name), *(values[k] for k in operands), groups, scales)
    with using(choices := Choices()):
        jax.eval_shape(multiply)
    (case,) = choices.asked.values()
    tiles = {replace(sizes, launch=pallas.LAUNCHES[0]) for sizes in case.candidates}
    assert len(tiles) == (4 if dtype == "float8_e4m3fn" else 2)
    taken = np.repeat(np.asarray(groups.group) < 4, BLOCK)
    defined = taken if name == "from_permuted" else slice(None)
    first, *others = (np.asarray(multiply(sizes=of), np.float32)[defined] for of in tiles)
    assert np.abs(first).max() > 10
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize(("expected", "multiplied"), [(300, 300 + 2 * 64), (10**6, 4 * BLOCK)])
def test_plans_count_half_a_block_of_padding_for_each_group(expected, multiplied):
    """But not more rows than the matmul has."""
    groups = grouped.Groups(
        row=np.zeros(4 * BLOCK), place=None, group=None, ends=np.zeros(2), expected=expected
    )
    assert groups.multiplied == multiplied


@pytest.fixture
def benchmark(benchmark_script):
    """`benchmarks/grouped_matmuls.py`."""
    return benchmark_script("grouped_matmuls")


@pytest.mark.parametrize("of", ["forward", "input", "weights"])
def test_kernels_multiply_the_rows_that_arrive(benchmark, of):
    """Counted as they run: neither slots nor groups without rows are multiplied. What the kernels
    declare to plans is the same, for whole blocks."""
    found = benchmark.on_cpu("pallas", of)
    assert found["FLOPs"] == 1
    assert found["error"] < EPS16


@needs_compiler
@pytest.mark.parametrize("name", ["xla", "pallas"])
def test_products_of_a_real_layer_compile(benchmark, name):
    """Those of Qwen3 30B on 8 ranks. XLA (jax 0.11.2) aborts here if told that the blocks whose
    gradients it sums are sorted."""
    for of in benchmark.PRODUCTS:
        found = benchmark.compiled(name, "h100", "Qwen3 30B", "bf16", of)
        # 16 groups of 4096 rows: half of a group's last block is padding. A slot in ten is empty.
        padded = 1 + 64 / 4096 if name == "pallas" else pytest.approx(1.13, abs=0.01)
        assert found["FLOPs"] == padded
        assert found["launches"] == 1 or name == "xla"


@pytest.mark.parametrize(
    ("name", "platform"), [*((n, "cpu") for n in PRODUCTS), ("batched", "gpu")]
)
def test_products_of_fp8_operands(name, platform, monkeypatch):
    """Exact but for sums and the rounding to bf16: two FP8 numbers multiply exactly in fp32, and
    these scales times an FP8 number are bf16 numbers. On a GPU the second scale multiplies the
    result, exactly if it is a power of two."""
    monkeypatch.setattr(batched.mesh, "platform", lambda: platform)
    groups = groups_of(name, RECEIVED["some"])
    filled = np.asarray(groups.row) != NONE
    x = jnp.asarray(RNG.normal(size=(3 * SLOTS, D)), VALUES)
    dy = jnp.asarray(RNG.normal(size=(filled.size, N)) * filled[:, None], GRADIENTS)
    w = jnp.asarray(RNG.normal(size=(4, D, N)), VALUES)
    scales = jnp.asarray(1.5, jnp.float32), jnp.asarray(0.25, jnp.float32)
    to_permuted, from_permuted, weights = PRODUCTS[name]
    wide = [jnp.asarray(a, jnp.float32) for a in (x, w, dy)]
    for actual, expected in (
        (to_permuted(x, w, groups, scales), xla.to_permuted(wide[0], wide[1], groups)),
        (from_permuted(dy, w, groups, scales), xla.from_permuted(wide[2], wide[1], groups)),
        (weights(x, dy, groups, scales), xla.weights(wide[0], wide[2], groups)),
    ):
        assert actual.dtype == jnp.bfloat16
        rows = filled if len(actual) == filled.size else slice(None)
        exact = 0.375 * np.asarray(expected, np.float64)[rows]
        actual = np.asarray(actual, np.float64)[rows]
        np.testing.assert_allclose(actual, exact, rtol=2**-8, atol=1e-4)


def rows_of(groups):
    """Arriving rows, undefined where none has arrived, and permuted ones, zeros there; bf16."""
    filled = np.asarray(groups.row) != NONE
    x = np.full((groups.place.size, D), np.nan)
    x[np.asarray(groups.place) != NONE] = RNG.normal(size=(filled.sum(), D))
    y = RNG.normal(size=(filled.size, N)) * filled[:, None]
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(y, jnp.bfloat16)


@pytest.mark.parametrize(
    "case",
    tiered([("xla", True), ("batched", False)], product(("xla", "batched"), (True, False))),
    ids=str,
)
def test_mxfp8_products_and_gradients(case):
    """Each of the three from operands in blocks along its contraction; rows in blocks of one
    group."""
    name, into = case
    groups = groups_of(name, RECEIVED["some"])
    x, y = rows_of(groups)
    w = jnp.asarray(RNG.normal(size=(4, D, N)), jnp.bfloat16)
    dot = partial(grouped.to_permuted if into else grouped.from_permuted, name)

    def run(x, w, dy, groups):
        stack = OneProduct(mesh.accumulating(w[None]), experts=True)
        (scaled,) = quantized.Quantization.of([stack], [], Precision(dtype="mxfp8")).quantized

        def product(x, stack):
            block = quantized.attach(*jax.tree.map(lambda leaf: leaf[0], (stack, scaled)))
            return dot(x, block.w, groups)

        y, vjp = jax.vjp(product, x, stack)
        return y, *vjp(dy)

    with on("one device"):
        operands = [put(a, d, dtype=a.dtype) for a, d in ((x, "slots embed"), (y, "slots embed"))]
        weight = put(w, "experts expert_embed expert_ffn", mesh.WEIGHT, dtype=w.dtype)
        inputs, gradient = operands if into else operands[::-1]
        got, d_inputs, d_stack = jax.jit(run)(inputs, weight, gradient, groups)
        d_weight = d_stack.w[...][0]

    row, of = np.asarray(groups.row), np.repeat(np.asarray(groups.group), BLOCK)
    filled, of = row != NONE, np.minimum(of, 3)
    x, y, w = (np.asarray(a, np.float64) for a in (x, y, w))
    permuted = np.zeros((row.size, D))
    permuted[filled] = x[row[filled]]
    long = np.einsum("RD,RDN->RN", in_mxfp8(permuted, 1), in_mxfp8(w, 1)[of])
    back = np.einsum("RN,RDN->RD", in_mxfp8(y, 1), in_mxfp8(w, 2)[of])
    a, b = in_mxfp8(permuted, 0), in_mxfp8(y, 0)
    sums = np.stack([a[of == e].T @ b[of == e] for e in range(4)])
    to_permuted, arriving = (got, d_inputs) if into else (d_inputs, got)
    actual = [np.asarray(a, np.float64) for a in (to_permuted, arriving, d_weight)]
    actual[1] = actual[1][row[filled]]
    assert_rounded(actual, (long, back[filled], sums), 1e-5)


@pytest.mark.parametrize("dtype", tiered(["mxfp8"], FORMATS))
def test_kernels_of_block_scaled_products(dtype):
    """Quantization of rows that are gathered, and of permuted ones, bit for bit; the products as
    those of what the operands represent."""
    groups = grouped.group(jnp.asarray(RECEIVED["some"]), SLOTS, expected=1)
    precision, of = Precision(dtype=dtype, hadamard=False), FORMATS[dtype]
    w = jnp.asarray(RNG.normal(size=(4, D, N)), jnp.bfloat16)
    amax = jnp.float32(np.abs(w).max())

    # XLA's compiler for CPUs stops at 4-bit operands of kernels in a larger program.
    together = jax.jit if dtype == "mxfp8" else lambda function: function

    @together
    def reference(x, y, w):
        plain = scaled.Dequantized(groups)
        weights = block_scaled.quantize_weight(w, amax, precision, experts=True)
        both, results, transposed = [], [], []
        for a, side in ((x, "first"), (y, "last")):
            both.append(plain.quantize(a[None], precision, side))
            values, of_rows = (blocks.unpacked(of) for blocks in both[-1])
            results.append(plain.by_weight(values, weights[side].unpacked(of), side))
            transposed.append(of_rows)
        first, last = transposed
        return weights, both, results, plain.of_weight(first, last)

    def by_kernels(x, y, weights):
        both, results, transposed = [], [], []
        for a, side in ((x, "first"), (y, "last")):
            by = scaled.Kernels(groups)
            _, rows = by.rows(a, side)
            both.append(
                kernels.quantize_mxfp8(a[None], rows)
                if dtype == "mxfp8"
                else kernels.quantize_nvfp4(a[None], None, False, rows)
            )
            values, of_rows = (blocks.unpacked(of) for blocks in both[-1])
            results.append(by.by_weight(values, weights[side].unpacked(of), side))
            transposed.append(of_rows)
        return both, results, scaled.of_weight(*transposed, groups)

    arrays = rows_of(groups)
    weights, both, results, gradient = reference(*arrays, w)
    actual_both, actual_results, actual_gradient = together(by_kernels)(*arrays, weights)
    taken = np.repeat(np.asarray(groups.group) < 4, BLOCK)
    for got, want in zip(actual_both, both, strict=True):
        for axis, (a, b) in enumerate(zip(got, want, strict=True), 1):
            for part, exact in ((a.values, b.values), (a.scales, b.scales)):
                kept = taken[:: taken.size // part.shape[axis]]
                np.testing.assert_array_equal(*(np.compress(kept, p, axis) for p in (part, exact)))
    for a, b in zip((*actual_results, actual_gradient), (*results, gradient), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        # NVFP4's scale of both tensors multiplies a sum, or its terms: a rounding to bf16 apart.
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("dtype", tiered(["mxfp8"], FORMATS))
def test_a_kernel_quantizes_rows_into_equal_groups(dtype):
    """Bit for bit what XLA quantizes, with blocks of tokens inside of each group."""
    groups = groups_of("batched", RECEIVED["some"])
    precision = Precision(dtype=dtype, hadamard=False)
    x = rows_of(groups)[0][None]
    rows = kernels.Rows(groups.row, jnp.ones(groups.row.size // kernels.SPAN, jnp.int32), 1, 4)
    want = block_scaled.quantize_activation(x, precision, rows)
    if dtype == "mxfp8":
        got = kernels.quantize_mxfp8(x, rows)
    else:
        got = kernels.quantize_nvfp4(x, None, False, rows)
    assert want[1].values.shape[:2] == (4, D)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", FORMATS)
def test_block_scaled_rows_with_several_uses_are_those_of_copies(dtype, wanted):
    """Bit for bit, whether they are gathered before or after they are quantized."""
    tokens, several, copies, alone = tokens_with_uses("batched", 3)
    precision = Precision(dtype=dtype, hadamard=False)

    def quantized_rows(x, groups):
        return batched.BlockMatmuls(groups).quantize(x[None], precision, "first", wanted=wanted)

    got, want = quantized_rows(tokens, several), quantized_rows(copies, alone)
    assert len(got) == sum(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).any()
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("width", [96, 90, 45])
def test_rows_of_bytes_are_taken_whatever_their_width(width):
    x = jnp.asarray(RNG.integers(256, size=(7, width)), jnp.uint8)
    taken = take_bytes(x, jnp.array([3, NONE, 0, 3]))
    np.testing.assert_array_equal(taken, np.stack([x[3], np.zeros_like(x[0]), x[0], x[3]]))


@needs_compiler
@pytest.mark.parametrize("dtype", FORMATS)
def test_tensor_cores_multiply_by_scales_of_blocks(dtype, tmp_path):
    """In the code that is made for Blackwell: neither operand is dequantized."""
    of, (device,) = FORMATS[dtype], compile_only_devices(PLANNED["gb200"], 1)
    received = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    groups = jax.eval_shape(partial(grouped.group, slots=SLOTS, expected=300), received)

    def products(x, y, w, groups):
        precision = Precision(dtype=dtype)
        weights = block_scaled.quantize_weight(w, jnp.max(w).astype(jnp.float32), precision, True)
        of_rows, results = [], []
        for rows, side in ((x, "first"), (y, "last")):
            both = scaled.Kernels(groups).quantize(rows[None], precision, side)
            values, transposed = (blocks.unpacked(of) for blocks in both)
            of_rows.append(transposed)
            weight = weights[side].unpacked(of)
            results.append(scaled.by_weight(values, weight, groups))
        return *results, scaled.of_weight(*of_rows, groups)

    options = {"xla_dump_to": str(tmp_path), "xla_dump_emitter_re": ".*"}
    of_one = jax.sharding.Mesh([device], ("gpu",))
    with ignoring_pallas_deprecation(), jax.set_mesh(of_one):
        placed = jax.sharding.NamedSharding(of_one, jax.sharding.PartitionSpec())
        shapes = (groups.place.size, D), (groups.row.size, N), (4, D, N)
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        arguments = jax.tree.map(lambda s: s.update(sharding=placed), (*arrays, groups))
        jax.jit(products).lower(*arguments).compile(compiler_options=options)
    code = "".join(path.read_text() for path in tmp_path.glob("*.ptx"))
    kind = {"mxfp8": "mxf8f6f4", "nvfp4": "mxf4nvf4"}[dtype]
    of_kernel = [part for part in code.split(".visible .entry ") if "grouped_scaled" in part[:99]]
    assert len(of_kernel) == 3
    for kernel in of_kernel:
        assert re.search(rf"tcgen05\.mma\S*kind::{kind}\.block_scale", kernel)
        assert not re.search(r"kind::(tf32|f16)|wgmma|mma\.sync", kernel)


def test_slots_of_each_expert_and_batched_matmuls_need_each_other():
    cfg = MODELS["qwen3_30b_a3b"]
    own = replace(cfg, experts=replace(cfg.experts, slots="own"))
    assert grouped.choose(Execution(), Task(own, "mxfp8", 4096, "gpu")) == "batched"
    with pytest.raises(RecipeError, match=r"pallas needs model\.experts\.slots = shared"):
        grouped.choose(Execution(grouped_matmul="pallas"), Task(own, "bf16", 4096, "gpu"))
    with pytest.raises(RecipeError, match=r"batched needs model\.experts\.slots = own"):
        grouped.choose(Execution(grouped_matmul="batched"), Task(cfg, "bf16", 4096, "gpu"))


def test_the_kernels_are_chosen_where_they_can():
    auto, pallas_alone = Execution(), Execution(grouped_matmul="pallas")
    cfg = MODELS["qwen3_30b_a3b"]
    assert grouped.choose(auto, Task(cfg, "bf16", 4096, "gpu")) == "pallas"
    assert grouped.choose(auto, Task(cfg, "fp32", 4096, "gpu")) == "xla"
    assert grouped.choose(auto, Task(cfg, "fp8", 4096, "cpu")) == "xla"
    assert grouped.choose(auto, Task(cfg, "nvfp4", 4096, "gpu")) == "pallas"
    with pytest.raises(RecipeError, match="multiplies in bf16 on a GPU, not in MXFP8"):
        grouped.choose(Execution(grouped_matmul="xla"), Task(cfg, "mxfp8", 4096, "gpu"))
    with pytest.raises(RecipeError, match="grouped_matmul = pallas does not run on a cpu"):
        grouped.choose(pallas_alone, Task(cfg, "bf16", 4096, "cpu"))
    assert grouped.choose(auto, Task(cfg, "bf16", 4096, "gpu", (9, 0))) == "pallas"
    ampere = Task(cfg, "bf16", 4096, "gpu", (8, 0))
    assert grouped.choose(auto, ampere) == "xla"
    with pytest.raises(RecipeError, match=r"needs compute capability 9\.0 or later, not 8\.0"):
        grouped.choose(pallas_alone, ampere)
    odd = replace(cfg, experts=replace(cfg.experts, ffn=1000))
    assert grouped.choose(auto, Task(odd, "bf16", 4096, "gpu")) == "xla"
    message = (
        "needs model.experts.ffn = 1000 to be a multiple of 64; xla multiplies in bf16 on a GPU"
    )
    with pytest.raises(RecipeError, match=message):
        grouped.choose(auto, Task(odd, "fp8", 4096, "gpu"))
