"""The largest buffers of a compiled program at its memory peak, with readable names.

XLA dumps the values that are live at the peak. We take their names from the program's text. An
argument is named by its path in the train state, another array by its JAX operation, and a residual
stack of a scan by the operation whose results it stacks.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxbench.xla import host_copies
from jaxbench.xla.hlo import Program
from jaxbench.xla.instruction import SOURCE, Instruction, Scope, array_shapes, root, shape_bytes

FORWARDING = ("get-tuple-element", "bitcast", "copy")
"""Opcodes whose result is an operand, unchanged."""

CLONE = ".double_buffer_clone"
"""Suffix of the instructions of the second iteration in a double-buffered loop."""


@dataclass(frozen=True)
class Buffer:
    """A live buffer: bytes on one device, HLO shape, readable name."""

    bytes: int
    shape: str
    name: str


def peak_section(live_ranges: str) -> Iterator[tuple[str, int]]:
    """(value, bytes) of each buffer at the peak, from the text of XLA's `live-range` dump."""
    peak = re.search(r"Live ranges at \d+ \(peak\):\n((?: +.+ bytes.*\n)*)", live_ranges)
    for line in (peak.group(1) if peak else "").splitlines():
        if match := re.match(r" *(.+?): (\d+) bytes", line):
            yield match.group(1), int(match.group(2))


def largest(program: Program, live_ranges: str, count: int) -> list[Buffer]:
    """The `count` largest buffers at the peak, with their names."""
    live, waiting = dict(peak_section(live_ranges)), host_copies.sizes(program)
    for value in list(live):
        # A double-buffered loop updates a stack twice, in the same buffer.
        original = value.removesuffix(f"{CLONE}{{}}") + "{}"
        copied = value.endswith(f"{CLONE}{{}}") and original in live
        # Asynchronous copies. The program's text does not have their names.
        on_host = value.startswith("wrapped_") and live[value] in waiting
        if on_host or ("dynamic_update_slice" in value and copied):
            del live[value]
    ordered = sorted(live.items(), key=lambda item: -item[1])[:count]
    names = _BufferNames(program)
    return [names.buffer(value, size) for value, size in ordered]


