"""Parser of a compiled program: what one device executes per step, by XLA's scheduled HLO text.

XLA's own cost analysis returns nothing for an absent GPU, and counts loop bodies once. Here every
instruction is counted as often as it runs: trip counts of nested loops are multiplied.
"""

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from jaxbench.errors import RunFailed

DTYPE_BITS = {
    **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **dict.fromkeys(("f8e5m2", "f8e4m3", "f8e4m3fn", "f8e4m3b11fnuz", "f8e3m4"), 8),
    **dict.fromkeys(("f8e5m2fnuz", "f8e4m3fnuz", "f8e8m0fnu", "f6e2m3fn", "f6e3m2fn"), 8),
    "f4e2m1fn": 4, "pred": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
    "token": 0, "opaque": 0, "tuple": 0,
}  # fmt: skip
"""Bits of an element in memory, for every dtype of xla_data.proto. Dtypes of 4 bits and fewer are
packed (layout `E(4)`), those of 6 bits and booleans take a byte."""

TARGET, SOURCE = r'custom_call_target="([^"]*)"', r'op_name="([^"]*)"'
"""Patterns of attributes: the target of a custom call, and the JAX operation of an instruction."""

TRIP_COUNT = r'"known_trip_count":\{"n":"(\d+)"'
COUNTED = r'"counted_trips":\{"n":"(\d+)"'
INDUCTION = r'"known_induction_variable":\{"tuple_index":"(\d+)"'
"""Patterns of a loop's attributes: the trip count by the compiler; the one that
`Program._with_trip_count` adds where the compiler gives none; the tuple index of the induction
variable."""

SCALARS: dict[str, Callable[..., int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul,
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "NE": operator.ne,
    "copy": int, "bitcast": int, "convert": int,
}  # fmt: skip
"""Integer operations on induction variables by opcode; comparisons by their direction."""

GEMM_CALLS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
"""Targets of matrix products. The work of other custom calls is given by `Rules`."""


@dataclass(frozen=True)
class Instruction:
    """A line of HLO: `name = shape opcode(operands), attributes`. The operand of a parameter is its
    number, that of a scalar constant its value."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool = False

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """(dtype, dimensions) of each array in the shape; tuples are flattened."""
        return arrays(self.shape)

    @property
    def bytes(self) -> int:
        """Size of all arrays in the shape. Raises RunFailed for an unknown dtype."""
        return shape_bytes(self.shape)

    @property
    def target(self) -> str:
        """Target of a custom call; empty for other instructions."""
        return self.attribute(TARGET) or ""

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression in the attributes."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else None

    def callee(self, role: str) -> str | None:
        """Name of the computation that is called as `body`, `condition` or `calls`."""
        return self.attribute(rf"\b{role}=%?([\w.\-]+)")

    @property
    def callees(self) -> list[tuple[str, int]]:
        """Computations that are called, with their number of runs. The condition of a loop whose
        trip count the compiler knows does not run: XLA counts the iterations on the host
        (`WhileThunk::ExecuteOnStream`)."""
        names = [name for role in ("calls", "body") if (name := self.callee(role))]
        if branches := self.attribute(r"branch_computations=\{([^}]*)\}"):
            names += re.findall(r"%?([\w.\-]+)", branches)
        found = [(name, self.trips) for name in names]
        if (condition := self.callee("condition")) and not self.attribute(TRIP_COUNT):
            found.append((condition, self.trips + 1))
        return found

    @property
    def trips(self) -> int:
        """Trip count of a loop; 1 for any other instruction. Raises RunFailed where a loop has
        none that can be evaluated."""
        known = self.attribute(TRIP_COUNT) or self.attribute(COUNTED)
        if self.opcode == "while" and known is None:
            raise RunFailed(
                f"FLOPs and bound of the compiled program cannot be counted: its loop {self.name} "
                "has no trip count"
            )
        return int(known or 1)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, dimensions) of each array in an HLO shape; tuples are flattened."""
    return [(dtype, tuple(ints(dims))) for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape)]


def shape_bytes(shape: str) -> int:
    """Size of all arrays in an HLO shape. Raises RunFailed for an unknown dtype."""
    total = 0
    for dtype, dims in arrays(shape):
        if dtype not in DTYPE_BITS:
            array = f"{dtype}[{','.join(map(str, dims))}]"
            raise RunFailed(f"the compiled program has the unknown dtype {dtype} in {array}")
        total += math.ceil(DTYPE_BITS[dtype] * math.prod(dims) / 8)
    return total


Scope = dict[str, Instruction]
"""A computation: its instructions by name, in the order of the schedule."""


@dataclass(frozen=True)
class Work:
    """Arithmetic of one run of a kernel. A multiply-add is 2 FLOPs.

    `kind` is `product`, or the kind that a rule gives; `dtype` is that of the operands. `sizes` of
    a product are (batch, m, n, k) for `[m, k]` times `[k, n]`; of attention (batch, heads, length,
    head dim), with `backward` for its gradient. `bytes` is the memory traffic where it is not that
    of operands and results. `converted` is the dtype to which a kernel converts operands before it
    multiplies them, and whose peak it has.
    """

    kind: str
    dtype: str
    flops: int
    sizes: tuple[int, ...] = ()
    backward: bool = False
    bytes: int | None = None
    converted: str | None = None

    @property
    def multiplied(self) -> str:
        """The dtype in which it multiplies."""
        return self.converted or self.dtype


Rules = Mapping[str, Callable[[Instruction, Scope], Work]]
"""Functions that give the work of custom calls, by target."""


