"""A unit of layers applied over stacked weights, whose activations wait in slots that are handed in
and out.

`jax.lax.scan` of `remat.recomputed` computes the same, but stacks activations in zeros that are
made and copied for each microbatch. These slots are filled again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxbench.ops.remat import recomputed
from jaxbench.ops.slots import at, put, residuals, restored

Slots = list[jax.Array]
"""What the backward pass of each unit needs beside weights, stacked on the first axis."""

Apply = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""One unit: (x, its weights, its constants, what all share) to (the next x, what it says)."""


def repeat(
    apply: Apply,
    saved: frozenset[str] | None,
    x: jax.Array,
    weights: Any,
    constants: Any,
    shared: Any,
    slots: Slots | None = None,
) -> tuple[jax.Array, Any, Slots]:
    """(what the last unit gives, what all say, stacked, the slots as they are now).

    `weights` and `constants` are stacked over the units. Gradients are those of `x` and `weights`;
    activations in `saved` are not recomputed (`remat.recomputed`). Without `slots` there are new
    ones.
    """
    flat, structure = jax.tree.flatten(constants)

    def apply_flat(x, weights, constants, shared):
        return apply(x, weights, jax.tree.unflatten(structure, constants), shared)

    return _repeat(recomputed(apply_flat, saved), x, weights, flat, shared, slots)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _repeat(unit, x, weights, constants, shared, slots):
    return _forward(unit, x, weights, constants, shared, slots)[0]


def _forward(unit, x, weights, constants, shared, slots):
    def step(carry, operands):
        index, x, slots = carry
        (y, said), vjp = jax.vjp(unit, x, *operands, shared)
        return (index + 1, y, put(slots, [x, *residuals(vjp)], index)), said

    if slots is None:
        slots = _zeros(unit, x, weights, constants, shared)
    (_, y, slots), said = jax.lax.scan(step, (0, x, slots), (weights, constants))
    return (y, said, slots), (weights, constants, shared, slots)


def _backward(unit, kept, cotangents):
    weights, constants, shared, slots = kept
    dy, d_said, _ = cotangents

    def step(carry, now):
        index, dy = carry
        *operands, d_said = now
        x, *waited = at(slots, index)
        arguments = x, *operands, shared
        like = jax.eval_shape(lambda *arguments: jax.vjp(unit, *arguments)[1], *arguments)
        dx, d_weights, _, _ = restored(like, waited, jax.tree.leaves(arguments))((dy, d_said))
        return (index - 1, dx), d_weights

    last = len(slots[0]) - 1
    operands = weights, constants, d_said
    (_, dx), d_weights = jax.lax.scan(step, (last, dy), operands, reverse=True)
    return dx, d_weights, None, None, None


_repeat.defvjp(_forward, _backward)


def _zeros(unit: Callable, x: jax.Array, weights: Any, constants: Any, shared: Any) -> Slots:
    def kept(x, *arguments):
        return [x, *residuals(jax.vjp(unit, x, *arguments)[1])]

    count = len(jax.tree.leaves(weights)[0])
    return [
        empty(like, count) for like in jax.eval_shape(kept, x, *at((weights, constants), 0), shared)
    ]


def empty(like: jax.ShapeDtypeStruct, *count: int) -> jax.Array:
    """Zeros of a type, stacked so many times."""
    stacked = None
    if like.sharding is not None:
        spec = like.sharding.spec
        stacked = spec.update(partitions=(*(None for _ in count), *spec.partitions))
    return jnp.zeros((*count, *like.shape), like.dtype, out_sharding=stacked)
