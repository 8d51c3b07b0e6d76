"""State-space duality (Mamba-2; Dao and Gu 2024): a mixer between its projections. It consists of a
causal convolution with SiLU, a selective scan, and a gate with RMSNorm.

There is one file for each implementation. The registry here chooses among them; the check of
compiled programs and the plan read its entries.

The functions are pure functions of one device's arrays, which hold whole sequences.

Dimension letters: B batch, S sequence, G groups, K chunks, Q and R tokens of a chunk, H heads of a
group (which share b and c), P head dim, N state, W taps, C convolved channels, I columns of the
input projection, F features.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Array, Float

from jaxbench.base.scopes import TRITON
from jaxbench.ops import implementations
from jaxbench.ops.implementations import HOPPER, Task, lazy
from jaxbench.ops.ssd import xla
from jaxbench.ops.ssd.parts import Dims, Parameters
from jaxbench.recipe.settings import Execution

__all__ = ["IMPLEMENTATIONS", "Dims", "Implementation", "Parameters", "choose"]


@dataclass(frozen=True, kw_only=True)
class Implementation(implementations.Implementation):
    """An implementation of mixers between their projections: `mixer` maps the input projection of a
    device's groups to the input of the output projection."""

    mixer: Callable[[Dims, Float[Array, "B S G I"], Parameters], Float[Array, "B S G F"]]


IMPLEMENTATIONS = {
    "pallas": Implementation(
        mixer=lazy("ssd.pallas.mixer"),
        least=HOPPER,
        refusal=lazy("ssd.pallas.refusal"),
        calls=(TRITON,),
    ),
    "xla": Implementation(mixer=xla.mixer),
}
"""The implementations by name; `auto` takes the first one that does not refuse."""


def choose(execution: Execution, task: Task) -> str:
    """The name of the implementation that computes a model's mixers. Raises RecipeError if the
    requested implementation cannot do it."""

    def refusal(name: str) -> str | None:
        return IMPLEMENTATIONS[name].why_not(task)

    return implementations.choose("ssd", execution.ssd, IMPLEMENTATIONS, refusal)
