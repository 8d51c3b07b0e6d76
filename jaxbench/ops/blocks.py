"""Blocks of layers applied over stacked weights, with a stash of residuals.

`jax.lax.scan` of a `jax.checkpoint` computes the same, but allocates, zeroes and copies its stack
of residuals for each microbatch. Here the stash is passed in and out, and every microbatch writes
into the same memory. Without remat nothing is stacked: blocks are unrolled in the program.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxbench.jax_internals import residuals, restore_vjp
from jaxbench.ops.stash import (
    allocate,
    read,
    read_isolated,
    scan_allocated,
    stack,
    unstack,
    write,
)

Stash = list[jax.Array]
"""Residuals of every block without its weights, each leaf `[blocks, ..]`."""

Apply = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""One block: (x, its weights, its constants, arguments of all blocks) to (the next x, aux)."""


def apply_blocks(
    apply: Apply,
    x: jax.Array,
    weights: Any,
    constants: Any,
    common: Any,
    stash: Stash | None = None,
    *,
    unrolled: bool = False,
) -> tuple[jax.Array, Any, Stash]:
    """(output of the last block, aux of all blocks stacked `[blocks, ..]`, the stash as written).

    Leaves of `weights` and `constants` are `[blocks, ..]`; `common` is passed to every block.
    Gradients are those of `x` and `weights`. `apply` recomputes what it does not save
    (`remat.recomputed`). Without `stash` a new one is allocated. With `unrolled` the stash is
    empty, and gathered weights are residuals too, where a stash would have the backward pass gather
    them again.
    """
    if unrolled:
        return *_unrolled(apply, x, weights, constants, common), []
    flat, structure = jax.tree.flatten(constants)

    def apply_flat(x, weights, constants, common):
        return apply(x, weights, jax.tree.unflatten(structure, constants), common)

    return _looped(apply_flat, x, weights, flat, common, stash)


def _unrolled(block, x, weights, constants, common):
    constants = jax.lax.stop_gradient(constants)  # only `weights` are differentiated
    traced_once = jax.jit(block, inline=True)
    aux = []
    for index, block_weights in enumerate(unstack(weights)):
        x, block_aux = traced_once(x, block_weights, read_isolated(constants, index), common)
        aux.append(block_aux)
    return x, stack(aux)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _looped(block, x, weights, constants, common, stash):
    return _forward(block, x, weights, constants, common, stash)[0]


def _forward(block, x, weights, constants, common, stash):
    def step(index, carry, operands):
        x, stash = carry
        (y, aux), vjp = jax.vjp(block, x, *operands, common)
        return (y, write(stash, [x, *residuals(vjp)], index)), aux

    if stash is None:
        stash = _new_stash(block, x, weights, constants, common)
    (y, stash), aux = scan_allocated(step, (x, stash), (weights, constants))
    return (y, aux, stash), (weights, constants, common, stash)


def _backward(block, saved, cotangents):
    weights, constants, common, stash = saved
    dy, d_aux, _ = cotangents

    def step(index, dy, entry):
        *operands, d_aux = entry
        x, *block_residuals = read(stash, index)
        arguments = x, *operands, common
        like = jax.eval_shape(lambda *arguments: jax.vjp(block, *arguments)[1], *arguments)
        vjp = restore_vjp(like, block_residuals, jax.tree.leaves(arguments))
        dx, d_weights, _, _ = vjp((dy, d_aux))
        return dx, d_weights

    dx, d_weights = scan_allocated(step, dy, (weights, constants, d_aux), reverse=True)
    return dx, d_weights, None, None, None


_looped.defvjp(_forward, _backward)


def _new_stash(block: Callable, x: jax.Array, weights: Any, constants: Any, common: Any) -> Stash:
    def saved(x, *arguments):
        return [x, *residuals(jax.vjp(block, x, *arguments)[1])]

    count = len(jax.tree.leaves(weights)[0])
    return allocate(jax.eval_shape(saved, x, *read((weights, constants), 0), common), count)
