"""Applies a block of layers over stacked weights: in a loop with a stash of residuals, or, if all
activations are saved, without a loop.

`jax.lax.scan` of a `jax.checkpoint` computes the same as the loop, but it allocates, zeroes and
copies its stack of residuals for each microbatch. Here a `LayerLoop` gets the stashes of the
microbatch before and hands its own on, so that every microbatch writes into the same memory.

Residuals can also wait in host memory. They are written one block after they are computed and read
one block before they are needed, so that the copies overlap with the matmuls. The copies use the
loop's own index, so that copy engines make them. With any other index XLA would let kernels read
and write host memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxbench import mesh
from jaxbench.jax_internals import READS_HOST, residuals, restore_vjp
from jaxbench.ops.remat import Policy, checkpoint
from jaxbench.ops.stash import allocate, read, scan_allocated, write
from jaxbench.recipe.settings import INPUT

Stash = list[jax.Array]
"""The residuals of every block that stay in device memory, without its weights. Each leaf is
`[blocks, ..]`."""

HostTypes = tuple[jax.ShapeDtypeStruct | None, ...]
"""For each residual of a block: its type if it waits in host memory, else None."""

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

ApplyBlock = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""Applies one block. It maps (x, the block's weights, its constants, the arguments of all blocks)
to (the next x, aux)."""


@dataclass(frozen=True, eq=False)
class LoopedBlock:
    """A block that is looped over: the function that applies it, its VJP with types in place of
    residuals, and which residuals wait in host memory."""

    apply: ApplyBlock
    vjp: Any
    host: HostTypes


def can_offload() -> bool:
    """True if the backward pass reads arrays in host memory at the places where they were written.
    See `jax_internals.READS_HOST` for the compilers that do not."""
    return READS_HOST or mesh.platform() != "gpu"


class LayerLoop:
    """Applies the segments of a model's layers, and keeps their stashes.

    `stashes` come from an earlier microbatch, one for each call of `scan`; without them new ones
    are allocated. `written` are the stashes after the calls. Host memory is allocated once the
    array `after` is known. It comes from the end of the backward pass of that microbatch, so that
    both share the memory.
    """

    def __init__(self, stashes: Sequence[Stash] = (), after: jax.Array | None = None):
        self.stashes, self.after, self.written = iter(stashes), after, list[Stash]()

    def scan(
        self,
        apply: ApplyBlock,
        x: jax.Array,
        weights: Any,
        constants: Any,
        common: Any,
        policy: Policy,
    ) -> tuple[jax.Array, Any]:
        """(output of the last block, aux of all blocks in fp32, stacked `[blocks, ..]`), as if by

            for block_weights, block_constants in zip(weights, constants):
                x, aux = remat.checkpoint(apply, policy)(x, block_weights, block_constants, common)

        Leaves of `weights` and `constants` are `[blocks, ..]`; every block also gets `common`. Only
        `x` and `weights` have gradients.
        """
        policy = policy if can_offload() else policy.without_offload()
        operands, count = (x, weights, constants, common), len(jax.tree.leaves(weights)[0])

        def block(x, weights, constants, common, on_host=frozenset()):
            # XLA unrolls a loop over one block, and could merge its forward pass and recomputation.
            # Inputs of layers that are recomputed one by one are not named, so they cannot wait in
            # host memory.
            compute = checkpoint(
                apply,
                Policy(policy.saved, on_host),
                in_order=count == 1,
                by_layer="residual" not in policy.offloaded,
            )
            x, aux = compute(x, weights, constants, common)
            return x, jax.tree.map(lambda a: a.astype(jnp.float32), aux)

        stash = next(self.stashes, None)
        if policy.saved is None:
            y, aux = _unrolled(block, *operands)
            stash = []
        else:
            types, vjp, _ = _linearized(block, *operands)
            host = _host_types(block, operands, types, policy.offloaded)
            if stash is None:
                stash = allocate(_split(types, host)[0], count)
            y, aux, stash = _looped(LoopedBlock(block, vjp, host), *operands, stash, self.after)
        self.written.append(stash)
        return y, aux


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _looped(block: LoopedBlock, x, weights, constants, common, stash, after):
    return _forward(block, x, weights, constants, common, stash, after)[0]


def _forward(block, x, weights, constants, common, stash, after):
    def step(index, carry, operands):
        x, stash, waiting, before = carry
        (y, aux), vjp = jax.vjp(block.apply, x, *operands, common)
        now, here = _split([x, *residuals(vjp)], block.host)
        # Entry i holds the residuals of the block before; entry 0 holds none.
        waiting = write(waiting, jax.device_put(before, HOST), index)
        return (y, write(stash, now, index), waiting, here), aux

    types = [like for like in block.host if like is not None]
    count = len(jax.tree.leaves(weights)[0])
    waiting = allocate(types, count, after=after)
    start = x, stash, jax.device_put(waiting, HOST), allocate(types)
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
    return dx, d_weights, None, None, None, None


_looped.defvjp(_forward, _backward)


def _linearized(apply, x, weights, constants, common) -> tuple[list, Any, list]:
    """Traces one block. Returns (types of its input and residuals, its VJP with types in place of
    residuals, their memory spaces). The spaces are separate because the types do not include
    them."""
    spaces = []

    def linearized(x, *arguments):
        vjp = jax.vjp(apply, x, *arguments)[1]
        spaces.extend(jax.typeof(value).memory_space for value in [x, *residuals(vjp)])
        return x, vjp

    x, vjp = jax.eval_shape(linearized, x, *read((weights, constants), 0), common)
    return [x, *residuals(vjp)], vjp, spaces


def _host_types(
    block: Callable, operands: tuple, types: list, offloaded: frozenset[str]
) -> HostTypes:
    """The types of the residuals that wait in host memory. We find them by tracing the block again,
    under a policy that offloads."""
    spaces = len(types) * [DEVICE]
    if named := offloaded - {INPUT}:
        _, _, spaces = _linearized(partial(block, on_host=named), *operands)
    if INPUT in offloaded:
        spaces = [HOST, *spaces[1:]]
    on_host = zip(types, spaces, strict=True)
    return tuple(like if space == HOST else None for like, space in on_host)


def _split(values: list, host: HostTypes) -> tuple[list, list]:
    """Splits the values into those that stay on the device and those that wait in host memory."""
    pairs = list(zip(values, host, strict=True))
    waiting = [value for value, like in pairs if like is not None]
    # `host` comes from the same block under another policy, whose residuals have the same order.
    assert [a.shape for a in waiting] == [like.shape for like in host if like is not None]
    return [value for value, like in pairs if like is None], waiting


def _joined(on_device: list, on_host: list, host: HostTypes) -> list:
    """The opposite of `_split`."""
    device, waiting = iter(on_device), iter(on_host)
    return [next(device if like is None else waiting) for like in host]


def _unrolled(
    block: Callable, x: jax.Array, weights: Any, constants: Any, common: Any
) -> tuple[jax.Array, Any]:
    """(output of the last block, aux of all blocks, stacked) without a loop. Gathered weights are
    residuals too; with a stash the backward pass would gather them again."""
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
