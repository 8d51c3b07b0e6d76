"""The kernels, copies and fills that the instructions of a compiled program launch."""

import math

from jaxbench.xla.hlo import ALLOCATES, Program
from jaxbench.xla.instruction import Instruction, root

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "while", "conditional", "call", "domain", "add-dependency",
}  # fmt: skip
"""Opcodes that launch no kernel."""

CUB_FROM, CUB_LAUNCHES = 16384, 6 + 6 + 1
"""The number of elements above which XLA sorts with CUB if it compiles with a GPU
(sort_rewriter.cc). Then what such a sort launches for 32 bits: kernels, fills, and the numbers that
are sorted along (counted on null GPUs)."""

SORT_TILE = 4096
"""The number of elements that one kernel of XLA's own sort sorts in shared memory."""


def launches_kernel(i: Instruction) -> bool:
    """True for an instruction that the GPU executes."""
    free = i.opcode in FREE or i.opcode.endswith(("-done", "-update"))
    return not free and i.target != ALLOCATES


def launches(program: Program, i: Instruction) -> int:
    """The number of kernels, copies and fills that an instruction launches on a GPU; a sort
    launches several. XLA's own sort is bitonic and works in a copy of its operand. One kernel sorts
    tiles. To merge them to twice the length takes one kernel more each time: 2, 3, .."""
    fused = i.callees and i.opcode.startswith("fusion")
    done = root(program.computations[i.callees[0][0]]) if fused else i
    if done.opcode != "sort":
        return int(launches_kernel(i))
    _, dimensions = done.arrays[0]
    if len(dimensions) == 1 and dimensions[0] > CUB_FROM:
        return CUB_LAUNCHES
    doublings = max(0, math.ceil(math.log2(max(dimensions[-1], 1) / SORT_TILE)))
    return 1 + math.comb(doublings + 2, 2)
