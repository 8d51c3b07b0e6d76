"""Sizes of the kernels."""

from dataclasses import dataclass

from jaxbench import mesh
from jaxbench.ops.pallas_call import Launch

EIGHT_WARPS = Launch(8)
LOADS_AHEAD = Launch(8, 2)
FOUR_WARPS = Launch(4, 2)


@dataclass(frozen=True)
class Tuning:
    """Sizes that affect the speed of kernels. The defaults are the fastest that we timed on an
    H100, at the shapes of Nemotron-H 56B (`benchmarks/one_gpu/mixers.py`).

    The scan goes through a sequence in chunks of `chunk` tokens; its forward pass goes through a
    chunk in parts of `part` tokens. One state is written per chunk. The gradient of x takes squares
    of `part` by `part` tokens. A program of the gradients of b and c computes `part` tokens and
    `columns` columns of the state.
    """

    chunk: int = 128
    part: int = 64
    columns: int = 128
    forward: Launch = LOADS_AHEAD
    reverse: Launch = LOADS_AHEAD
    x: Launch = FOUR_WARPS
    bc: Launch = LOADS_AHEAD
    interpret: bool = False


BLACKWELL = Tuning(reverse=EIGHT_WARPS, x=EIGHT_WARPS, bc=EIGHT_WARPS)
"""Sizes for Blackwell, where nobody has timed the kernels. With these, ptxas spills least."""


def chosen() -> Tuning:
    """The sizes for the GPUs of the current mesh."""
    capability = mesh.capability()
    return BLACKWELL if capability and capability[0] >= 10 else Tuning()
