"""Activations that wait in slots for a backward pass: entries of stacked arrays, and what a
transpose keeps in them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp


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
