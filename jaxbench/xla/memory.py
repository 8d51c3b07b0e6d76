"""The largest buffers of a compiled program at its peak, by names that a person can act on.

XLA dumps, beside the program, which buffers are live at the peak; the program's text says what made
each: an argument by its path in the train state, an activation by the operation and, where a scan
stacks it, by what it stacks.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxbench.xla import hlo
from jaxbench.xla.hlo import Instruction, Program, Scope

PASSED_ON = ("get-tuple-element", "bitcast", "copy")
CLONE = ".double_buffer_clone"


@dataclass(frozen=True)
class Buffer:
    """A live buffer: bytes on one device, HLO shape, and what it is."""

    bytes: int
    shape: str
    name: str


def peak_section(live_ranges: str) -> Iterator[tuple[str, int]]:
    """(value, bytes) of each buffer at the peak, from the text of XLA's `live-range` dump."""
    peak = re.search(r"Live ranges at \d+ \(peak\):\n((?: +.+ bytes.*\n)*)", live_ranges)
    for line in (peak.group(1) if peak else "").splitlines():
        if found := re.match(r" *(.+?): (\d+) bytes", line):
            yield found.group(1), int(found.group(2))


def largest(program: Program, live_ranges: str, count: int) -> list[Buffer]:
    """The `count` largest buffers at the peak, named."""
    live = dict(peak_section(live_ranges))
    for value in list(live):
        # A loop of two iterations per body updates a stack twice, in one place.
        first = value.removesuffix(f"{CLONE}{{}}") + "{}"
        if "dynamic_update_slice" in value and value.endswith(f"{CLONE}{{}}") and first in live:
            del live[value]
    ordered = sorted(live.items(), key=lambda item: -item[1])[:count]
    names = _Names(program)
    return [names.buffer(value, size) for value, size in ordered]


class _Names:
    def __init__(self, program: Program):
        self.program = program
        self.scopes = {name: scope for scope in program.computations.values() for name in scope}
        self.starts = [(i, scope) for i, scope, _ in program.walk() if i.opcode.endswith("-start")]
        self.loops = {
            scope[i.operands[0]].name: i for i, scope, _ in program.walk() if i.opcode == "while"
        }

    def buffer(self, value: str, size: int) -> Buffer:
        """`value` is an instruction with a tuple index: `while.3{2}`."""
        name, _, index = value.rstrip("}").partition("{")
        if name in self.scopes:
            scope = self.scopes[name]
            i = scope[name]
        elif (started := self._started(name, size)) is not None:
            i, scope = started
        else:
            return Buffer(size, "", name)
        shape = _element(i, index) or _part(i, size) or i.shape
        if index.isdigit() and (carried := self._carried(i, scope, int(index))):
            return Buffer(size, shape, carried)
        for user in scope.values():
            if user.name in self.loops and i.name in user.operands:
                position = user.operands.index(i.name)
                if carried := self._carried(self.loops[user.name], scope, position):
                    return Buffer(size, shape, carried)
        return Buffer(size, shape, self.describe(i, scope))

    def _started(self, name: str, size: int) -> tuple[Instruction, Scope] | None:
        """What runs asynchronously has a name of its own in the dump, but none in the text: the
        next start of the same kind with a result of the same size."""
        kind = "fusion" if "fusion" in name else name.partition(".")[0].replace("_", "-")
        for position, (i, _) in enumerate(self.starts):
            if i.opcode == f"{kind}-start" and _part(i, size):
                return self.starts.pop(position)
        return None

    def _carried(self, i: Instruction, scope: Scope, index: int) -> str | None:
        """What the loop whose state this is (a while, or the parameter of its body) stacks in
        element `index`."""
        if i.opcode == "while":
            scope = self.program.computations[i.called("body") or ""]
        elif i.opcode != "parameter" or not i.shape.startswith("("):
            return None
        root = hlo.root(scope)
        return self._stacked(scope[root.operands[index]], scope) if root.opcode == "tuple" else None

    def describe(self, i: Instruction, scope: Scope) -> str:
        """What made an array: its path in the state, what a scan stacks, or the operation behind
        copies."""
        while True:
            if stacked := self._stacked(i, scope):
                return stacked
            source = i.attribute(hlo.SOURCE)
            if source and not source.endswith("dynamic_update_slice"):
                return readable(source, i.opcode)
            if i.opcode == "parameter":
                return "the scan's carry" if i.shape.startswith("(") else i.name
            inside = [scope[o] for o in i.operands if o in scope]
            if not inside:
                return i.name
            i = max(inside, key=lambda j: j.bytes)

    def _stacked(self, i: Instruction, scope: Scope) -> str | None:
        """What an update in place writes into a stack, also where it happens inside a fusion."""
        index = 0
        while i.opcode in PASSED_ON or i.opcode.endswith("-done"):
            index = int(i.attribute(r"index=(\d+)") or index)
            i = scope[i.operands[0]]
        if i.opcode == "while":
            return self._carried(i, scope, index)
        outer, operands = scope, i.operands
        if i.opcode.startswith("fusion"):
            scope = self.program.computations[i.callees[0][0]]
            i = hlo.root(scope)
            i = scope[i.operands[index]] if i.opcode == "tuple" else i
            while i.opcode == "bitcast":
                i = scope[i.operands[0]]
        if i.opcode != "dynamic-update-slice":
            return None
        layers, update = i.arrays[0][1][0], scope[i.operands[1]]
        while update.opcode in ("bitcast", "reshape", "transpose", "convert"):
            update = scope[update.operands[0]]
        if update.opcode == "parameter" and scope is not outer:
            update, scope = outer[operands[int(update.operands[0])]], outer
        return f"{self.describe(update, scope)}, {layers} times"


def readable(op_name: str, opcode: str) -> str:
    """An operation's path in the traced program without the wrapping of JAX's transformations; the
    opcode where nothing is left of it."""
    first = op_name.split(":")[0]
    phase = "backward " if "transpose(" in first else "forward " if "jvp(" in first else ""
    noise = re.compile(
        r"jit(\(.*\))?|while|body|closed_call|eval_jaxpr|checkpoint|shard_map|.*\(.*\)|"
    )
    parts = [part for part in first.split("/") if not noise.fullmatch(part)]
    path = "/".join(part for part in parts if part != "rematted_computation")
    return phase + (path or opcode.removesuffix("-start").removesuffix("-done"))


def _element(i: Instruction, index: str) -> str:
    """An element of an instruction's tuple, as text; empty where it is no tuple of arrays."""
    arrays = re.findall(r"\w+\[[\d,]*\]", i.shape)
    flat = i.shape.startswith("(") and not i.opcode.endswith("-start") and index.isdigit()
    return arrays[int(index)] if flat else ""


def _part(i: Instruction, size: int) -> str:
    """The array of a tuple that has this size, as text; empty when there is none."""
    arrays = re.findall(r"\w+\[[\d,]*\]", i.shape)
    sized = (a for a in arrays if Instruction("", a, "", (), "").bytes == size)
    return next(sized, "")
