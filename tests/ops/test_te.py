"""Transformer Engine's calls in programs for absent GPUs, beside XLA's; and what it refuses."""

import re
import sys

import jax
import pytest
from compiled import Compiled, needs_compiler
from engine import needs_te

from jaxbench.errors import RecipeError
from jaxbench.ops import quantized
from jaxbench.ops.quantized import te
from jaxbench.plan import driver
from jaxbench.recipe.settings import Precision
from jaxbench.train.program import check_program, kernels

LLAMA = (
    "llama31_8b_fp8", 8, "model.layers=2", "batch.global_batch=16", "batch.microbatch=1",
    "model.vocabulary=4096", "execution.remat=none",
)  # fmt: skip
GROK = (
    "grok1_314b_fp8", 8, "model.layers=1", "batch.global_batch=32", "batch.microbatch=4",
    "model.vocabulary=4096",
)  # fmt: skip


def by(implementation, name, gpus, *changes):
    """A row compiled with an implementation."""
    driver.load_stub(9)
    return Compiled(name, gpus, *changes, f"precision.implementation={implementation}")


@pytest.fixture(scope="module")
def llama():
    return by("te", *LLAMA)


@needs_te[0]
@needs_te[1]
@needs_compiler
class TestCompiled:
    def test_products_are_its_and_quantized_once(self, llama):
        """Two layers, two microbatches; input and gradient of each product, weights by XLA."""
        products = quantized.compiled_products(llama.program, "fp8")
        assert set(products.values()) == {2 * 2 * 3}
        calls = llama.program.custom_calls()
        assert calls[te.GEMM] == sum(products.values())
        assert 3 * calls[te.QUANTIZE] == 2 * calls[te.GEMM]
        assert not [name for name in calls if name.endswith("$f8")]

    def test_weights_are_gathered_in_fp8(self, llama):
        plain = by("xla", *LLAMA)
        gathered = [
            sum(c.bytes * c.count for c in row.collectives if c.kind == "all-gather")
            for row in (llama, plain)
        ]
        assert gathered[0] == gathered[1]
        assert llama.executed_ratio == plain.executed_ratio

    @pytest.mark.parametrize("scaling", ["delayed", "current"])
    def test_scaling_is_what_the_recipe_says(self, llama, scaling):
        row = llama
        if scaling == "current":
            row = by("te", *LLAMA, "model.layers=1", "precision.scaling=current")
        modes = set(re.findall(r"scaling_mode = (\d+)", row.compiled.as_text()))
        assert modes == {te.SCALING[scaling]}
        with jax.set_mesh(row.mesh):
            check_program(row.compiled, row.run)

    def test_another_scaling_is_an_error(self, llama):
        other = Precision(dtype="fp8", scaling="current", implementation="te")
        assert "called with the modes ['1'] instead of 3" in te.problem(llama.program, other)

    def test_experts_are_multiplied_by_xla(self):
        row = by("te", *GROK)
        calls = row.program.custom_calls()
        # qkv and out by the one, gate_up and down of the experts by the other.
        assert calls[te.GEMM] >= 2 * 3 * row.run.accumulation
        assert calls["__cublas$lt$matmul$f8"] >= 2 * 3 * row.run.accumulation
        with jax.set_mesh(row.mesh):
            check_program(row.compiled, row.run)
            assert kernels(row.run)["products"] == "fp8 by te, those of experts by xla"


def test_what_it_cannot_do_is_one_line(monkeypatch):
    current = Precision(dtype="fp8", scaling="current", margin=1, implementation="te")
    with pytest.raises(RecipeError, match=r"current scaling leaves no precision\.margin; use auto"):
        quantized.choose(current, "gpu")
    with pytest.raises(RecipeError, match="needs an NVIDIA GPU"):
        quantized.choose(Precision(dtype="fp8", implementation="te"), "cpu")


def test_auto_is_what_was_planned_whatever_is_installed(monkeypatch):
    monkeypatch.setattr(te, "_unimportable", lambda: None)
    assert quantized.choose(Precision(dtype="fp8"), "gpu") == "xla"
    assert quantized.choose(Precision(dtype="fp8", implementation="te"), "gpu") == "te"


def test_without_it_the_reason_is_one_line(monkeypatch):
    """Where it is not installed, or one of its libraries is missing."""
    for name in ("transformer_engine", "transformer_engine.jax"):
        monkeypatch.setitem(sys.modules, name, None)
    te._unimportable.cache_clear()
    try:
        reason = "Transformer Engine cannot be imported .README: Transformer Engine.: [^\n]+$"
        with pytest.raises(RecipeError, match=rf"precision\.implementation = te: {reason}"):
            quantized.choose(Precision(dtype="fp8", implementation="te"), "gpu")
    finally:
        te._unimportable.cache_clear()
