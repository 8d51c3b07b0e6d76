"""Sizes of the kernels."""

from dataclasses import dataclass

from jaxbench.ops.pallas import Launch

EIGHT_WARPS = Launch(8)


@dataclass(frozen=True)
class Tuning:
    """Sizes that affect the speed of kernels, not yet chosen by measurement
    (`benchmarks/one_gpu/mixers.py` has others).

    The scan goes through a sequence in chunks of `chunk` tokens, its forward pass in parts of
    `part`; a state is written per chunk. A program of the gradients of b and c computes `columns`
    columns of the state.
    """

    chunk: int = 128
    part: int = 64
    columns: int = 128
    forward: Launch = EIGHT_WARPS
    reverse: Launch = EIGHT_WARPS
    bc: Launch = EIGHT_WARPS
    interpret: bool = False
