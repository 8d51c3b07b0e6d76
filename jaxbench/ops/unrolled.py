"""Applies a block of layers over stacked weights without a loop, for runs that save everything."""

from collections.abc import Callable
from typing import Any

import jax

from jaxbench.ops.stash import allocate, read, write


def unrolled(
    block: Callable, x: jax.Array, weights: Any, constants: Any, common: Any
) -> tuple[jax.Array, Any]:
    """(output of the last block, aux of all blocks, stacked): what `layer_stack.LayerLoop.scan`
    computes, in a program without a loop."""
    constants = jax.lax.stop_gradient(constants)  # only `weights` are differentiated
    traced_once = jax.jit(block, inline=True)
    aux = []
    for index, block_weights in enumerate(unstack(weights)):
        x, block_aux = traced_once(x, block_weights, read_isolated(constants, index), common)
        aux.append(block_aux)
    return x, stack(aux)


def read_isolated(tree: Any, index: int) -> Any:
    """`read` behind an optimization barrier.

    Otherwise XLA would apply the consumers of an entry, such as a cast from FP8, to the whole
    stack, and would then recognise no FP8 matmul.
    """
    return jax.lax.optimization_barrier(read(tree, index))


@jax.custom_vjp
def unstack(tree: Any) -> list:
    """All entries of the leaves `[slots, ..]`, each read by `read_isolated`.

    The backward pass stacks the gradients of the entries. JAX's own rule would make a stack for
    each entry, zero except for that entry, and add these stacks up.
    """
    return [read_isolated(tree, index) for index in range(len(jax.tree.leaves(tree)[0]))]


def stack(entries: list) -> Any:
    """Stacks the entries along a new first dimension. Each is written into allocated memory.

    A concatenation of arrays that are unreduced over ranks would sum them over these ranks.
    """
    stacked = allocate(jax.eval_shape(lambda entry: entry, entries[0]), len(entries))
    for index, entry in enumerate(entries):
        stacked = write(stacked, entry, index)
    return stacked


unstack.defvjp(lambda tree: (unstack(tree), None), lambda _, entries: (stack(entries),))
