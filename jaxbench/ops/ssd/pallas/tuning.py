"""Sizes of the kernels."""

from dataclasses import dataclass

from jaxbench.ops.pallas_call import Launch

EIGHT_WARPS = Launch(8)
LOADS_AHEAD = Launch(8, 2)


@dataclass(frozen=True)
class Tuning:
    """Sizes that affect the speed of kernels. They were not chosen by measurement
    (`benchmarks/one_gpu/mixers.py` has others).

    The scan goes through a sequence in chunks of `chunk` tokens; its forward pass goes through a
    chunk in parts of `part` tokens. One state is written per chunk. The gradient of x takes squares
    of `part` by `part` tokens. A program of the gradients of b and c computes `part` tokens and
    `columns` columns of the state.
    """

    chunk: int = 128
    part: int = 64
    columns: int = 128
    forward: Launch = LOADS_AHEAD
    reverse: Launch = EIGHT_WARPS
    x: Launch = EIGHT_WARPS
    bc: Launch = EIGHT_WARPS
    interpret: bool = False
