"""Blocks of layers applied over stacked weights, with a stash of residuals.

`jax.lax.scan` of a `jax.checkpoint` computes the same, but allocates, zeroes and copies its stack
of residuals for each microbatch. Here the stash is passed in and out, and every microbatch writes
into the same memory. Without remat nothing is stacked: blocks are unrolled in the program.

Residuals that wait in the host's memory are written a block later than they arise and read a block
earlier than they are needed, so that the copies run beside the products. Indices are those of the
loop: others would have kernels read and write the host's memory, where now copy engines do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxbench import mesh
from jaxbench.jax_internals import READS_HOST, residuals, restore_vjp
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
"""Residuals of every block in device memory, without its weights, each leaf `[blocks, ..]`."""

HostTypes = tuple[jax.ShapeDtypeStruct | None, ...]
"""For each residual of a block its type where it waits in the host's memory, else None."""

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

Apply = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""One block: (x, its weights, its constants, arguments of all blocks) to (the next x, aux)."""


@dataclass(frozen=True, eq=False)
class Block:
    """A block that is looped over: what it applies, its VJP with types in place of residuals, and
    which residuals wait in the host's memory."""

    apply: Apply
    vjp: Any
    host: HostTypes


def can_offload() -> bool:
    """True where arrays in the host's memory are read back from where they were written."""
    return READS_HOST or mesh.platform() != "gpu"


def apply_blocks(
    apply: Apply,
    x: jax.Array,
    weights: Any,
    constants: Any,
    common: Any,
    stash: Stash | None = None,
    *,
    unrolled: bool = False,
    offloading: Apply | None = None,
    input_on_host: bool = False,
) -> tuple[jax.Array, Any, Stash]:
    """(output of the last block, aux of all blocks stacked `[blocks, ..]`, the stash as written).

    Leaves of `weights` and `constants` are `[blocks, ..]`; `common` is passed to every block.
    Gradients are those of `x` and `weights`. `apply` recomputes what it does not save
    (`remat.recomputed`). Without `stash` a new one is allocated. With `unrolled` the stash is
    empty, and gathered weights are residuals too, where a stash would have the backward pass gather
    them again. `offloading` is the same block whose residuals have the types of the memory in which
    they wait (`remat.recomputed`); with `input_on_host` a block's input waits in the host's too.
    """
    if unrolled:
        return *_unrolled(apply, x, weights, constants, common), []
    flat, structure = jax.tree.flatten(constants)

    def flattened(apply):
        return lambda x, weights, constants, common: apply(
            x, weights, jax.tree.unflatten(structure, constants), common
        )

    operands = x, weights, flat, common
    types, vjp, spaces = _linearized(flattened(apply), *operands)
    if offloading is not None:
        _, _, spaces = _linearized(flattened(offloading), *operands)
    if input_on_host:
        spaces = [HOST, *spaces[1:]]
    on_host = zip(types, spaces, strict=True)
    host = tuple(like if space == HOST else None for like, space in on_host)
    if stash is None:
        stash = allocate(_split(types, host)[0], len(jax.tree.leaves(weights)[0]))
    return _looped(Block(flattened(apply), vjp, host), *operands, stash)


def _unrolled(block, x, weights, constants, common):
    constants = jax.lax.stop_gradient(constants)  # only `weights` are differentiated
    traced_once = jax.jit(block, inline=True)
    aux = []
    for index, block_weights in enumerate(unstack(weights)):
        x, block_aux = traced_once(x, block_weights, read_isolated(constants, index), common)
        aux.append(block_aux)
    return x, stack(aux)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _looped(block: Block, x, weights, constants, common, stash):
    return _forward(block, x, weights, constants, common, stash)[0]


def _forward(block, x, weights, constants, common, stash):
    def step(index, carry, operands):
        x, stash, waiting, late = carry
        (y, aux), vjp = jax.vjp(block.apply, x, *operands, common)
        now, here = _split([x, *residuals(vjp)], block.host)
        # Entry i has the residuals of the block before, `late`; entry 0 none.
        waiting = write(waiting, jax.device_put(late, HOST), index)
        return (y, write(stash, now, index), waiting, here), aux

    types = [like for like in block.host if like is not None]
    count = len(jax.tree.leaves(weights)[0])
    start = x, stash, jax.device_put(allocate(types, count), HOST), allocate(types)
    (y, stash, waiting, last), aux = scan_allocated(step, start, (weights, constants))
    return (y, aux, stash), (weights, constants, common, stash, waiting, last)


def _backward(block, saved, cotangents):
    weights, constants, common, stash, waiting, last = saved
    dy, d_aux, _ = cotangents

    def step(index, carry, entry):
        dy, here = carry
        *operands, d_aux = entry
        x, *block_residuals = _joined(read(stash, index), here, block.host)
        ahead = jax.device_put(read(waiting, index), DEVICE)
        arguments = jax.tree.leaves((x, *operands, common))
        vjp = restore_vjp(block.vjp, block_residuals, arguments)
        dx, d_weights, _, _ = vjp((dy, d_aux))
        return (dx, ahead), d_weights

    inputs = weights, constants, d_aux
    (dx, _), d_weights = scan_allocated(step, (dy, last), inputs, reverse=True)
    return dx, d_weights, None, None, None


_looped.defvjp(_forward, _backward)


def _linearized(apply, x, weights, constants, common) -> tuple[list, Any, list]:
    """(types of a block's input and residuals, its VJP with types in place of residuals, their
    memory spaces, which types do not tell)."""
    spaces = []

    def linearized(x, *arguments):
        vjp = jax.vjp(apply, x, *arguments)[1]
        spaces.extend(jax.typeof(value).memory_space for value in [x, *residuals(vjp)])
        return x, vjp

    x, vjp = jax.eval_shape(linearized, x, *read((weights, constants), 0), common)
    return [x, *residuals(vjp)], vjp, spaces


def _split(values: list, host: HostTypes) -> tuple[list, list]:
    """The values that stay on the device, and those that wait in the host's memory."""
    pairs = list(zip(values, host, strict=True))
    waiting = [value for value, like in pairs if like is not None]
    # `host` was read off the same block under another policy, whose residuals have this order.
    assert [a.shape for a in waiting] == [like.shape for like in host if like is not None]
    return [value for value, like in pairs if like is None], waiting


def _joined(on_device: list, on_host: list, host: HostTypes) -> list:
    """The opposite of `_split`."""
    device, waiting = iter(on_device), iter(on_host)
    return [next(device if like is None else waiting) for like in host]
