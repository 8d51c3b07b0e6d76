"""The bytes that kernels of a compiled program read and write."""

import math
from collections.abc import Iterator

from jaxbench.xla.hlo import GEMM_CALLS, Program
from jaxbench.xla.instruction import Instruction, Scope, root
from jaxbench.xla.launches import sort

SLICES = ("dynamic-slice", "slice", "gather")

FP8 = "f8"
"""The names of FP8's types begin with this."""


def traffic(program: Program, i: Instruction, scope: Scope) -> int:
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
    read = sum(_read(name, body, users) for name in (parameters if i.callees else set(i.operands)))
    return read + sum(_size(j) for j in _written(users[-1], body))


def written_fp8(program: Program, i: Instruction, scope: Scope) -> int:
    """The bytes of FP8 that a kernel writes."""
    body, users = _inside(program, i, scope)
    arrays = (array for j in _written(users[-1], body) for array in j.arrays)
    return sum(math.prod(dims) for dtype, dims in arrays if dtype.startswith(FP8))


def _inside(program: Program, i: Instruction, scope: Scope) -> tuple[Scope, list[Instruction]]:
    """What a kernel computes: a fusion's body or the instruction itself, the result last."""
    if not i.callees:
        return scope, [i]
    body = program.computations[i.callees[0][0]]
    result = root(body)
    return body, [*(j for j in body.values() if j is not result), result]


def _read(name: str, body: Scope, users: list[Instruction]) -> int:
    """Bytes that these instructions read of an array. A scatter reads what it adds to."""
    if name not in body:
        return 0
    total = 0
    for user in users:
        if name not in user.operands:
            continue
        first = user.operands[0] == name
        if user.opcode == "bitcast":
            total += _read(user.name, body, users)
        elif user.opcode in SLICES and first:
            total += user.bytes
        elif user.opcode == "scatter" and name in (arrays := user.operands[: _arrays(user)]):
            total += body[_updates(user)[arrays.index(name)]].bytes
        elif not (user.opcode == "dynamic-update-slice" and first):
            return body[name].bytes
    return min(total, body[name].bytes)


def _written(i: Instruction, body: Scope) -> Iterator[Instruction]:
    """The arrays that a computation writes as its result."""
    if i.opcode == "tuple":
        for name in i.operands:
            yield from _written(body[name], body)
    elif i.opcode == "bitcast":
        yield from _written(body[i.operands[0]], body)
    elif i.opcode == "dynamic-update-slice":
        yield body[i.operands[1]]
    elif i.opcode == "scatter":
        yield from (body[name] for name in _updates(i))
    else:
        yield i


def _arrays(scatter: Instruction) -> int:
    """The number of arrays that a scatter updates. Its operands are the arrays, the indices, and an
    update for each array."""
    return len(scatter.operands) // 2


def _updates(scatter: Instruction) -> list[str]:
    """The updates of a scatter."""
    return list(scatter.operands[_arrays(scatter) + 1 :])


def _size(i: Instruction) -> int:
    """The bytes of an instruction's result, without the workspace of a matmul."""
    if i.target in GEMM_CALLS and i.shape.startswith("("):
        return i.bytes - math.prod(i.arrays[-1][1])
    return i.bytes
