"""The kernels, copies and fills that the instructions of a compiled program launch."""

import math
from dataclasses import dataclass

from jaxbench.xla.hlo import ALLOCATES, Program
from jaxbench.xla.instruction import DTYPE_BITS, Instruction, Scope, array_shapes, root, shape_bytes

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "while", "conditional", "call", "domain", "add-dependency",
}  # fmt: skip
"""Opcodes that launch no kernel."""

CUB_SORT = "__cub$DeviceRadixSort"
"""The target of a sort by CUB begins with this."""

CUB_FROM, CUB_BITS = 16384, 8
"""The number of elements above which XLA sorts with CUB if it compiles with a GPU
(sort_rewriter.cc), and the bits of a key by which each pass of CUB sorts."""

SORT_TILE = 4096
"""The number of elements that one kernel of XLA's own sort sorts in shared memory."""


def launches_kernel(i: Instruction) -> bool:
    """True for an instruction that the GPU executes."""
    free = i.opcode in FREE or i.opcode.endswith(("-done", "-update"))
    return not free and i.target != ALLOCATES


def launches(program: Program, i: Instruction, scope: Scope) -> int:
    """The number of kernels, copies and fills that an instruction launches on a GPU."""
    found = sort(program, i, scope)
    return found.launches if found else int(launches_kernel(i))


@dataclass(frozen=True)
class Sort:
    """A sort: the number of its launches, and the bytes that they read and write in all passes."""

    launches: int
    bytes: int


def sort(program: Program, i: Instruction, scope: Scope) -> Sort | None:
    """The sort that an instruction runs, possibly inside a fusion; None if it runs none.

    CUB counts the digits of all keys, and then reads and writes keys and values once for each
    digit. Each kernel needs a fill, and one kernel writes the numbers that are sorted along
    (counted on null GPUs). XLA's own sort is bitonic and works in a copy of its operand. One kernel
    sorts tiles. To merge them to twice the length takes one kernel more each time: 2, 3, ..
    """
    fused = i.opcode.startswith("fusion") and i.callees
    done = root(program.computations[i.callees[0][0]]) if fused else i
    if done.opcode != "sort" and not i.target.startswith(CUB_SORT):
        return None
    dtype, dimensions = done.arrays[0]
    if i.target or (len(dimensions) == 1 and dimensions[0] > CUB_FROM):
        keys, *values = (shape_bytes(array) for array in _sorted(i, scope))
        passes = math.ceil(DTYPE_BITS[dtype] / CUB_BITS)
        return Sort(2 * (passes + 2) + 1, keys + 2 * passes * (keys + sum(values)))
    doublings = max(0, math.ceil(math.log2(max(dimensions[-1], 1) / SORT_TILE)))
    passes = 1 + math.comb(doublings + 2, 2)
    return Sort(passes, 2 * passes * done.bytes)


def _sorted(i: Instruction, scope: Scope) -> list[str]:
    """The shapes of the arrays that CUB sorts: the keys, and the values that are read afterwards.
    For an absent GPU XLA adds numbers that only make its own sort stable, as CUB's sort is. The
    last array of a call of CUB is its workspace."""
    if not i.shape.startswith("("):
        return [i.shape]
    arrays = array_shapes(i.shape)
    if i.target:
        return arrays[:-1]
    users = [user for user in scope.values() if i.name in user.operands]
    read = {user.attribute(r"\bindex=(\d+)") for user in users}
    whole = i.is_root or None in read
    return [array for n, array in enumerate(arrays) if n == 0 or whole or str(n) in read]
