"""What the instructions of a compiled program launch, and the bytes that these kernels, copies and
fills read and write."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache

from jaxbench.base.scopes import ALLOCATES
from jaxbench.xla.hlo import GEMM_CALLS, Program
from jaxbench.xla.instruction import (
    DTYPE_BITS,
    Instruction,
    Scope,
    array_shapes,
    arrays,
    result_shape,
    root,
    shape_bytes,
)

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

SLICES = ("dynamic-slice", "slice", "gather")

ELEMENTWISE = {
    "convert", "copy", "negate", "abs", "add", "subtract", "multiply", "divide", "maximum",
    "minimum", "exponential", "log", "tanh", "logistic", "rsqrt", "sqrt", "power", "select",
    "compare", "and", "or", "not", "clamp", "transpose", "reshape",
}  # fmt: skip
"""Opcodes whose results have an element for each element of an operand."""

COMPUTING = ELEMENTWISE | {"broadcast", "iota", "pad", "concatenate"}
"""Opcodes whose results are new arrays, which a kernel has to write as a whole."""

FP8 = "f8"
"""The names of FP8's types begin with this."""


def launches_kernel(i: Instruction) -> bool:
    """True for an instruction that the GPU executes."""
    free = i.kind in FREE or i.is_done or i.opcode.endswith("-update")
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
    sorts tiles. Each merge to twice the length takes one kernel more than the one before: 2, 3, ..
    """
    fused = i.opcode.startswith("fusion") and i.callees
    done = root(i.body(program.computations)) if fused else i
    if done.opcode != "sort" and not i.target.startswith(CUB_SORT):
        return None
    dtype, dimensions = done.arrays[0]
    if i.target or (len(dimensions) == 1 and dimensions[0] > CUB_FROM):
        keys, *values = (shape_bytes(array) for array in _sorted(i, scope))
        passes = math.ceil(DTYPE_BITS[dtype] / CUB_BITS)
        return Sort(2 * (passes + 2) + 1, keys + 2 * passes * (keys + sum(values)))
    along = int(done.attribute(r"dimensions=\{(\d+)") or len(dimensions) - 1)
    doublings = max(0, math.ceil(math.log2(max(dimensions[along], 1) / SORT_TILE)))
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


def moved_bytes(program: Program, i: Instruction, scope: Scope) -> int:
    """The bytes that a kernel reads and writes: each operand and result once, without the
    workspaces of matmuls.

    An operand that is only sliced counts as its slice. An array that is updated in place counts as
    its update, and twice if a scatter adds to it. A sort moves its arrays in each of its passes.
    `Work.bytes` takes precedence.
    """
    if (sorting := sort(program, i, scope)) is not None:
        return sorting.bytes
    work = program.work(i, scope)
    if work is not None and work.bytes is not None:
        return work.bytes
    body, users = _inside(program, i, scope)
    parameters = {j.name for j in users if j.opcode == "parameter"}
    read = _bytes_read(parameters if i.callees else {*i.operands}, body, users)
    return read + sum(_size(j) for j in _written(users[-1], body, users))


def written_fp8(program: Program, i: Instruction, scope: Scope) -> int:
    """The bytes of FP8 that a kernel writes."""
    body, users = _inside(program, i, scope)
    arrays = (array for j in _written(users[-1], body, users) for array in j.arrays)
    return sum(math.prod(dims) for dtype, dims in arrays if dtype.startswith(FP8))


def _inside(program: Program, i: Instruction, scope: Scope) -> tuple[Scope, list[Instruction]]:
    """What a kernel computes: a fusion's body or the instruction itself, the result last."""
    if not i.callees:
        return scope, [i]
    body = i.body(program.computations)
    result = root(body)
    return body, [*(j for j in body.values() if j is not result), result]


def _bytes_read(names: Collection[str], body: Scope, users: list[Instruction]) -> int:
    """Bytes that a kernel reads of some arrays. `users` are its instructions, the result last.

    A scatter reads what it adds to. Of an array that is sliced after an operation on each element,
    as in `x.astype(bf16)[i]`, a kernel reads the slice."""
    readers: defaultdict[str, list[Instruction]] = defaultdict(list)
    for user in users:
        for operand in {*user.operands}:
            readers[operand].append(user)

    @cache
    def read(name: str) -> int:
        array, total = body[name], 0
        for user in readers[name]:
            first, inner = user.operands[0] == name, user is not users[-1]
            if user.opcode == "bitcast" and inner:
                total += read(user.name)
            elif user.kind in SLICES and first:
                total += _size(user)
            elif user.opcode == "scatter" and name in (arrays := user.operands[: _arrays(user)]):
                total += body[_updates(user)[arrays.index(name)]].bytes
            elif user.opcode in ELEMENTWISE and inner and user.bytes:
                total += array.bytes * read(user.name) // user.bytes
            elif not (first and _in_place(user, body, users)):
                total += array.bytes
        return min(total, array.bytes)

    return sum(read(name) for name in names if name in body)


def _written(i: Instruction, body: Scope, users: list[Instruction]) -> Iterator[Instruction]:
    """The arrays that a kernel writes as its result. `users` are its instructions."""
    if i.opcode == "tuple":
        for name in i.operands:
            yield from _written(body[name], body, users)
    elif i.opcode == "bitcast":
        yield from _written(body[i.operands[0]], body, users)
    elif _in_place(i, body, users):
        yield body[i.operands[1]]
    elif i.opcode == "scatter":
        yield from (body[name] for name in _updates(i))
    elif not _is_workspace(i, body):
        yield i


def _in_place(i: Instruction, body: Scope, users: list[Instruction]) -> bool:
    """True for a dynamic-update-slice of an array that the kernel does not itself compute."""
    if i.kind != "dynamic-update-slice":
        return False
    array = body[i.operands[0]]
    while array.opcode == "bitcast" and array in users:
        array = body[array.operands[0]]
    return not (array in users and array.opcode in COMPUTING)


def _is_workspace(i: Instruction, body: Scope) -> bool:
    """True for the last element of the result of a matmul, if the result is a tuple."""
    if i.opcode != "get-tuple-element" or i.operands[0] not in body:
        return False
    matmul = body[i.operands[0]]
    last = len(matmul.arrays) - 1
    return matmul.target in GEMM_CALLS and i.attribute(r"\bindex=(\d+)") == str(last)


def _arrays(scatter: Instruction) -> int:
    """The number of arrays that a scatter updates. Its operands are the arrays, the indices, and an
    update for each array."""
    return len(scatter.operands) // 2


def _updates(scatter: Instruction) -> list[str]:
    """The updates of a scatter."""
    return list(scatter.operands[_arrays(scatter) + 1 :])


def _size(i: Instruction) -> int:
    """The bytes of an instruction's result, without the workspace of a matmul."""
    shape = result_shape(i)
    if i.target in GEMM_CALLS and shape.startswith("("):
        return shape_bytes(shape) - math.prod(arrays(shape)[-1][1])
    return shape_bytes(shape)