@dataclass
class Program:
    """The computations of a module by name, the name of its entry computation, and the rules for
    its custom calls."""

    entry: str
    computations: dict[str, Scope] = field(repr=False)
    rules: Rules = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, text: str, rules: Rules | None = None) -> "Program":
        """Reads the text of `compiled.as_text()`."""
        entry = ""
        computations: dict[str, Scope] = {}
        current: Scope | None = None
        for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
            if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                current = computations.setdefault(header.group(2), {})
                entry = header.group(2) if header.group(1) else entry
            elif current is not None and (instruction := _parse_line(line)):
                current[instruction.name] = instruction
        program = cls(entry, computations, rules or {})
        for scope in computations.values():
            for i in scope.values():
                if i.opcode == "while" and not i.attribute(TRIP_COUNT):
                    scope[i.name] = program._with_trip_count(i, scope)
        return program

    def _with_trip_count(self, loop: Instruction, scope: Scope) -> Instruction:
        """A loop whose trip count a pass of the compiler has dropped, with the count found by
        stepping its induction variable; unchanged where that cannot be evaluated."""
        induction = loop.attribute(INDUCTION)
        if induction is None:
            return loop
        condition, body = (
            self.computations[loop.callee(role) or ""] for role in ("condition", "body")
        )
        index, trips = int(induction), 0
        try:
            value = self._evaluate(scope[loop.operands[0]].operands[index], scope, {})
            while self._evaluate(root(condition).name, condition, _reads(condition, index, value)):
                next_value = root(body).operands[index]
                value = self._evaluate(next_value, body, _reads(body, index, value))
                trips += 1
        except (KeyError, IndexError):
            return loop
        return replace(loop, attributes=f'{loop.attributes} "counted_trips":{{"n":"{trips}"}}')

    def _evaluate(self, name: str, scope: Scope, values: dict[str, int]) -> int:
        """The integer that an instruction computes, with known values of others by name. Raises
        KeyError where an operation is none of `SCALARS`."""
        if name in values:
            return values[name]
        i = scope[name]
        if i.opcode == "constant":
            return int(i.operands[0])
        operands = [self._evaluate(operand, scope, values) for operand in i.operands]
        if i.opcode == "fusion":
            inner = self.computations[i.callees[0][0]]
            parameters = [j for j in inner.values() if j.opcode == "parameter"]
            arguments = {j.name: operands[int(j.operands[0])] for j in parameters}
            return self._evaluate(root(inner).name, inner, arguments)
        return SCALARS[i.attribute(r"direction=(\w+)") or i.opcode](*operands)

    def walk(self) -> Iterator[tuple[Instruction, Scope, int]]:
        """Every instruction with its computation and its runs per step."""
        yield from self._walk(self.entry, 1)

    def _walk(self, name: str, runs: int) -> Iterator[tuple[Instruction, Scope, int]]:
        computation = self.computations[name]
        for instruction in computation.values():
            yield instruction, computation, runs
            for callee, times in instruction.callees:
                yield from self._walk(callee, runs * times)

    def work(self, i: Instruction, scope: Scope) -> Work | None:
        """The work of a matrix product or of a custom call with a rule; None for others."""
        if i.opcode == "dot" or i.target in GEMM_CALLS:
            return _product(i, scope)
        rule = self.rules.get(i.target)
        return rule(i, scope) if rule else None

    def works(self) -> Iterator[tuple[Work, int, str]]:
        """All work, with its runs per step and its JAX operation."""
        for i, scope, runs in self.walk():
            if work := self.work(i, scope):
                yield work, runs, i.attribute(SOURCE) or ""

    def flops(self) -> Counter[tuple[str, str]]:
        """FLOPs per step by kind and operand dtype."""
        flops: Counter[tuple[str, str]] = Counter()
        for work, runs, _ in self.works():
            flops[work.kind, work.dtype] += work.flops * runs
        return flops

    def custom_calls(self) -> Counter[str]:
        """Runs per step of each custom call target."""
        calls: Counter[str] = Counter()
        for i, _, runs in self.walk():
            if i.target:
                calls[i.target] += runs
        return calls


def root(scope: Scope) -> Instruction:
    """The instruction whose value a computation returns, not always its last."""
    return next(i for i in scope.values() if i.is_root)


def _product(i: Instruction, scope: Scope) -> Work:
    dtype, lhs = scope[i.operands[0]].arrays[0]
    result = math.prod(i.arrays[0][1])
    k, batch = (
        math.prod(lhs[d] for d in ints(i.attribute(rf'"?{dims}_dim\w*"?[=:][{{\[]([\d,"]*)[}}\]]')))
        for dims in ("lhs_contracting", "lhs_batch")
    )
    m = math.prod(lhs) // (batch * k)
    sizes = (batch, m, result // (batch * m), k)
    return Work("product", dtype, 2 * result * k, sizes)


def _reads(scope: Scope, index: int, value: int) -> dict[str, int]:
    """`value` by the name of each instruction that reads this element of the loop's state."""
    elements = (i for i in scope.values() if i.opcode == "get-tuple-element")
    return {i.name: value for i in elements if i.attribute(r"\bindex=(\d+)") == str(index)}


def ints(text: str | None) -> list[int]:
    """The whole numbers in a text."""
    return [int(d) for d in re.findall(r"\d+", text or "")]


def _parse_line(line: str) -> Instruction | None:
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
    operands = re.findall(r"-?\d+" if numbered else r"%([\w.\-]+)", inside)
    root, name = match.groups()
    return Instruction(
        name, shape, rest[:opening], tuple(operands), rest[closing + 1 :], is_root=root is not None
    )


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")
