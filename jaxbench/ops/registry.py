"""What the registries of implementations share."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

TRITON = "__gpu$xla.gpu.triton"
"""Target of the custom calls that Pallas kernels compile to."""


def lazy(name: str) -> Callable[..., Any]:
    """A function of `jaxbench.ops` by its name, such as `quantized.te.dot`. Its module is
    imported when it is first called, so a run only loads the implementations that it uses."""
    module, _, function = name.rpartition(".")

    def call(*args: Any, **options: Any) -> Any:
        return getattr(import_module(f"jaxbench.ops.{module}"), function)(*args, **options)

    return call
