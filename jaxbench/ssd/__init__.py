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
from dataclasses import dataclass

from jaxtyping import Array, Float

from jaxbench.errors import RecipeError
from jaxbench.recipe.settings import Execution
from jaxbench.ssd import xla
from jaxbench.ssd.parts import Axes, Dims, Parameters

Mixer = Callable[[Dims, Axes, Float[Array, "B S G I"], Parameters], Float[Array, "B S G F"]]


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute it.

    `mixer` takes a device's own columns of the input projection, of all its groups, and gives what
    the output projection multiplies. `platforms` are those on which it runs (None: all).
    """

    mixer: Mixer
    platforms: tuple[str, ...] | None = None


IMPLEMENTATIONS = {"xla": Implementation(mixer=xla.mixer)}
"""By name; `auto` takes the first that runs."""


def choose(execution: Execution, platform: str) -> str:
    """The name of the implementation that computes a model's Mamba-2 mixers.

    Raises RecipeError where the one that is asked for cannot.
    """
    names = [
        n for n, each in IMPLEMENTATIONS.items() if platform in (each.platforms or (platform,))
    ]
    if execution.ssd != "auto":
        names = [name for name in names if name == execution.ssd]
    if not names:
        raise RecipeError(f"execution.ssd = {execution.ssd} does not run on a {platform}")
    return names[0]
