"""Reads a compiled program: what one device executes per step, counted from XLA's scheduled HLO
text.

XLA's own cost analysis returns nothing for a GPU that is not there, and counts loop bodies once.
Here every instruction is counted as often as it runs: trip counts of nested loops are multiplied.
`schedule` asks when it runs.
"""

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

DTYPE_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1,
    "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

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
TE_GEMM = "te_gemm"
"""How the targets of Transformer Engine's products begin. Their FLOPs are not counted here."""
ATTENTION_CALLS = {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 2}
"""cuDNN attention, forward and backward, with its FLOPs in units of the forward pass: two products
forward, four backward; the scores that the backward kernel computes again are not counted."""


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

    @property
    def callees(self) -> list[tuple[str, int]]:
        """Computations this instruction runs, with how many times."""
        called = re.findall(r"(?:calls|body|condition)=%?([\w.\-]+)", self.attributes)
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


@dataclass(frozen=True)
class Collective:
    """One collective instruction of the program. `bytes` is its result on one device, `devices` the
    first of its groups, `count` its runs per step."""

    kind: str
    name: str
    bytes: int
    devices: tuple[int, ...]
    count: int
    source: str

    @property
    def group(self) -> int:
        """Devices that take part."""
        return len(self.devices)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends per step with ring algorithms."""
        n = self.group
        per_run = {
            "all-gather": self.bytes * (n - 1) / n,
            "all-to-all": self.bytes * (n - 1) / n,
            "reduce-scatter": self.bytes * (n - 1),
            "all-reduce": 2 * self.bytes * (n - 1) / n,
            "collective-permute": self.bytes,
        }[self.kind]
        return round(per_run * self.count)


@dataclass
class Program:
    """The computations of a module by name, and the name of the one that is the program."""

    entry: str
    computations: dict[str, dict[str, Instruction]] = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Reads the text of `compiled.as_text()`."""
        entry = ""
        computations: dict[str, dict[str, Instruction]] = {}
        current: dict[str, Instruction] | None = None
        for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
            if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                current = computations.setdefault(header.group(2), {})
                entry = header.group(2) if header.group(1) else entry
            elif current is not None and (instruction := _parse_line(line)):
                current[instruction.name] = instruction
        program = cls(entry, computations)
        for scope in computations.values():
            for i in scope.values():
                if i.opcode == "while" and not i.attribute(TRIPS):
                    scope[i.name] = program._counted(i, scope)
        return program

    def _counted(self, loop: Instruction, scope: dict[str, Instruction]) -> Instruction:
        """A loop whose trip count a pass of the compiler has lost, with the count that its counter
        gives; unchanged where the counter cannot be followed."""
        counter = loop.attribute(COUNTER)
        condition = self.computations.get(loop.attribute(r"condition=%?([\w.\-]+)") or "")
        body = self.computations.get(loop.attribute(r"body=%?([\w.\-]+)") or "")
        if counter is None or condition is None or body is None:
            return loop
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

    def _scalar(self, name: str, scope: dict[str, Instruction], given: dict[str, int]) -> int:
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

    def walk(self) -> Iterator[tuple[Instruction, dict[str, Instruction], int]]:
        """Every instruction with its computation and how often it runs per step."""
        yield from self._walk(self.entry, 1)

    def _walk(self, name: str, runs: int):
        computation = self.computations[name]
        for instruction in computation.values():
            yield instruction, computation, runs
            for callee, times in instruction.callees:
                yield from self._walk(callee, runs * times)

    def gemms(self) -> Iterator[tuple[str, int, int, str]]:
        """Every matrix product: dtype of its first operand, FLOPs of one run, runs per step, and
        the JAX operation it stems from."""
        for i, scope, runs in self.walk():
            if product := gemm(i, scope):
                yield *product, runs, i.attribute(SOURCE) or ""

    def gemm_flops(self) -> Counter[str]:
        """Matrix-product FLOPs per step by operand dtype, one multiply-add being 2."""
        flops: Counter[str] = Counter()
        for dtype, per_run, runs, _ in self.gemms():
            flops[dtype] += per_run * runs
        return flops

    def attention_flops(self) -> int:
        """FLOPs per step of fused attention calls (`attention`)."""
        return sum(attention(i, scope) * runs for i, scope, runs in self.walk())

    def custom_calls(self) -> Counter[str]:
        """Runs per step of each custom call target."""
        calls: Counter[str] = Counter()
        for i, _, runs in self.walk():
            if i.target:
                calls[i.target] += runs
        return calls

    def collectives(self) -> list[Collective]:
        """Every collective over more than one device."""
        found = (collective(i, scope, runs) for i, scope, runs in self.walk())
        return [c for c in found if c is not None]


def root(scope: dict[str, Instruction]) -> Instruction:
    """The instruction whose value a computation returns: not always its last."""
    return next(i for i in scope.values() if i.is_root)


def gemm(i: Instruction, scope: dict[str, Instruction]) -> tuple[str, int] | None:
    """(operand dtype, FLOPs) of a matrix product in its computation; None of anything else."""
    if i.opcode != "dot" and i.target not in GEMM_CALLS:
        return None
    dtype, lhs = scope[i.operands[0]].arrays[0]
    contracting = _ints(i.attribute(r'"?lhs_contracting_dim\w*"?[=:][{\[]([\d,"]*)[}\]]'))
    return dtype, 2 * math.prod(i.arrays[0][1]) * math.prod(lhs[d] for d in contracting)


def attention(i: Instruction, scope: dict[str, Instruction]) -> int:
    """FLOPs of a fused attention call, counted unmasked: 4 B N S^2 H forward, twice that backward;
    0 of anything else."""
    if (weight := ATTENTION_CALLS.get(i.target)) is None:
        return 0
    batch, heads, length, head_dim = i.arrays[0][1]
    key_length = scope[i.operands[1]].arrays[0][1][1]
    return 4 * batch * heads * length * key_length * head_dim * weight


def collective(i: Instruction, scope: dict[str, Instruction], runs: int) -> Collective | None:
    """The collective that this instruction completes, if it is one over more than one device."""
    kind = i.opcode.removesuffix("-done")
    if kind not in COLLECTIVES:
        return None
    start = scope[i.operands[0]] if i.opcode.endswith("-done") else i
    devices = first_group(start.attributes)
    source = start.attribute(SOURCE) or ""
    return Collective(kind, i.name, i.bytes, devices, runs, source) if len(devices) > 1 else None


def first_group(attributes: str) -> tuple[int, ...]:
    """Devices of the first replica group, in each of XLA's notations: `{{0,1},{2,3}}`, `[2,2]<=[4]`
    with or without `T(..)`, `mesh['a'=2,'b'=2] {'b'}`, and the first of `source_target_pairs`."""
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", found.group(1))}
        ids = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        inside = set(re.findall(r"'(\w+)'", found.group(2)))
        return tuple(ids[tuple(slice(None) if a in inside else 0 for a in sizes)].ravel().tolist())
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        dims = _ints(iota.group(2))
        order = _ints(iota.group(3)) or list(range(len(dims)))
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(order)
        return tuple(ids.ravel()[: int(iota.group(1))].tolist())
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}", attributes)
    return tuple(_ints(listed.group(1))) if listed else (0,)


def _element(scope: dict[str, Instruction], index: int, value: int) -> dict[str, int]:
    """The names under which a computation reads an element of its state, with its value."""
    read = (i for i in scope.values() if i.opcode == "get-tuple-element")
    return {i.name: value for i in read if i.attribute(r"\bindex=(\d+)") == str(index)}


def _ints(text: str | None) -> list[int]:
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
