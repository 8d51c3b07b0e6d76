"""The bytes that kernels of a compiled program read and write."""

import math

from jaxbench.xla.hlo import GEMM_CALLS, Program
from jaxbench.xla.instruction import Instruction, Scope, root
from jaxbench.xla.launches import sort

SLICES = ("dynamic-slice", "slice", "gather")


def traffic(program: Program, i: Instruction, scope: Scope) -> int:
    """The bytes that a kernel reads and writes: each operand and result once, without the
    workspaces of matmuls.

    An operand that is only sliced counts as its slice. An array that is updated in place counts as
    its update. A sort moves its arrays in each of its passes. `Work.bytes` takes precedence.
    """
    if (sorting := sort(program, i, scope)) is not None:
        return sorting.bytes
    work = program.work(i, scope)
    if work is not None and work.bytes is not None:
        return work.bytes
    if not i.callees:
        read = sum(_read(name, scope, [i]) for name in set(i.operands))
        return read + _written(i, scope)
    body = program.computations[i.callees[0][0]]
    parameters = [j.name for j in body.values() if j.opcode == "parameter"]
    read = sum(_read(name, body, list(body.values())) for name in parameters)
    return read + _written(root(body), body)


def _read(name: str, body: Scope, users: list[Instruction]) -> int:
    """Bytes that these instructions read of an array."""
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
        elif not (user.opcode == "dynamic-update-slice" and first):
            return body[name].bytes
    return min(total, body[name].bytes)


def _written(i: Instruction, body: Scope) -> int:
    """Bytes that a computation writes as its result."""
    if i.opcode == "tuple":
        return sum(_written(body[name], body) for name in i.operands)
    if i.opcode == "bitcast":
        return _written(body[i.operands[0]], body)
    if i.opcode == "dynamic-update-slice":
        return body[i.operands[1]].bytes
    if i.target in GEMM_CALLS and i.shape.startswith("("):
        return i.bytes - math.prod(i.arrays[-1][1])  # without the bytes of its workspace
    return i.bytes
