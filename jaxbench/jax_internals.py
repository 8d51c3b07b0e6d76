"""Everything that this package uses of JAX beyond its public API, each with its reason.

No other module imports `jax._src` or replaces a function of a library.
`tests/test_jax_internals.py` checks each use on every tested version of JAX.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax._src.cudnn import fused_attention_stablehlo


def coordination_client() -> Any:
    """The client of JAX's coordination service; None in a job of one process.

    Processes exchange small values over it without a device. Public JAX has barriers and gathers
    on devices only (`jax.experimental.multihost_utils`), which wait for the queued steps.
    """
    return distributed.global_state.client


def kernel_names(program: jax.stages.Compiled) -> Iterator[tuple[str, ...]]:
    """The names of each custom call and asynchronous start in a compiled program: its own, and that
    of the instruction that an `async-start` wraps.

    `as_text` prints a start and what it wraps as one `reduce-scatter-start`, without the latter's
    name.
    """
    executable: Any = program.runtime_executable()
    for module in executable.hlo_modules():
        for computation in module.computations():
            for i in computation.instructions():
                opcode = i.opcode.name
                if opcode == "kAsyncStart":
                    yield i.name, i.async_wrapped_root().name
                elif opcode.endswith("Start") or (
                    # An allocation runs no kernel.
                    opcode == "kCustomCall" and 'target="AllocateBuffer"' not in i.to_string()
                ):
                    yield (i.name,)


def residuals(vjp: Any) -> list:
    """The residuals of a `jax.vjp` without the arguments of its function: arrays or their types.

    JAX holds the two apart (`VJP.args_res`), so that a stash need hold no weights. Public JAX has
    all of them together, as the leaves of the pytree that `jax.vjp` returns.
    """
    return jax.tree.leaves(replace(vjp, args_res=[]))


def restore_vjp(vjp: Any, saved: Sequence, arguments: list) -> Any:
    """A `jax.vjp` like another one, with these `residuals` and these arguments, as leaves."""
    structure = jax.tree.structure(replace(vjp, args_res=[]))
    return replace(jax.tree.unflatten(structure, saved), args_res=arguments)


@contextmanager
def attention_for_mesh() -> Iterator[None]:
    """Makes JAX check cuDNN attention for the GPUs of the current mesh while a program is traced.

    JAX compares head dims (above 128 only from Hopper on) with the compute capability of this
    machine's own GPU, which a machine that compiles for absent ones does not have. The check itself
    stays. Superfluous once JAX asks the mesh.
    """
    devices = jax.sharding.get_mesh().devices

    def numbers(capability: str) -> tuple[int, ...]:
        return tuple(map(int, capability.split(".")))

    def check(least: str) -> bool:
        return numbers(devices.flat[0].compute_capability) >= numbers(least)

    with _replaced(fused_attention_stablehlo, "check_compute_capability", check):
        yield


@contextmanager
def empty_arrays_from(x: jax.Array) -> Iterator[None]:
    """Makes `jnp.empty` of no elements a slice of `x`, while Transformer Engine is traced.

    It passes such arrays to its kernels. As constants they are moved out of a `shard_map` when a
    scan around it is differentiated, and the partitioner of jax 0.11 crashes on them.
    """
    empty = jnp.empty

    def sliced(shape: Any, dtype: Any = None, **options: Any) -> jax.Array:
        if 0 in np.atleast_1d(shape):
            return x.ravel()[:0].astype(dtype).reshape(shape)
        return empty(shape, dtype, **options)

    with _replaced(jnp, "empty", sliced):
        yield


@contextmanager
def _replaced(module: Any, name: str, function: Callable) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)
