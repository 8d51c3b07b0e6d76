"""Reads a compiled program: what one device executes per step, counted from XLA's scheduled HLO
text.

XLA's own cost analysis returns nothing for a GPU that is not there, and counts loop bodies once.
Here every instruction is counted as often as it runs: trip counts of nested loops are multiplied.
`collectives` reads what it sends, `schedule` asks when it runs.
"""

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

DTYPE_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1,
    "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip

TARGET, SOURCE = r'custom_call_target="([^"]*)"', r'op_name="([^"]*)"'
"""Attributes: what a custom call runs, and the JAX operation that an instruction stems from."""

TRIPS = r'"known_trip_count":\{"n":"(\d+)"'
COUNTER = r'"known_induction_variable":\{"tuple_index":"(\d+)"'
"""Attributes of a loop: how often its body runs, and which element of its state counts."""

SCALARS: dict[str, Callable[..., int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul,
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "NE": operator.ne,
    "copy": int, "bitcast": int, "convert": int,
}  # fmt: skip
"""Operations of loop counters, comparisons by their direction."""

GEMM_CALLS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
"""What XLA makes of matrix products. Other kernels are told by who calls them (`Rules`)."""


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: `name = shape opcode(operands), attributes`. A parameter's operand is its
    number, a scalar constant's its value."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool = False

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """(dtype, dimensions) of each array in the shape; tuples are flattened."""
        found = re.findall(r"(\w+)\[([\d,]*)\]", self.shape)
        return [(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in found]

    @property
    def bytes(self) -> int:
        """Size of all arrays in the shape."""
        return sum(DTYPE_BYTES.get(dtype, 0) * math.prod(dims) for dtype, dims in self.arrays)

    @property
    def target(self) -> str:
        """What a custom call calls; empty for other instructions."""
        return self.attribute(TARGET) or ""

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression in the attributes."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else None

    def called(self, role: str) -> str | None:
        """The computation that this instruction runs as its `body`, its `condition` or `calls`."""
        return self.attribute(rf"\b{role}=%?([\w.\-]+)")

    @property
    def callees(self) -> list[tuple[str, int]]:
        """Computations this instruction runs, with how many times."""
        called = [name for role in ("calls", "body", "condition") if (name := self.called(role))]
        if branches := self.attribute(r"branch_computations=\{([^}]*)\}"):
            called += re.findall(r"%?([\w.\-]+)", branches)
        return [(name, self.trips) for name in called]

    @property
    def trips(self) -> int:
        """How often a loop runs its body; 1 for all else."""
        known = self.attribute(TRIPS)
        if self.opcode == "while" and known is None:
            raise ValueError(f"cannot tell how often the loop {self.name} runs")
        return int(known or 1)


Scope = dict[str, Instruction]
"""A computation: its instructions by name, in the order in which they are scheduled."""


@dataclass(frozen=True)
class Work:
    """What one run of a kernel computes: `kind` is `product`, or what a rule calls it; `dtype` is
    that of its operands; one multiply-add is 2 FLOPs.

    `sizes` are of a product (products in the batch, m, n, k) for `[m, k]` times `[k, n]`; of
    attention (batch, heads, length, head dim), and `backward` says that it is its gradient. `bytes`
    are those that it moves, where operands and results do not tell.
    """

    kind: str
    dtype: str
    flops: int
    sizes: tuple[int, ...] = ()
    backward: bool = False
    bytes: int | None = None


Rules = Mapping[str, Callable[[Instruction, Scope], Work]]
"""The work of a custom call, by its target."""


@dataclass
class Program:
    """The computations of a module by name, the name of the one that is the program, and what its
    custom calls compute."""

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
                if i.opcode == "while" and not i.attribute(TRIPS):
                    scope[i.name] = program._counted(i, scope)
        return program

    def _counted(self, loop: Instruction, scope: Scope) -> Instruction:
        """A loop whose trip count a pass of the compiler has lost, with the count that its counter
        gives; unchanged where the counter cannot be followed."""
        counter = loop.attribute(COUNTER)
        if counter is None:
            return loop
        condition, body = (
            self.computations[loop.called(role) or ""] for role in ("condition", "body")
        )
        index, trips = int(counter), 0
        try:
            value = self._scalar(scope[loop.operands[0]].operands[index], scope, {})
            while self._scalar(root(condition).name, condition, _element(condition, index, value)):
                following = root(body).operands[index]
                value = self._scalar(following, body, _element(body, index, value))
                trips += 1
        except (KeyError, IndexError):
            return loop
        return replace(loop, attributes=f'{loop.attributes} "known_trip_count":{{"n":"{trips}"}}')

    def _scalar(self, name: str, scope: Scope, given: dict[str, int]) -> int:
        """An integer that a computation makes from those given by name. Raises KeyError."""
        if name in given:
            return given[name]
        i = scope[name]
        if i.opcode == "constant":
            return int(i.operands[0])
        operands = [self._scalar(operand, scope, given) for operand in i.operands]
        if i.opcode == "fusion":
            inner = self.computations[i.callees[0][0]]
            parameters = [j for j in inner.values() if j.opcode == "parameter"]
            values = {j.name: operands[int(j.operands[0])] for j in parameters}
            return self._scalar(root(inner).name, inner, values)
        return SCALARS[i.attribute(r"direction=(\w+)") or i.opcode](*operands)

    def walk(self) -> Iterator[tuple[Instruction, Scope, int]]:
        """Every instruction with its computation and how often it runs per step."""
        yield from self._walk(self.entry, 1)

    def _walk(self, name: str, runs: int):
        computation = self.computations[name]
        for instruction in computation.values():
            yield instruction, computation, runs
            for callee, times in instruction.callees:
                yield from self._walk(callee, runs * times)

    def work(self, i: Instruction, scope: Scope) -> Work | None:
        """What a kernel computes, if it is a matrix product or follows one of the rules."""
        if i.opcode == "dot" or i.target in GEMM_CALLS:
            return _product(i, scope)
        rule = self.rules.get(i.target)
        return rule(i, scope) if rule else None

    def works(self) -> Iterator[tuple[Work, int, str]]:
        """All work, with its runs per step and the JAX operation it stems from."""
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
    """The instruction whose value a computation returns: not always its last."""
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


def _element(scope: Scope, index: int, value: int) -> dict[str, int]:
    """The names under which a computation reads an element of its state, with its value."""
    read = (i for i in scope.values() if i.opcode == "get-tuple-element")
    return {i.name: value for i in read if i.attribute(r"\bindex=(\d+)") == str(index)}


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
    found = re.findall(r"-?\d+" if numbered else r"%([\w.\-]+)", inside)
    root, name = match.groups()
    return Instruction(
        name, shape, rest[:opening], tuple(found), rest[closing + 1 :], is_root=root is not None
    )


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")
