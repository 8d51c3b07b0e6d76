"""A line of HLO text: its shape, opcode, operands and attributes."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from jaxbench.base.errors import RunFailed

DTYPE_BITS = {
    **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **dict.fromkeys(("f8e5m2", "f8e4m3", "f8e4m3fn", "f8e4m3b11fnuz", "f8e3m4"), 8),
    **dict.fromkeys(("f8e5m2fnuz", "f8e4m3fnuz", "f8e8m0fnu", "f6e2m3fn", "f6e3m2fn"), 8),
    "f4e2m1fn": 4, "pred": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
    "token": 0, "opaque": 0, "tuple": 0,
}  # fmt: skip
"""Bits of an element in memory, for every dtype of xla_data.proto. Dtypes of 4 bits and fewer are
packed (layout `E(4)`). Dtypes of 6 bits and booleans take a byte."""

TARGET, SOURCE = r'custom_call_target="([^"]*)"', r'op_name="([^"]*)"'
"""Patterns of attributes: the target of a custom call, and the JAX operation of an instruction."""

TRIP_COUNT = r'"known_trip_count":\{"n":"(\d+)"'
"""Pattern of a loop's attribute: the trip count, if the compiler knows it."""


@dataclass(frozen=True)
class Numbering:
    """What the ids in a collective's replica groups number (`of`): `replicas`, `partitions`,
    `devices`, or `both`, which are replicas with all of their partitions. `replicas` and
    `partitions` are the numbers of them in the program."""

    of: str
    replicas: int
    partitions: int


@dataclass(frozen=True)
class Instruction:
    """A line of HLO: `name = shape opcode(operands), attributes`. The operand of a parameter is its
    number. The operand of a scalar constant is its value.

    Four facts are not in the line; `rewrites` and `Program.parse` find them. `counted` is the trip
    count of a loop whose count the compiler does not know, `branch` is the branch of a conditional
    that counts, `numbering` is how to read a collective's replica groups, and `fused` is the shape
    of the result of a collective inside a fusion, which may write it into a larger array.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool = False
    counted: int | None = None
    branch: str | None = None
    numbering: Numbering | None = None
    fused: str = ""

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """(dtype, dimensions) of each array in the shape; tuples are flattened."""
        return arrays(self.shape)

    @property
    def bytes(self) -> int:
        """The size of all arrays in the shape. Raises RunFailed for an unknown dtype."""
        return shape_bytes(self.shape)

    @property
    def is_start(self) -> bool:
        """True for the start of an asynchronous operation."""
        return self.opcode.endswith("-start")

    @property
    def is_done(self) -> bool:
        """True for the end of an asynchronous operation. Its first operand is the start."""
        return self.opcode.endswith("-done")

    def start(self, scope: "Scope") -> "Instruction":
        """The start of the asynchronous operation that this instruction ends. Any other instruction
        is its own start."""
        return scope[self.operands[0]] if self.is_done else self

    @property
    def kind(self) -> str:
        """The opcode, which is the same for an operation and for its asynchronous start."""
        return self.opcode.removesuffix("-start")

    @cached_property
    def target(self) -> str:
        """The target of a custom call; empty for other instructions."""
        return self.attribute(TARGET) or ""

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression in the attributes."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else None

    def callee(self, role: str) -> str | None:
        """The name of the computation that is called as `body`, `condition` or `calls`."""
        return self.attribute(rf"\b{role}=%?([\w.\-]+)")

    @cached_property
    def callees(self) -> tuple[tuple[str, int], ...]:
        """The computations that are called, with their number of runs. If the compiler knows the
        trip count of a loop, the condition of the loop does not run: XLA counts the iterations on
        the host (`WhileThunk::ExecuteOnStream`)."""
        roles = ("calls", "body", "to_apply") if self.kind == "call" else ("calls", "body")
        names = [name for role in roles if (name := self.callee(role))]
        names += [self.branch] if self.branch else self.branches
        found = [(name, self.trips) for name in names]
        if (condition := self.callee("condition")) and not self.attribute(TRIP_COUNT):
            found.append((condition, self.trips + 1))
        return tuple(found)

    def body(self, computations: "Computations") -> "Scope":
        """The computation that a fusion or an asynchronous wrapper runs."""
        return computations[self.callees[0][0]]

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional. It runs one of them."""
        if listed := self.attribute(r"branch_computations=\{([^}]*)\}"):
            return re.findall(r"%?([\w.\-]+)", listed)
        two = self.callee("true_computation"), self.callee("false_computation")
        return [name for name in two if name]

    @property
    def trips(self) -> int:
        """The trip count of a loop; 1 for any other instruction. Raises RunFailed if a loop has
        none that can be evaluated."""
        known = self.attribute(TRIP_COUNT)
        trips = int(known) if known else self.counted
        if self.opcode == "while" and trips is None:
            raise RunFailed(
                f"FLOPs and bound of the compiled program cannot be counted: its loop {self.name} "
                "has no trip count"
            )
        return 1 if trips is None else trips


