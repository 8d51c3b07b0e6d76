"""A unit of layers applied over stacked weights, whose activations wait in slots that are handed in
and out.

`jax.lax.scan` of `remat.recomputed` computes the same, but stacks activations in zeros that are
made and copied for each microbatch. These slots are allocated once, and filled again. Without
remat nothing is stacked: units stand one after another in the program, and what they make stays
where they made it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxbench.ops.remat import recomputed
from jaxbench.ops.slots import alone, at, empty, put, residuals, restored, scan, stacked, unstacked

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
    ones. With `saved` None all is kept and there are no slots: units stand one after another, and
    gathered weights wait for the backward pass too, which gathers them again otherwise.
    """
    if saved is None:
        return *_unrolled(apply, x, weights, constants, shared), []
    flat, structure = jax.tree.flatten(constants)

    def apply_flat(x, weights, constants, shared):
        return apply(x, weights, jax.tree.unflatten(structure, constants), shared)

    return _repeat(recomputed(apply_flat, saved), x, weights, flat, shared, slots)


def _unrolled(unit, x, weights, constants, shared):
    constants = jax.lax.stop_gradient(constants)  # `weights` have what is to be differentiated
    once = jax.jit(unit, inline=True)  # traced once for all units
    said = []
    for index, own in enumerate(unstacked(weights)):
        x, more = once(x, own, alone(constants, index), shared)
        said.append(more)
    return x, stacked(said)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _repeat(unit, x, weights, constants, shared, slots):
    return _forward(unit, x, weights, constants, shared, slots)[0]


def _forward(unit, x, weights, constants, shared, slots):
    def step(index, carry, operands):
        x, slots = carry
        (y, said), vjp = jax.vjp(unit, x, *operands, shared)
        return (y, put(slots, [x, *residuals(vjp)], index)), said

    if slots is None:
        slots = _allocated(unit, x, weights, constants, shared)
    (y, slots), said = scan(step, (x, slots), (weights, constants))
    return (y, said, slots), (weights, constants, shared, slots)


def _backward(unit, kept, cotangents):
    weights, constants, shared, slots = kept
    dy, d_said, _ = cotangents

    def step(index, dy, now):
        *operands, d_said = now
        x, *waited = at(slots, index)
        arguments = x, *operands, shared
        like = jax.eval_shape(lambda *arguments: jax.vjp(unit, *arguments)[1], *arguments)
        dx, d_weights, _, _ = restored(like, waited, jax.tree.leaves(arguments))((dy, d_said))
        return dx, d_weights

    dx, d_weights = scan(step, dy, (weights, constants, d_said), reverse=True)
    return dx, d_weights, None, None, None


_repeat.defvjp(_forward, _backward)


def _allocated(unit: Callable, x: jax.Array, weights: Any, constants: Any, shared: Any) -> Slots:
    def kept(x, *arguments):
        return [x, *residuals(jax.vjp(unit, x, *arguments)[1])]

    count = len(jax.tree.leaves(weights)[0])
    return empty(jax.eval_shape(kept, x, *at((weights, constants), 0), shared), count)
