"""What every layer needs besides its input: the kernels to use, the rotary tables, and the counters
that seed random draws."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int

from jaxbench import mesh
from jaxbench.models.layers import rotary_tables
from jaxbench.ops import attention, grouped, ssd
from jaxbench.ops.draws import Counters
from jaxbench.ops.implementations import Task
from jaxbench.recipe.model import ModelConfig
from jaxbench.recipe.settings import Execution, Precision


class Sequences(NamedTuple):
    """The sequences of a microbatch, or of several with a leading dimension: tokens, targets, and
    the number of the microbatch's first sequence. Sequences are counted from the first step on."""

    tokens: Int[Array, "*n B S"]
    targets: Int[Array, "*n B S"]
    first_sequence: Int[Array, "*n"] | int = 0


@dataclass(frozen=True)
class Kernels:
    """The names of what computes attention, Mamba-2 and dropless experts: keys of
    `attention.IMPLEMENTATIONS`, `ssd.IMPLEMENTATIONS` and `grouped.IMPLEMENTATIONS`."""

    attention: str = "xla"
    ssd: str = "xla"
    grouped_matmul: str = "xla"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """The second argument of every layer. As a pytree it holds only the arrays. `rotary` are
    `layers.rotary_tables`, None without position embedding. The experts of a layer compute a
    microbatch in `expert_parts`."""

    rotary: Any = None
    counters: Counters = field(default_factory=Counters)
    kernels: Kernels = field(default_factory=Kernels, metadata={"static": True})
    expert_parts: int = field(default=1, metadata={"static": True})

    def with_counters(self, **changes: Any) -> "Context":
        """This context with changed `counters`."""
        return replace(self, counters=replace(self.counters, **changes))

    def at_layer(self, index: int) -> "Context":
        """The context of the layer of this index in a block, from the context of the block, whose
        `counters.layer` is the number of its first layer."""
        first = self.counters.layer
        return self if first is None else self.with_counters(layer=first + index)


def make_context(
    cfg: ModelConfig, length: int, execution: Execution, precision: Precision
) -> Context:
    """The context of a forward pass over sequences of `length` tokens, on the current mesh."""
    mixer = cfg.attention_mixer
    task = Task(cfg, precision.dtype, length, mesh.platform(), mesh.capability())
    rotary = rotary_tables(mixer, length) if mixer else None
    kernels = choose_kernels(execution, task)
    return Context(rotary, kernels=kernels, expert_parts=execution.expert_parts)


def choose_kernels(execution: Execution, task: Task) -> Kernels:
    """The kernels that compute a model. Raises RecipeError if a requested kernel cannot do it."""
    return Kernels(
        attention=attention.choose(execution, task),
        ssd=ssd.choose(execution, task) if task.cfg.mamba else "xla",
        grouped_matmul=grouped.choose(execution, task) if task.cfg.dropless else "xla",
    )
