"""Transformer Engine's calls in programs for absent GPUs, next to XLA's; and what it refuses."""

import re
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on
from cases import tiered
from compiled import Compiled, needs_compiler
from engine import needs_te

from jaxbench.base.errors import RecipeError, RunFailed
from jaxbench.base.hardware import H100, PLANNED
from jaxbench.ops import quantized
from jaxbench.ops.quantized import te, te_blocks
from jaxbench.ops.quantized.block_formats import FORMATS, dequantized
from jaxbench.ops.quantized.block_scaled import quantize_activation
from jaxbench.plan import stubs
from jaxbench.recipe.settings import Precision
from jaxbench.train.program_checks import check_program, describe_kernels
from jaxbench.xla.custom_calls import AMAX, GEMM, QUANTIZE, quantized_matmuls

LLAMA = (
    "llama31_8b_fp8", 8, "model.layers=2", "batch.global_batch=16", "batch.microbatch=1",
    "model.vocabulary=4096", "execution.remat=none",
)  # fmt: skip
GROK = (
    "grok1_314b_fp8", 8, "model.layers=1", "batch.global_batch=32", "batch.microbatch=4",
    "model.vocabulary=4096",
)  # fmt: skip
BLOCKS = {
    "mxfp8": {GEMM, QUANTIZE},
    "nvfp4": {GEMM, QUANTIZE, AMAX},
}
"""The calls in a program of each format."""


def by(implementation, name, gpus, *changes, gpu=H100):
    """A row compiled with an implementation. A process has one stub, and what is traced does not
    depend on its capability."""
    stubs.load_for_engine(9)
    return Compiled(name, gpus, *changes, f"precision.implementation={implementation}", gpu=gpu)


@pytest.fixture(scope="module")
def llama():
    return by("te", *LLAMA)


@needs_te[0]
@needs_te[1]
@needs_compiler
class TestCompiled:
    def test_products_are_its_and_quantized_once(self, llama):
        """Two layers, two microbatches; input and gradient of each product, weights by XLA."""
        products = quantized_matmuls(llama.program, "fp8")
        assert set(products.values()) == {2 * 2 * 3}
        calls = llama.program.custom_calls()
        assert calls[GEMM] == sum(products.values())
        assert 3 * calls[QUANTIZE] == 2 * calls[GEMM]
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
        precision = replace(llama.run.precision, scaling="current")
        with jax.set_mesh(llama.mesh), pytest.raises(RunFailed, match=r"modes \['1'\]; expected 3"):
            check_program(llama.compiled, replace(llama.run, precision=precision))

    def test_experts_are_multiplied_by_xla(self):
        row = by("te", *GROK)
        calls = row.program.custom_calls()
        # qkv and out by the one, gate_up and down of the experts by the other.
        assert calls[GEMM] >= 2 * 3 * row.run.accumulation
        assert calls["__cublas$lt$matmul$f8"] >= 2 * 3 * row.run.accumulation
        with jax.set_mesh(row.mesh):
            check_program(row.compiled, row.run)
            assert describe_kernels(row.run)["products"] == "fp8 by te, but by xla for experts"

    @pytest.mark.parametrize("dtype", tiered([], BLOCKS, slow=["nvfp4"]))
    def test_block_scaled_products_are_its(self, dtype):
        """Two layers of one microbatch: three products of each weight, whose operands one call
        makes of each activation; and weights as XLA's products gather them."""
        settings = f"precision.dtype={dtype}", "batch.global_batch=8"
        row, plain = (by(name, *LLAMA, *settings, gpu=PLANNED["gb200"]) for name in ("te", "xla"))
        products = quantized_matmuls(row.program, dtype)
        assert products == quantized_matmuls(plain.program, dtype)
        calls = row.program.custom_calls()
        assert {name for name in calls if name.startswith("te_")} == BLOCKS[dtype]
        assert calls[GEMM] == sum(products.values())
        assert {3 * calls[name] for name in BLOCKS[dtype] - {GEMM}} == {2 * calls[GEMM]}
        gathered = [
            sum(c.bytes * c.count for c in r.collectives if c.kind == "all-gather")
            for r in (row, plain)
        ]
        assert gathered[0] == gathered[1]
        with jax.set_mesh(row.mesh):
            check_program(row.compiled, row.run)
            assert describe_kernels(row.run)["products"] == f"{dtype} by te"

    @pytest.mark.parametrize("dtype", tiered([], BLOCKS, slow=["mxfp8"]))
    def test_it_quantizes_what_is_recomputed_too(self, dtype):
        """By its own kernels, of which only NVFP4's with the transform work along tokens alone."""
        settings = f"precision.dtype={dtype}", "batch.global_batch=8", "execution.remat=full"
        row = by("te", *LLAMA, *settings, gpu=PLANNED["gb200"])
        # Two layers of four weights: the forward pass, the recomputation and the gradient.
        assert row.program.custom_calls()[QUANTIZE] == 2 * 4 * 3
        assert "reduce-precision" not in row.compiled.as_text()


