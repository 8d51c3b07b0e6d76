"""Sizes of Pallas kernels: tiles, warps, stages. Which are the fastest depends on the shapes and on
the GPU, so a kernel has candidates. It takes the first one, unless a tuner has timed them
(`run.tune`) and installed its choice with `using`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import jax


@dataclass(frozen=True)
class Case:
    """A kernel that a program calls with arguments of some shapes.

    `kernel(*arguments, sizes=candidate)` calls it. `arguments` are pytrees; an array is described
    by a `jax.ShapeDtypeStruct`.
    """

    kernel: Callable[..., Any]
    arguments: tuple[Any, ...]
    candidates: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The kernel with its arguments. Two cases with the same name have the same choice."""
        module = self.kernel.__module__.removeprefix("jaxbench.ops.")
        leaves = map(_described, jax.tree.leaves(self.arguments))
        return " ".join([f"{module}.{self.kernel.__name__}", *leaves])


@dataclass
class Choices:
    """The candidates that a tuner chose, by the name of their case, and the cases that a program
    asked for while it was traced."""

    chosen: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Case] = field(default_factory=dict)


_choices: ContextVar[Choices] = ContextVar("choices")


@contextmanager
def using(choices: Choices) -> Iterator[None]:
    """Kernels that are traced inside this context take these choices. JAX forgets what it traced
    before and inside, since it would reuse kernels with other sizes."""
    token = _choices.set(choices)
    jax.clear_caches()
    try:
        yield
    finally:
        _choices.reset(token)
        jax.clear_caches()


def tunable(candidates: Callable[..., tuple[Any, ...]]) -> Callable[..., Callable[..., Any]]:
    """Decorates a kernel. A call without the keyword `sizes` takes what the tuner chose among
    `candidates(*arguments)`, else the first of them."""

    def decorate(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(kernel)
        def with_sizes(*arguments: Any, sizes: Any = None) -> Any:
            if sizes is None:
                among = candidates(*arguments)
                sizes = among[0]
                if choices := _choices.get(None):
                    case = Case(with_sizes, jax.tree.map(_without_values, arguments), among)
                    choices.asked[case.name] = case
                    sizes = choices.chosen.get(case.name, sizes)
            return kernel(*arguments, sizes=sizes)

        return with_sizes

    return decorate


def _without_values(leaf: Any) -> Any:
    is_array = isinstance(leaf, jax.Array)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array else leaf


def _described(leaf: Any) -> str:
    is_array = isinstance(leaf, jax.ShapeDtypeStruct)
    return f"{leaf.dtype.name}{list(leaf.shape)}" if is_array else str(leaf)
