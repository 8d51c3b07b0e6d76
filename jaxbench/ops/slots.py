"""Stacked arrays: their entries, the slots in which activations wait for a backward pass, what a
transpose keeps in them, and loops that stack in memory which was only allocated."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxbench import mesh


def at(tree: Any, *index: Any) -> Any:
    """An entry of arrays that are stacked on their first axes."""

    def entry(a: jax.Array) -> jax.Array:
        shape = a.shape[len(index) :]
        start = (*index, *(0 for _ in shape))
        sizes = (*(1 for _ in index), *shape)
        return jax.lax.squeeze(jax.lax.dynamic_slice(a, start, sizes), range(len(index)))

    return jax.tree.map(entry, tree)


def put(tree: Any, values: Any, *index: Any) -> Any:
    """The arrays with that entry replaced, in place."""

    def replaced(a: jax.Array, value: Any) -> jax.Array:  # a residual may be a constant
        start = (*index, *(0 for _ in value.shape))
        value = jax.lax.expand_dims(jnp.asarray(value, a.dtype), range(len(index)))
        return jax.lax.dynamic_update_slice(a, value, start)

    return jax.tree.map(replaced, tree, values)


def residuals(vjp: Any) -> list:
    """What a transpose of `jax.vjp` keeps beside the arguments of its function, arrays or types.

    JAX keeps the two apart (`VJP.args_res`), so that a slot need hold no weight.
    """
    return jax.tree.leaves(replace(vjp, args_res=[]))


def restored(vjp: Any, kept: Sequence, arguments: list) -> Any:
    """The like of a transpose, with other residuals and arguments."""
    structure = jax.tree.structure(replace(vjp, args_res=[]))
    return replace(jax.tree.unflatten(structure, kept), args_res=arguments)


def empty(likes: Any, *count: int) -> Any:
    """Arrays of some types (`jax.ShapeDtypeStruct`), stacked so many times, with nothing written.

    Each device allocates its own part, since XLA partitions no allocation. Zeros would be written,
    and two of one shape are one constant, which XLA copies.
    """

    def allocated(like: jax.ShapeDtypeStruct) -> jax.Array:
        shape = *count, *like.shape
        if mesh.manual():
            return jax.lax.empty(shape, like.dtype)
        if like.sharding is None:  # of a constant
            return jnp.zeros(shape, like.dtype)
        spec = like.sharding.spec
        spec = spec.update(partitions=(*(None for _ in count), *spec.partitions))
        part = jax.sharding.NamedSharding(like.sharding.mesh, spec).shard_shape(shape)
        allocate = partial(jax.lax.empty, part, like.dtype)
        return mesh.on_each_device(allocate, spec, check_vma=False)()

    return jax.tree.map(allocated, likes)


def alone(tree: Any, index: int) -> Any:
    """An entry as `at` has it, kept apart from the others: XLA would move what is done with each
    of them to the whole stack, a cast from FP8 too, and would then find no product in FP8."""
    return jax.lax.optimization_barrier(at(tree, index))


@jax.custom_vjp
def unstacked(tree: Any) -> list:
    """All entries, each `alone`. Their gradients are stacked; JAX would add up as many stacks, each
    of zeros but for one entry."""
    return [alone(tree, index) for index in range(len(jax.tree.leaves(tree)[0]))]


def stacked(entries: list) -> Any:
    """Arrays stacked from their entries, each written to its place.

    A concatenation would sum a gradient that is not yet reduced over its ranks.
    """
    whole = empty(jax.eval_shape(lambda entry: entry, entries[0]), len(entries))
    for index, entry in enumerate(entries):
        whole = put(whole, entry, index)
    return whole


unstacked.defvjp(lambda tree: (unstacked(tree), None), lambda _, entries: (stacked(entries),))


def scan(
    step: Callable[[jax.Array, Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """`jax.lax.scan` of a step that is given its index before carry and entry, not to be
    differentiated. What it stacks is not zeros before (`empty`)."""
    count = len(jax.tree.leaves(xs)[0])

    def body(state):
        done, carry, ys = state
        index = count - 1 - done if reverse else done
        carry, y = step(index, carry, at(xs, index))
        return done + 1, carry, put(ys, y, index)

    first = jnp.int32(0)
    _, likes = jax.eval_shape(step, first, carry, jax.eval_shape(lambda xs: at(xs, 0), xs))
    start = first, carry, empty(likes, count)
    _, carry, ys = jax.lax.while_loop(lambda state: state[0] < count, body, start)
    return carry, ys