@needs_te[0]
@needs_te[1]
@pytest.mark.parametrize(
    ("dtype", "hadamard"), [("mxfp8", False), ("nvfp4", False), ("nvfp4", True)]
)
@pytest.mark.usefixtures("transformer_engine_on_a_cpu")
def test_it_quantizes_as_ours(dtype, hadamard):
    """By its fallback in plain JAX. In NVFP4 a scale over 240 is NaN there, for it is rounded as a
    number with infinity; and a value between two neighbours may fall to the other one, for it is
    multiplied by the rounded inverse of what its kernel and ours divide by."""
    x = jnp.asarray(np.random.default_rng(5).normal(size=(1, 128, 256)) ** 3, jnp.bfloat16)
    precision = Precision(dtype=dtype, hadamard=hadamard)
    with on("one device"):
        its = te_blocks.TeMatmuls().quantize(x, precision, "first", None)
        ours = quantize_activation(x, precision, None)
        for wanted, both in zip(((True, False), (False, True)), its, strict=True):
            (alone,) = te_blocks.TeMatmuls().quantize(x, precision, "first", wanted=wanted)
            for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(both), strict=True):
                np.testing.assert_array_equal(a, b)
    if dtype == "mxfp8":
        ours = ours[0], ours[1].map(lambda part: part.swapaxes(1, 2))
    for got, want in zip(its, ours, strict=True):
        above = np.asarray(want.scales) > np.array(240, "float8_e4m3fn").view(np.uint8)
        kept = ~(above & (dtype == "nvfp4"))
        assert kept.mean() > 0.95
        np.testing.assert_array_equal(got.scales[kept], want.scales[kept])
        differ = np.asarray(got.values != want.values)
        if dtype == "nvfp4":
            differ = differ[np.repeat(kept, 16 // 2, -1)]
            np.testing.assert_allclose(got.inverse, want.inverse, rtol=3e-7)
        assert differ.mean() <= (2e-4 if dtype == "nvfp4" else 0)


@needs_te[0]
@needs_te[1]
@pytest.mark.usefixtures("transformer_engine_on_a_cpu")
def test_it_rounds_gradients_stochastically():
    """By its fallback, as above: unlike draws, whose mean is nearer to the values."""
    x = jnp.asarray(np.random.default_rng(5).uniform(0.1, 1, size=(1, 128, 128)), jnp.bfloat16)
    x, precision = x.at[..., 0].set(2.0), Precision(dtype="nvfp4")  # scales under 240 in between

    @jax.jit
    def quantized_rows(draw):
        rows, _ = te_blocks.TeMatmuls().quantize(x, precision, "first", draw)
        return dequantized(rows.unpacked(FORMATS["nvfp4"]))[..., 16:]

    with on("one device"):
        nearest, *drawn = map(quantized_rows, (None, *map(jnp.uint32, range(32))))
    exact = x[..., 16:].astype(jnp.float32)
    assert np.mean(drawn[0] != drawn[1]) > 0.1
    error, of_mean = (np.abs(np.mean(a, 0) - exact).mean() for a in ([nearest], drawn))
    assert of_mean < error / 2


def test_what_it_cannot_do_is_one_line(monkeypatch):
    with pytest.raises(RecipeError, match="needs an NVIDIA GPU"):
        quantized.choose(Precision(dtype="fp8", implementation="te"), "cpu")
    for hadamard, tile in ((True, "64 x 128"), (False, "32 x 32")):
        blocks = Precision(dtype="nvfp4", implementation="te", hadamard=hadamard)
        with pytest.raises(RecipeError, match=f"tiles of {tile}, not the 64 tokens x 16 features"):
            te_blocks.TeMatmuls().quantize(jnp.ones((1, 64, 16)), blocks, "first", None)


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
