"""Stacked arrays whose entries a program reads and writes one by one, in place.

A *stash* is a pytree of arrays with one or several leading slot dimensions. Loops over layers
(`ops.layer_stack`) and pipeline schedules (`train.pipeline_rank`) keep their residuals in one: they
allocate it once, write it in the forward pass and read it in the backward pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxbench import mesh
from jaxbench.base.scopes import ALLOCATES


def read(tree: Any, *index: Any) -> Any:
    """The entry at `index` of every leaf `[slots, ..]`. `index` has one number per leading
    dimension."""

    def entry(a: jax.Array) -> jax.Array:
        shape = a.shape[len(index) :]
        start = (*index, *(0 for _ in shape))
        sizes = (*(1 for _ in index), *shape)
        return jax.lax.squeeze(jax.lax.dynamic_slice(a, start, sizes), range(len(index)))

    return jax.tree.map(entry, tree)


def write(tree: Any, values: Any, *index: Any) -> Any:
    """Replaces the entry at `index` of the leaves `[slots, ..]` by `values`. In a compiled program
    this happens in place."""

    def replaced(a: jax.Array, value: Any) -> jax.Array:  # a residual may be a constant
        start = (*index, *(0 for _ in value.shape))
        value = jax.lax.expand_dims(jnp.asarray(value, a.dtype), range(len(index)))
        return jax.lax.dynamic_update_slice(a, value, start)

    return jax.tree.map(replaced, tree, values)


def merge(combine: Callable, tree: Any, values: Any, *index: Any) -> Any:
    """Combines `values` into the entry at `index` of the leaves. This happens in place too, because
    the entry keeps its leading dimensions: XLA fuses only slices and updates of equal shapes."""

    def merged(a: jax.Array, value: Any) -> jax.Array:
        start = (*index, *(0 for _ in value.shape))
        value = jax.lax.expand_dims(jnp.asarray(value), range(len(index)))
        entry = jax.lax.dynamic_slice(a, start, value.shape)
        return jax.lax.dynamic_update_slice(a, combine(entry, value), start)

    return jax.tree.map(merged, tree, values)


add = partial(merge, lambda total, value: total + value.astype(total.dtype))
maximum = partial(merge, jnp.maximum)


def allocate(types: Any, *slots: int, after: jax.Array | None = None) -> Any:
    """Uninitialised arrays `[*slots, ..]` for a tree of `jax.ShapeDtypeStruct`.

    Each device allocates its own part, since XLA does not partition an allocation. Zeros would have
    to be written, and XLA would turn zeros of equal shape into one constant and copy it.

    XLA may allocate as early as it likes, since an allocation needs no input. On GPUs it waits for
    `after`, if that is given.
    """
    awaited = [after] if after is not None and mesh.platform() == "gpu" else []

    def allocated(like: jax.ShapeDtypeStruct, number: int) -> jax.Array:
        shape = *slots, *like.shape
        if mesh.manual():
            return _empty(*awaited, shape=shape, dtype=like.dtype, number=number)
        if like.sharding is None:  # the type of a constant
            return jnp.zeros(shape, like.dtype)
        spec = like.sharding.spec
        spec = spec.update(partitions=(*(None for _ in slots), *spec.partitions))
        local_shape = jax.sharding.NamedSharding(like.sharding.mesh, spec).shard_shape(shape)
        local = partial(_empty, shape=local_shape, dtype=like.dtype, number=number)
        return mesh.on_each_device(local, spec, check_vma=False)(*awaited)

    leaves, structure = jax.tree.flatten(types)
    return jax.tree.unflatten(structure, map(allocated, leaves, range(len(leaves))))


def _empty(*awaited: jax.Array, shape: tuple[int, ...], dtype: Any, number: int) -> jax.Array:
    """`jax.lax.empty`, or the same custom call with an operand. XLA would merge two calls with
    equal operands, so each has a `number`."""
    if not awaited:
        return jax.lax.empty(shape, dtype)
    call = jax.ffi.ffi_call(
        ALLOCATES,
        jax.ShapeDtypeStruct(shape, dtype),
        custom_call_api_version=1,
        legacy_backend_config=str(number),
    )
    return call(*awaited)


def scan_allocated(
    step: Callable[[jax.Array, Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """`jax.lax.scan` without a gradient rule. Its stacked results start as allocated memory instead
    of zeros.

    `step(index, carry, x)` returns (carry, y); the result is (last carry, stacked ys).
    """
    count = len(jax.tree.leaves(xs)[0])
    traced_once = jax.jit(step, inline=True)

    def index_of(done):
        return count - 1 - done if reverse else done

    def body(state):
        done, carry, ys = state
        index = index_of(done)
        carry, y = traced_once(index, carry, read(xs, index))
        return done + 1, carry, write(ys, y, index)

    def result(done, entry):
        # As an argument of eval_shape, an array in host memory would have another type.
        return traced_once(index_of(done), carry, entry)

    first = jnp.int32(0)
    entry = jax.eval_shape(lambda xs: read(xs, 0), xs)
    _, types = jax.eval_shape(result, first, entry)
    start = first, carry, allocate(types, count)
    _, carry, ys = jax.lax.while_loop(lambda state: state[0] < count, body, start)
    return carry, ys