ARRAY = r"\w+\[[\d,<=]*\]"
"""Pattern of the shape of an array, without its layout. A dimension of dynamic size is `<=8`."""


def array_shapes(shape: str) -> list[str]:
    """The shape of each array in an HLO shape, without its layout; tuples are flattened."""
    return re.findall(ARRAY, shape)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, dimensions) of each array in an HLO shape; tuples are flattened. A dimension of
    dynamic size has its largest size."""
    found = (array.partition("[") for array in array_shapes(shape))
    return [(dtype, tuple(ints(dims))) for dtype, _, dims in found]


def shape_bytes(shape: str) -> int:
    """The size of all arrays in an HLO shape. Raises RunFailed for an unknown dtype."""
    total = 0
    for dtype, dims in arrays(shape):
        if dtype not in DTYPE_BITS:
            array = f"{dtype}[{','.join(map(str, dims))}]"
            raise RunFailed(f"the compiled program has the unknown dtype {dtype} in {array}")
        total += math.ceil(DTYPE_BITS[dtype] * math.prod(dims) / 8)
    return total


Scope = dict[str, Instruction]
"""A computation: its instructions by name, in the order of the schedule."""

Computations = Mapping[str, Scope]
"""The computations of a program by name."""


def root(scope: Scope) -> Instruction:
    """The instruction whose value a computation returns. It is not always the last one."""
    return next(i for i in scope.values() if i.is_root)


def ints(text: str | None) -> list[int]:
    """The whole numbers in a text."""
    return [int(d) for d in re.findall(r"\d+", text or "")]


def parse_line(line: str) -> Instruction | None:
    """The instruction of a line; None if the line has no instruction."""
    match = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if not match:
        return None
    rest = line[match.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    inside = rest[opening:closing]
    numbered = rest[:opening] == "parameter" or (rest[:opening] == "constant" and "[]" in shape)
    operands = re.findall(r"-?\d+" if numbered else r"%([\w.\-#]+)", inside)
    if "%" not in inside and not numbered and rest[:opening] != "constant":  # names without a %
        last = (part.rpartition(" ")[2] for part in elements(f"{inside})"))
        operands = [name for name in last if re.fullmatch(r"[\w.\-#]+", name)]
    root, name = match.groups()
    return Instruction(
        name, shape, rest[:opening], tuple(operands), rest[closing + 1 :], is_root=root is not None
    )


def add_elements(i: Instruction, scope: Scope) -> None:
    """Adds to its computation the reads of tuple elements that an instruction abbreviates. Dumps of
    recent compilers write the operand `%x#1` for `get-tuple-element(%x), index=1`, and `%x#1#0` for
    an element of that element."""
    for operand in i.operands:
        whole, *indices = operand.split("#")
        for index in indices:
            name, shape = f"{whole}#{index}", elements(scope[whole].shape)[int(index)]
            attributes = f", index={index}"
            scope[name] = Instruction(name, shape, "get-tuple-element", (whole,), attributes)
            whole = name


def elements(shape: str) -> list[str]:
    """The shapes in a tuple shape. The shapes of an inner tuple stay together."""
    depth, found = 0, [""]
    for character in shape[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [element.strip() for element in found]


def result_shape(i: Instruction) -> str:
    """The shape of what an instruction computes. The shape of a `-start` is ((operands), result,
    context), and of a copy (result, operand, context)."""
    if not i.is_start or not i.shape.startswith("("):
        return i.shape
    return elements(i.shape)[0 if i.opcode == "copy-start" else 1]


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")
