"""Sizes of kernels that a tuner chooses. tests/null_gpu/test_null_tuning.py times them."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import needs_compiler
from tiny import tiny_run

from jaxbench import mesh
from jaxbench.base.hardware import PLANNED
from jaxbench.ops.grouped import NONE, group
from jaxbench.ops.kernel_sizes import Case, Choices, tunable, using
from jaxbench.ops.quantized.kernels import Rows
from jaxbench.plan.absent import compile_only_devices
from jaxbench.run import tune
from jaxbench.train import kernel_timing


@tunable(lambda x: (1, 2, 3))
def scaled(x, *, sizes):
    """A kernel with three candidates, whose result says which of them it took."""
    return x * sizes


CASE = Case(scaled, (jax.ShapeDtypeStruct((4,), jnp.float32),), (1, 2, 3))


def test_a_traced_kernel_takes_the_choice_for_its_shape():
    """And a program that was traced before does not keep its sizes."""
    program, x = jax.jit(scaled), jnp.ones(4)
    assert program(x)[0] == 1
    choices = Choices({CASE.name: 3})
    with using(choices):
        assert program(x)[0] == 3
        assert program(jnp.ones(8))[0] == 1
    assert program(x)[0] == 1
    assert [case.arguments[0].shape for case in choices.asked.values()] == [(4,), (8,)]


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        ({"1": 1.0, "2": 0.98, "3": 1.2}, "1"),
        ({"1": 1.0, "2": 0.9, "3": 0.8}, "3"),
        ({"2": 0.9}, "2"),
        ({}, "1"),
    ],
)
def test_the_first_candidate_stays_unless_another_is_clearly_faster(seconds, sizes):
    assert kernel_timing.choose(CASE, seconds) == {"sizes": sizes, "seconds": seconds}


@pytest.mark.parametrize("kept", [None, [], {"sizes": "7"}, {"seconds": {}}])
def test_a_choice_that_names_no_candidate_is_timed_again(kept):
    assert not kernel_timing.is_choice(kept, CASE)
    assert kernel_timing.is_choice({"sizes": "2"}, CASE)


def test_choices_come_back_from_the_folder_and_a_broken_file_is_reported(tmp_path):
    folder, said = tmp_path / "cache", []
    assert tune.read(folder, {}, said.append) == {}
    tune.keep(folder, {}, {"a": {"sizes": "2"}}, said.append)
    assert tune.read(folder, {}, said.append) == {"a": {"sizes": "2"}}
    assert tune.read(folder, {"device": "another"}, said.append) == {}
    assert said == []
    tune.file_in(folder, {}).write_text("{")
    assert tune.read(folder, {}, said.append) == {}
    assert "cannot be read" in said[0]
    tune.file_in(folder, {}).write_text(json.dumps([]))
    assert tune.read(folder, {}, said.append) == {}
    folder.chmod(0o777)
    tune.keep(folder, {}, {}, said.append)
    assert "cannot be kept" in said[1]


@needs_compiler
@pytest.mark.parametrize("dtype", ["mxfp8", "nvfp4"])
def test_quantization_to_blocks_has_candidates(dtype):
    """On a B200, since earlier GPUs have no such formats."""
    settings = "model.embed=64", "model.mlp.ffn=64", "batch.sequence_length=64"
    run = tiny_run(f"precision.dtype={dtype}", *settings)
    device = compile_only_devices(PLANNED["b200"], 1)
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape, device)):
        found = kernel_timing.cases(run)
    assert {name.partition(" ")[0] for name in found} == {f"quantized.kernels.quantize_{dtype}"}


def test_kernels_are_timed_with_rows_of_the_whole_activation():
    index, filled = jnp.zeros(1024, jnp.int32), jnp.zeros(8, jnp.int32)
    x = jax.ShapeDtypeStruct((1, 700, 32), jnp.bfloat16)
    _, rows = kernel_timing.drawn((x, Rows(index, filled, 900, 4)))
    assert (rows.expected, rows.experts) == (900, 4)
    assert set(np.asarray(rows.index)) == set(range(700))
    assert np.asarray(rows.filled).all()


def test_kernels_are_timed_with_groups_of_equal_size():
    groups = group(jnp.asarray([[7, 0, 3], [1, 1, 1]]), 20, expected=30)
    # Tokens arrive in fewer slots than their assignments have, each for three of these.
    groups = replace(groups, place=jnp.full(3 * 24, NONE), uses=3)
    filled, x = kernel_timing.drawn((groups, jax.ShapeDtypeStruct((5, 3), jnp.float8_e4m3fn)))
    assert jax.tree.map(jnp.shape, filled) == jax.tree.map(jnp.shape, groups)
    assert filled.uses == 3
    rows = np.asarray(filled.source)[np.asarray(filled.row) != NONE]
    assert len(rows) == 30
    assert 18 <= len(set(rows)) <= rows.max() + 1 <= 24
    assert x.dtype == jnp.float8_e4m3fn
    assert np.asarray(x, np.float32).any()
