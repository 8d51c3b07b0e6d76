"""Times the candidate sizes of the Pallas kernels that a run's program calls."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.jax_internals import attention_for_mesh
from jaxbench.ops.grouped.groups import Groups
from jaxbench.ops.kernel_sizes import Case, Choices, using
from jaxbench.ops.pallas_call import ignoring_pallas_deprecation
from jaxbench.ops.quantized.kernels import Rows
from jaxbench.recipe.settings import Run
from jaxbench.train.step import abstract_state, make_program
from jaxbench.xla import flags

LANES = 4
"""Candidates that a process compiles at a time."""

LEAST_GAIN = 0.03
"""A candidate has to be faster than the first one by this share, so that noise does not change
programs from start to start."""


def cases(run: Run) -> dict[str, Case]:
    """The kernels with candidates that a run's program calls, by name; and those that JAX removes
    again, because it uses only a part of what they compute (`jax_internals.if_used`)."""
    choices = Choices()
    with using(choices), attention_for_mesh(), ignoring_pallas_deprecation():
        make_program(run).trace(abstract_state(run))
    return choices.asked


def using_sizes(
    cases: Mapping[str, Case], sizes: Mapping[str, str]
) -> AbstractContextManager[None]:
    """A context in which kernels have these sizes, which are texts of candidates, by case."""
    texts = {name: {str(c): c for c in case.candidates} for name, case in cases.items()}
    return using(Choices({name: texts[name][text] for name, text in sizes.items()}))


def timings(case: Case, run: Run) -> dict[str, float]:
    """Seconds of each candidate that compiles and runs on the first GPU of this process, the better
    of two measurements."""
    on = mesh.make_mesh((1,) * len(run.mesh_shape), jax.local_devices()[:1])
    leaves, tree = jax.tree.flatten(case.arguments)
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    options: dict[str, Any] = {**flags.options(run, mesh.platform())}

    def kernel(sizes: Any, *arrays: jax.Array) -> Any:
        given = iter(arrays)
        filled = [next(given) if isinstance(a, jax.ShapeDtypeStruct) else a for a in leaves]
        return case.kernel(*jax.tree.unflatten(tree, filled), sizes=sizes)

    def compiled(candidate: Any) -> Any:
        with jax.set_mesh(on), ignoring_pallas_deprecation():
            # As in a train step, no array of a kernel is sharded.
            of_device = mesh.on_each_device(partial(kernel, candidate), PartitionSpec())
            lowered = jax.jit(of_device).lower(*arrays)
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError:  # needs more shared memory than there is
            return None

    names = map(str, case.candidates)
    with ThreadPoolExecutor(LANES) as pool:
        programs = dict(zip(names, pool.map(compiled, case.candidates), strict=True))
    with jax.set_mesh(on), jax.transfer_guard("allow"):
        values = [a for a in jax.tree.leaves(drawn(case.arguments)) if isinstance(a, jax.Array)]
        found: dict[str, float] = {}
        for name, program in 2 * [*programs.items()]:
            if program is not None:
                with suppress(jax.errors.JaxRuntimeError):  # no memory is left, say
                    found[name] = min(seconds(program, *values, repeats=10), found.get(name, 1e9))
    return found


def choose(case: Case, found: dict[str, float]) -> dict[str, Any]:
    """For the record: the `sizes` of the fastest candidate, as text, and the `seconds` of all. The
    first candidate is chosen unless another is clearly faster."""
    first = str(case.candidates[0])
    best = min(found, key=found.__getitem__, default=first)
    if first in found and found[best] > (1 - LEAST_GAIN) * found[first]:
        best = first
    return {"sizes": best, "seconds": found}


def is_choice(choice: Any, case: Case) -> bool:
    """Whether a value that was kept names a candidate."""
    names = {str(candidate) for candidate in case.candidates}
    return isinstance(choice, dict) and choice.get("sizes") in names


def drawn(arguments: Sequence[Any]) -> Any:
    """Arguments of a kernel: random numbers, groups that are equally large, and rows that are read
    from all of the first argument."""
    numbers = count()

    def draw(leaf: Any) -> Any:
        if isinstance(leaf, Groups):
            return leaf.of_equal_size()
        if isinstance(leaf, Rows):
            return leaf.in_order(arguments[0].shape[1])
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        key = jax.random.fold_in(jax.random.key(0), next(numbers))
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jax.random.bits(key, leaf.shape, jnp.uint8).astype(leaf.dtype)
        return jnp.abs(jax.random.normal(key, leaf.shape, jnp.bfloat16)).astype(leaf.dtype)

    return jax.tree.map(draw, arguments, is_leaf=lambda leaf: isinstance(leaf, Groups | Rows))


def seconds(function: Callable[..., Any], *arguments: jax.Array, repeats: int = 20) -> float:
    """Mean seconds of a call, after two warm-up calls."""
    for _ in range(2):
        jax.block_until_ready(function(*arguments))
    start = time.perf_counter()
    for _ in range(repeats):
        result = function(*arguments)  # frees the one before: results may be as large as memory
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats
