"""State-space duality (Mamba-2; Dao and Gu 2024): what a mixer computes between its projections,
causal convolution with SiLU, selective scan, gate with RMSNorm.

Imports `recipe`, `errors`, and the types of `xla`. One file for each implementation; the registry
here chooses among them. From an entry the check of compiled programs and the plan learn of it.

Pure functions of what one device holds. `context` names the mesh axes over which the sequence is
split into consecutive shards; between shards travel one state per head and the last few tokens.

Dimension letters: B batch, S sequence, G groups, K chunks, Q and R tokens of a chunk, H heads of a
group (which share b and c), P head dim, N state, W taps, C convolved channels, I columns of the
input projection, F features.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxtyping import Array, Float

from jaxbench.errors import RecipeError
from jaxbench.recipe.model import Mamba, ModelConfig
from jaxbench.recipe.settings import Execution
from jaxbench.ssd import pallas, xla
from jaxbench.ssd.parts import Axes, Dims, Parameters
from jaxbench.xla.hlo import Rules

__all__ = ["IMPLEMENTATIONS", "Dims", "Implementation", "Parameters", "choose"]


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute it.

    `mixer` takes a device's own columns of the input projection, of all its groups, and gives what
    the output projection multiplies. `platforms` are those on which it runs (None: all). `refusal`
    says why it cannot compute a model in a dtype, on so many tokens of a sequence. `rules` tell the
    work of its custom calls, all of which a compiled step has to hold.
    """

    mixer: Callable[[Dims, Axes, Float[Array, "B S G I"], Parameters], Float[Array, "B S G F"]]
    platforms: tuple[str, ...] | None = None
    refusal: Callable[[Mamba, str, int], str | None] = lambda mamba, dtype, length: None
    rules: Rules = field(default_factory=dict)


IMPLEMENTATIONS = {
    "xla": Implementation(mixer=xla.mixer),
    "pallas": Implementation(
        mixer=pallas.mixer, platforms=("gpu",), refusal=pallas.refusal, rules=pallas.RULES
    ),
}
"""By name; `auto` takes the first. That is XLA's until the kernels have been measured on a GPU."""


def choose(execution: Execution, cfg: ModelConfig, dtype: str, length: int, platform: str) -> str:
    """The name of the implementation that computes a model's mixers, `length` tokens of a sequence
    on each rank.

    Raises RecipeError where the one that is asked for cannot.
    """
    asked = f"execution.ssd = {execution.ssd}"
    if execution.ssd == "auto" or cfg.mamba is None or "M" not in cfg.letters:
        return next(iter(IMPLEMENTATIONS))
    found = IMPLEMENTATIONS[execution.ssd]
    if found.platforms and platform not in found.platforms:
        raise RecipeError(f"{asked} does not run on a {platform}; expected auto or xla")
    if refused := found.refusal(cfg.mamba, dtype, length):
        raise RecipeError(f"{asked} cannot compute {refused}; expected auto or xla")
    return execution.ssd
