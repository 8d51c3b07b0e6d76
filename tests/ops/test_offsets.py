"""Offsets of elements inside Pallas kernels: wide enough for every array."""

import jax
import jax.numpy as jnp
import pytest
from compiled import needs_compiler
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxbench import mesh
from jaxbench.base import hardware
from jaxbench.jax_internals import attention_for_mesh
from jaxbench.ops.pallas_call import Launch, Output, call, ignoring_pallas_deprecation
from jaxbench.plan.absent import compile_only_devices
from jaxbench.plan.command import resolve
from jaxbench.train.step import abstract_state, make_program


@pytest.fixture
def offsets(monkeypatch):
    """The types of all offsets that are lowered, by the type of their array."""
    from jax._src.pallas.triton import lowering

    found: dict = {}
    computed = lowering._compute_offsets_from_indices

    def record(block_info, indexer):
        result = computed(block_info, indexer)
        of = block_info.full_shape_dtype
        offsets = result[0] if isinstance(result, tuple) else result  # a mask too from 0.12 on
        found.setdefault((of.shape, jnp.dtype(of.dtype)), set()).add(str(offsets.type))
        return result

    monkeypatch.setattr(lowering, "_compute_offsets_from_indices", record)
    return found


def wrapping(offsets):
    """The arrays with elements that a signed 32-bit offset does not reach, and such offsets."""
    return [
        array
        for array, types in offsets.items()
        if size(array) > 2**31 and not all("i64" in kind for kind in types)
    ]


def size(array):
    shape, _ = array
    return jax.ShapeDtypeStruct(shape, jnp.int8).size


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", [2**23, 2**24 - 1, 2**24, 2**24 + 1, 2**25, 2**25 + 1])
def test_offsets_reach_the_last_element(offsets, dtype, rows):
    """Around 2^31 elements and 2^32 bytes, in rows of 128 elements."""
    block = pl.BlockSpec((None, 1, 128), lambda i: (0, i, 0))

    def copy(r):
        r.y[...] = r.x[...]

    def copied(x):
        outputs = {"y": Output(x.shape, x.dtype, block)}
        return call(copy, "copy", (rows,), {"x": (x, block)}, outputs, Launch(1))

    hopper = AbstractDevice(hardware.PLANNED["h100"].device, None, "gpu")
    alone = AbstractMesh((1,), ("x",), abstract_device=hopper)
    with ignoring_pallas_deprecation(), use_abstract_mesh(alone):
        traced = jax.jit(copied).trace(jax.ShapeDtypeStruct((1, rows, 128), dtype))
        traced.lower(lowering_platforms=("cuda",))
    assert offsets
    assert not wrapping(offsets)


@needs_compiler
@pytest.mark.parametrize("gpu", ["gb200", pytest.param("gb300", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("recipe", ["qwen3_235b_a22b_mxfp8", "deepseek_v3_mxfp8"])
def test_rows_with_the_largest_arrays(offsets, recipe, gpu):
    """These rows quantize arrays of more than 2^31 elements, one byte each."""
    known = hardware.PLANNED[gpu]
    run, _ = resolve(recipe, 256, [], known)
    devices = compile_only_devices(known, 256)
    on = mesh.make_mesh(run.mesh_shape, devices)
    with jax.set_mesh(on), attention_for_mesh(), ignoring_pallas_deprecation():
        make_program(run).lower(abstract_state(run))
    assert any(2**31 < size(array) <= 2**32 for array in offsets)
    assert not wrapping(offsets)
