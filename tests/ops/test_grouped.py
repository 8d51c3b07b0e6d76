"""Every implementation of grouped matmuls against float64, row by row; the Pallas kernels in
Pallas's interpreter."""

import importlib
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except
from compiled import needs_compiler

from jaxbench.errors import RecipeError
from jaxbench.ops import grouped
from jaxbench.ops.fp8.per_tensor import GRADIENTS, VALUES
from jaxbench.ops.grouped import BLOCK, NONE, pallas, xla
from jaxbench.recipe.execution import Execution
from jaxbench.recipe.families import MODELS

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


def interpreted(name):
    return partial(getattr(pallas, name), interpret=True)


PRODUCTS = {
    "xla": (xla.to_permuted, xla.from_permuted, xla.weights),
    "pallas": tuple(map(interpreted, ("to_permuted", "from_permuted", "weights"))),
}


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


@pytest.mark.parametrize(
    "case",
    slow_except(
        [("xla", "some", "bfloat16"), ("pallas", "some", "bfloat16")],
        product(PRODUCTS, RECEIVED, ("float32", "bfloat16")),
    ),
    ids="-".join,
)
def test_products_of_each_row(case):
    name, received, dtype = case
    received, dtype = RECEIVED[received], jnp.dtype(dtype)
    groups = grouped.group(jnp.asarray(received), SLOTS, expected=1)
    place, of_block = np.asarray(groups.place), np.asarray(groups.group)
    filled = np.flatnonzero(place != NONE)
    group = of_block[place[filled] // BLOCK]
    # What has not arrived is undefined.
    x, y = np.full((place.size, D), np.nan), np.zeros((of_block.size * BLOCK, N))
    x[filled] = RNG.normal(size=(filled.size, D))
    y[place[filled]] = RNG.normal(size=(filled.size, N))
    x, y, w = (jnp.asarray(a, dtype) for a in (x, y, RNG.normal(size=(4, D, N))))
    exact = [np.asarray(a, np.float64) for a in (x, y, w)]

    permuted, arriving, gradient = np.zeros(y.shape), np.zeros(x.shape), np.zeros(w.shape)
    permuted[place[filled]] = np.einsum("RD,RDN->RN", exact[0][filled], exact[2][group])
    arriving[filled] = np.einsum("RN,RDN->RD", exact[1][place[filled]], exact[2][group])
    for row, e in zip(filled, group, strict=True):
        gradient[e] += np.outer(exact[0][row], exact[1][place[row]])

    to_permuted, from_permuted, weights = PRODUCTS[name]
    # Sums of up to 400 products in fp32; one rounding of the result.
    eps = EPS32 * 30 if dtype == jnp.float32 else EPS16
    for actual, expected in (
        (to_permuted(x, w, groups), permuted),
        (np.asarray(from_permuted(y, w, groups), np.float64)[filled], arriving[filled]),
        (weights(x, y, groups), gradient),
    ):
        actual = np.asarray(actual, np.float64)
        assert actual.shape == expected.shape
        tolerance = eps * np.abs(expected).max(initial=1)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.fixture
def benchmark(monkeypatch):
    """`benchmarks/grouped_matmuls.py`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("grouped_matmuls")


@pytest.mark.parametrize("of", ["forward", "input", "weights"])
def test_kernels_multiply_the_rows_that_arrive(benchmark, of):
    """Counted as they run: neither slots nor groups without rows are multiplied. What the kernels
    declare to plans is the same, for whole blocks."""
    found = benchmark.on_cpu("pallas", of)
    assert found["FLOPs"] == 1
    assert found["error"] < EPS16


@needs_compiler
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_a_real_layer_compile(benchmark, name):
    """Those of Qwen3 30B on 8 ranks. XLA (jax 0.11.2) aborts here if told that the blocks whose
    gradients it sums are sorted."""
    for of in benchmark.PRODUCTS:
        found = benchmark.compiled(name, "h100", "Qwen3 30B", "bf16", of)
        # A slot in ten stays empty, and of a group's last block half.
        assert found["FLOPs"] == (1 if name == "pallas" else pytest.approx(1.13, abs=0.01))
        assert found["launches"] == 1 or name == "xla"


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_fp8_operands(name):
    """Exact but for sums and the rounding to bf16: two FP8 numbers multiply exactly in fp32."""
    received = RECEIVED["some"]
    groups = grouped.group(jnp.asarray(received), SLOTS, expected=1)
    filled = np.asarray(groups.row) != NONE
    x = jnp.asarray(RNG.normal(size=(3 * SLOTS, D)), VALUES)
    dy = jnp.asarray(RNG.normal(size=(filled.size, N)) * filled[:, None], GRADIENTS)
    w = jnp.asarray(RNG.normal(size=(4, D, N)), VALUES)
    scale = jnp.asarray(0.37, jnp.float32)
    to_permuted, from_permuted, weights = PRODUCTS[name]
    wide = [jnp.asarray(a, jnp.float32) for a in (x, w, dy)]
    for actual, expected in (
        (to_permuted(x, w, groups, scale), xla.to_permuted(wide[0], wide[1], groups)),
        (from_permuted(dy, w, groups, scale), xla.from_permuted(wide[2], wide[1], groups)),
        (weights(x, dy, groups, scale), xla.weights(wide[0], wide[2], groups)),
    ):
        assert actual.dtype == jnp.bfloat16
        rows = np.asarray(groups.place) != NONE if len(actual) == len(x) else slice(None)
        exact = 0.37 * np.asarray(expected, np.float64)[rows]
        actual = np.asarray(actual, np.float64)[rows]
        np.testing.assert_allclose(actual, exact, rtol=2**-8, atol=1e-4)


def test_the_kernels_are_chosen_where_they_can():
    auto, pallas_alone = Execution(), Execution(grouped_matmul="pallas")
    cfg = MODELS["qwen3_30b_a3b"]
    assert grouped.choose(auto, cfg, "bf16", "gpu") == "pallas"
    assert grouped.choose(auto, cfg, "fp32", "gpu") == "xla"
    assert grouped.choose(auto, cfg, "fp8", "cpu") == "xla"
    with pytest.raises(RecipeError, match="grouped_matmul = pallas: pallas does not run on a cpu"):
        grouped.choose(pallas_alone, cfg, "bf16", "cpu")
    odd = replace(cfg, experts=replace(cfg.experts, ffn=1000))
    assert grouped.choose(auto, odd, "bf16", "gpu") == "xla"
    message = "needs model.experts.ffn = 1000 to be a multiple of 64; xla multiplies in bf16 there"
    with pytest.raises(RecipeError, match=message):
        grouped.choose(auto, odd, "fp8", "gpu")
