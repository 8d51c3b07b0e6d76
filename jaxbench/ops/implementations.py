"""What implementations of operators share: choice, imports at the first call, custom calls."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from jax.experimental.xla_metadata import set_xla_metadata

from jaxbench.base import hardware
from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import Capability
from jaxbench.recipe.model import ModelConfig

AMPERE: Capability = (8, 0)
HOPPER: Capability = (9, 0)


@dataclass(frozen=True)
class Task:
    """What an implementation has to compute, and where: a model in a dtype, over sequences of
    `length` tokens, on a platform. `capability` is that of its GPUs, None if it is not known."""

    cfg: ModelConfig
    dtype: str
    length: int
    platform: str
    capability: Capability | None = None


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """What implementations of any operator have.

    `least` is the least compute capability of GPUs on which it runs; with None it runs everywhere.
    `refusal` returns why it cannot compute a task, or None. `calls` are the custom calls that a
    compiled step must contain.
    """

    least: Capability | None = None
    refusal: Callable[[Task], str | None] = lambda task: None
    calls: tuple[str, ...] = ()

    def not_on(self, task: Task) -> str | None:
        """Why it does not run on the platform of a task; None if it does."""
        if self.least is None:
            return None
        if task.platform != "gpu":
            return f"does not run on a {task.platform}"
        if task.capability and task.capability < self.least:
            needed, got = (".".join(map(str, of)) for of in (self.least, task.capability))
            return f"needs compute capability {needed} or later, not {got}"
        return None

    def why_not(self, task: Task) -> str | None:
        """Why it cannot compute a task on its platform; None if it can."""
        return self.not_on(task) or self.refusal(task)


def choose(
    setting: str, requested: str, names: Iterable[str], refusal: Callable[[str], str | None]
) -> str:
    """The name that a setting of `execution` requests, or for `auto` the first of the `names` that
    does not refuse. Raises RecipeError if that one refuses, or if all do."""
    refused = []
    for name in names if requested == "auto" else (requested,):
        if not (reason := refusal(name)):
            return name
        refused.append(f"{name} {reason}")
    if requested == "auto":
        raise RecipeError(f"execution.{setting} = auto: {'; '.join(refused)}")
    raise RecipeError(f"execution.{setting} = {refused[0]}; expected auto")


def lazy(name: str) -> Callable[..., Any]:
    """A function of `jaxbench.ops` by its name, such as `quantized.te.dot`. Its module is
    imported when it is first called, so a run only loads the implementations that it uses."""
    module, _, function = name.rpartition(".")

    def call(*args: Any, **options: Any) -> Any:
        return getattr(import_module(f"jaxbench.ops.{module}"), function)(*args, **options)

    return call


def latency_hint(flops: int, dtype: str) -> AbstractContextManager:
    """Marks the custom calls that are traced inside with the time that their `flops` take at the
    GPU's peak, so that XLA's scheduler overlaps collectives with them. Without a mark it assumes
    that they take no time. The GPU is the H100, or the B200 for a `dtype` that the H100 lacks."""
    gpu = hardware.H100 if dtype in hardware.H100.tflops else hardware.B200
    least_ns = flops / (gpu.tflops[dtype] * 1e3)
    return set_xla_metadata(latency_metadata=str(round(least_ns)))
