"""Rewrites parsed instructions that XLA writes indirectly, so that each one says what it runs:
loops without a trip count, collectives inside fusions or asynchronous wrappers, and the devices
that a collective joins."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace

from jaxbench.xla.instruction import TRIP_COUNT, Computations, Instruction, Numbering, Scope, root

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "ragged-all-to-all", "collective-broadcast",
)  # fmt: skip
"""Opcodes of collectives."""

REDUCING = "all-gather", "all-reduce", "reduce-scatter"
"""The collectives that have the attribute `use_global_device_ids`."""

SEVERAL = "async-group"
"""The opcode that we give to an asynchronous operation which consists of several ones."""

SCALARS: dict[str, Callable[..., int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul,
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "NE": operator.ne,
    "copy": int, "bitcast": int, "convert": int,
}  # fmt: skip
"""Integer operations on induction variables by opcode. Comparisons are listed by their
direction."""

INDUCTION = r'"known_induction_variable":\{"tuple_index":"(\d+)"'
"""Pattern of a loop's attribute: the tuple index of its induction variable."""


def rewrite(computations: Computations, replicas: int, partitions: int) -> None:
    """Rewrites in place all instructions of a program with this many replicas and partitions."""
    for scope in computations.values():
        for i in scope.values():
            if i.opcode == "while" and not i.attribute(TRIP_COUNT):
                scope[i.name] = _with_trip_count(i, scope, computations)
            elif i.opcode in ("fusion", "fusion-start", "async-start"):
                scope[i.name] = _unwrapped(i, computations)
            elif i.opcode.endswith(("-done", "-update")) and i.operands[0] in scope:
                scope[i.name] = _completing(i, scope[i.operands[0]])
            i = scope[i.name]
            if i.kind in COLLECTIVES:
                numbering = Numbering(_numbered(i), replicas, partitions)
                scope[i.name] = replace(i, numbering=numbering)


def _numbered(i: Instruction) -> str:
    """What the ids of a collective's replica groups number (XLA's `GetCollectiveOpGroupMode`):
    replicas, partitions, replicas with all of their partitions, or devices."""
    if not i.attribute(r"\b(channel_id)="):
        return "replicas"
    if i.kind not in REDUCING:
        return "partitions"
    return "devices" if i.attribute(r"use_global_device_ids=(true)") else "both"


def _completing(i: Instruction, before: Instruction) -> Instruction:
    """The `-done` or `-update` of an asynchronous operation, renamed to the kind of its start. The
    start becomes its operand, in place of an update."""
    kind = before.opcode.removesuffix("-start").removesuffix("-update")
    start = before.operands[0] if before.opcode.endswith("-update") else before.name
    opcode = f"{kind}-{i.opcode.rpartition('-')[2]}"
    return replace(i, opcode=opcode, operands=(start, *i.operands[1:]))


def _unwrapped(i: Instruction, computations: Computations) -> Instruction:
    """The collective inside a fusion (a Triton collective) or an asynchronous wrapper, under the
    name of its caller. If a wrapper has another operation, that operation, and `SEVERAL` if it has
    several. Else the instruction itself."""
    body = i.body(computations)
    collectives = [j for j in body.values() if j.opcode in COLLECTIVES]
    inner = next(iter(collectives), None)
    start = "-start" if i.is_start else ""
    if i.opcode == "async-start" and (len(collectives) > 1 or root(body).opcode == "tuple"):
        return replace(i, opcode=SEVERAL + start)
    if inner is not None:
        attributes = f"{inner.attributes}, {i.attributes.replace('calls=', 'wraps=')}"
        return replace(i, opcode=inner.opcode + start, attributes=attributes, fused=inner.shape)
    if i.opcode == "async-start":
        wrapped = root(body)
        return replace(i, opcode=wrapped.opcode + start, attributes=wrapped.attributes)
    return i


def _with_trip_count(loop: Instruction, scope: Scope, computations: Computations) -> Instruction:
    """A loop whose trip count a pass of the compiler has dropped, with the count that we find by
    stepping its induction variable. Unchanged if that cannot be evaluated."""
    induction = loop.attribute(INDUCTION)
    if induction is None:
        return loop
    condition, body = (computations[loop.callee(role) or ""] for role in ("condition", "body"))
    index, trips = int(induction), 0

    def evaluate(instruction: str, within: Scope, value: int) -> int:
        return _evaluate(instruction, within, _reads(within, index, value), computations)

    try:
        value = _evaluate(scope[loop.operands[0]].operands[index], scope, {}, computations)
        while evaluate(root(condition).name, condition, value):
            value = evaluate(root(body).operands[index], body, value)
            trips += 1
    except (KeyError, IndexError):
        return loop
    return replace(loop, counted=trips)


def _evaluate(
    name: str, scope: Scope, values: Mapping[str, int], computations: Computations
) -> int:
    """The integer that an instruction computes, given known values of others by name. Raises
    KeyError if an operation is none of `SCALARS`."""
    if name in values:
        return values[name]
    i = scope[name]
    if i.opcode == "constant":
        return int(i.operands[0])
    operands = [_evaluate(operand, scope, values, computations) for operand in i.operands]
    if i.opcode == "fusion":
        inner = i.body(computations)
        parameters = [j for j in inner.values() if j.opcode == "parameter"]
        arguments = {j.name: operands[int(j.operands[0])] for j in parameters}
        return _evaluate(root(inner).name, inner, arguments, computations)
    return SCALARS[i.attribute(r"direction=(\w+)") or i.opcode](*operands)


def _reads(scope: Scope, index: int, value: int) -> dict[str, int]:
    """`value`, under the name of each instruction that reads this element of the loop's state."""
    elements = (i for i in scope.values() if i.opcode == "get-tuple-element")
    return {i.name: value for i in elements if i.attribute(r"\bindex=(\d+)") == str(index)}