class _BufferNames:
    """Readable names of the values in a live-range dump.

    A value is an instruction with a tuple index, such as `while.3{2}`. Its name is the name of the
    operation behind copies and tuples: `backward all_gather`. A loop carries a residual stack in
    its state and fills it by one dynamic-update-slice per iteration. The stack is named after one
    slice: `forward BSD,DF->BSF/dot_general, 4 times`.
    """

    def __init__(self, program: Program):
        self.program = program
        self.scopes = {name: scope for scope in program.computations.values() for name in scope}
        self.starts = [(i, scope) for i, scope, _ in program.walk() if i.is_start]
        self.loops = {  # by the name of the tuple that is their initial state
            scope[i.operands[0]].name: i for i, scope, _ in program.walk() if i.opcode == "while"
        }

    def buffer(self, value: str, size: int) -> Buffer:
        """The buffer of a value, `while.3{2}`, of `size` bytes."""
        name, _, index = value.rstrip("}").partition("{")
        if name in self.scopes:
            scope = self.scopes[name]
            i = scope[name]
        elif (start := self._async_start(name, size)) is not None:
            i, scope = start
        else:
            return Buffer(size, "", name)
        shape = _element_shape(i, index) or _shape_of_size(i, size) or i.shape
        if index.isdigit() and (stack := self._carried_stack(i, scope, int(index))):
            return Buffer(size, shape, stack)
        for user in scope.values():  # an empty stack: the initial state of a loop
            if user.name in self.loops and i.name in user.operands:
                position = user.operands.index(i.name)
                if stack := self._carried_stack(self.loops[user.name], scope, position):
                    return Buffer(size, shape, stack)
        return Buffer(size, shape, self.origin(i, scope))

    def _async_start(self, name: str, size: int) -> tuple[Instruction, Scope] | None:
        """The start of an asynchronous operation. Its name in the dump is not in the text, so we
        take the next start of this kind that has a result of this size."""
        kind = "fusion" if "fusion" in name else name.partition(".")[0].replace("_", "-")
        for position, (i, _) in enumerate(self.starts):
            if i.opcode == f"{kind}-start" and _shape_of_size(i, size):
                return self.starts.pop(position)
        return None

    def _carried_stack(self, i: Instruction, scope: Scope, index: int) -> str | None:
        """The stack in element `index` of a loop's state. `i` is the loop, or the parameter of its
        body. None if that element is no stack."""
        if i.opcode == "while":
            scope = self.program.computations[i.callee("body") or ""]
        elif i.opcode != "parameter" or not i.shape.startswith("("):
            return None
        state = root(scope)
        return self._stack(scope[state.operands[index]], scope) if state.opcode == "tuple" else None

    def origin(self, i: Instruction, scope: Scope) -> str:
        """The name of an array: a stack, the JAX operation, or the path in the train state. If the
        instruction has none, the name of its largest operand."""
        while True:
            if stack := self._stack(i, scope):
                return stack
            source = i.attribute(SOURCE)
            if source and not source.endswith("dynamic_update_slice"):
                return readable(source, i.opcode)
            if i.opcode == "parameter":
                return "the scan's carry" if i.shape.startswith("(") else i.name
            operands = [scope[name] for name in i.operands if name in scope]
            if not operands:
                return i.name
            i = max(operands, key=lambda operand: operand.bytes)

    def _stack(self, i: Instruction, scope: Scope) -> str | None:
        """The name of the stack that `i` updates by a slice, possibly inside a fusion; else
        None."""
        index = 0
        while i.opcode in FORWARDING or i.is_done:
            index = int(i.attribute(r"index=(\d+)") or index)
            i = scope[i.operands[0]]
        if i.opcode == "while":
            return self._carried_stack(i, scope, index)
        caller, arguments = scope, i.operands
        if i.opcode.startswith("fusion"):
            scope = i.body(self.program.computations)
            i = root(scope)
            i = scope[i.operands[index]] if i.opcode == "tuple" else i
            while i.opcode == "bitcast":
                i = scope[i.operands[0]]
        if i.opcode != "dynamic-update-slice":
            return None
        layers, update = i.arrays[0][1][0], scope[i.operands[1]]
        while update.opcode in ("bitcast", "reshape", "transpose", "convert"):
            update = scope[update.operands[0]]
        if update.opcode == "parameter" and scope is not caller:
            update, scope = caller[arguments[int(update.operands[0])]], caller
        return f"{self.origin(update, scope)}, {layers} times"


def readable(op_name: str, opcode: str) -> str:
    """The path of an operation in the traced program, without the wrappers of JAX's
    transformations. If nothing else is left of the path, the opcode."""
    first = op_name.split(":")[0]
    phase = "backward " if "transpose(" in first else "forward " if "jvp(" in first else ""
    wrapper = re.compile(
        r"jit(\(.*\))?|while|body|closed_call|eval_jaxpr|checkpoint|shard_map|.*\(.*\)|"
        r"rematted_computation"
    )
    path = "/".join(part for part in first.split("/") if not wrapper.fullmatch(part))
    return phase + (path or opcode.removesuffix("-start").removesuffix("-done"))


def _element_shape(i: Instruction, index: str) -> str:
    """The shape of an element of an instruction's tuple. Empty unless it is a flat tuple of
    arrays."""
    flat = i.shape.startswith("(") and not i.is_start and index.isdigit()
    return array_shapes(i.shape)[int(index)] if flat else ""


def _shape_of_size(i: Instruction, size: int) -> str:
    """The first array shape of this many bytes; empty if there is none."""
    return next((shape for shape in array_shapes(i.shape) if shape_bytes(shape) == size), "")
