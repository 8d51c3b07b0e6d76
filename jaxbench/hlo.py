"""Reads a compiled program: what one device executes per step, counted from XLA's scheduled HLO
text.

XLA's own cost analysis returns nothing for a GPU that is not there, and counts loop bodies once.
Here every instruction is counted as often as it runs: trip counts of nested loops are multiplied.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

DTYPE_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1,
    "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

TARGET, SOURCE = r'custom_call_target="([^"]*)"', r'op_name="([^"]*)"'
"""Attributes: what a custom call runs, and the JAX operation that an instruction stems from."""

GEMM_CALLS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
TE_GEMM = "te_gemm"
"""How the targets of Transformer Engine's products begin. Their FLOPs are not counted here."""
ATTENTION_CALLS = {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 2}
"""cuDNN attention, forward and backward, with its FLOPs in units of the forward pass: two products
forward, four backward; the scores that the backward kernel computes again are not counted."""


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: `name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """(dtype, dimensions) of each array in the shape; tuples are flattened."""
        found = re.findall(r"(\w+)\[([\d,]*)\]", self.shape)
        return [(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in found]

    @property
    def bytes(self) -> int:
        """Size of all arrays in the shape."""
        return sum(DTYPE_BYTES.get(dtype, 0) * math.prod(dims) for dtype, dims in self.arrays)

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
        trips = int(self.attribute(r'"known_trip_count":\{"n":"(\d+)"') or 1)
        return [(name, trips) for name in called]


@dataclass(frozen=True)
class Collective:
    """One collective instruction of the program. `bytes` is its result on one device, `count` its
    runs per step."""

    kind: str
    name: str
    bytes: int
    group: int
    count: int
    source: str

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
        return cls(entry, computations)

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
        """Every matrix product: dtype of its first operand, FLOPs of one run (a multiply-add is 2),
        runs per step, and the JAX operation it stems from."""
        for i, scope, runs in self.walk():
            if i.opcode == "dot" or i.attribute(TARGET) in GEMM_CALLS:
                dtype, lhs = scope[i.operands[0]].arrays[0]
                contracting = _ints(
                    i.attribute(r'"?lhs_contracting_dim\w*"?[=:][{\[]([\d,"]*)[}\]]')
                )
                flops = 2 * math.prod(i.arrays[0][1]) * math.prod(lhs[d] for d in contracting)
                yield dtype, flops, runs, i.attribute(SOURCE) or ""

    def gemm_flops(self) -> Counter[str]:
        """Matrix-product FLOPs per step by operand dtype."""
        flops: Counter[str] = Counter()
        for dtype, each, runs, _ in self.gemms():
            flops[dtype] += each * runs
        return flops

    def attention_flops(self) -> int:
        """FLOPs per step of fused attention calls, counted unmasked: 4 B N S^2 H forward, twice
        that backward."""
        flops = 0
        for i, scope, runs in self.walk():
            if weight := ATTENTION_CALLS.get(i.attribute(TARGET) or ""):
                batch, heads, length, head_dim = i.arrays[0][1]
                key_length = scope[i.operands[1]].arrays[0][1][1]
                flops += 4 * batch * heads * length * key_length * head_dim * weight * runs
        return flops

    def custom_calls(self) -> Counter[str]:
        """Runs per step of each custom call target."""
        calls: Counter[str] = Counter()
        for i, _, runs in self.walk():
            if target := i.attribute(TARGET):
                calls[target] += runs
        return calls

    def collectives(self) -> list[Collective]:
        """Every collective over more than one device."""
        found = []
        for i, scope, runs in self.walk():
            kind = i.opcode.removesuffix("-done")
            if kind not in COLLECTIVES:
                continue
            start = scope[i.operands[0]] if i.opcode.endswith("-done") else i
            group = group_size(start.attributes)
            if group > 1:
                source = start.attribute(SOURCE) or ""
                found.append(Collective(kind, i.name, i.bytes, group, runs, source))
        return found


def group_size(attributes: str) -> int:
    """Devices in one replica group, in each of XLA's notations: `{{0,1},{2,3}}`, `[2,2]<=[4]`,
    `mesh['a'=2,'b'=2] {'b'}`."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh.group(2)))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(iota.group(1))
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(listed.group(1).split(","))
    return 2 if "source_target_pairs" in attributes else 1


def _ints(text: str | None) -> list[int]:
    return [int(d) for d in re.findall(r"\d+", text or "")]


def _parse_line(line: str) -> Instruction | None:
    match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
    if not match:
        return None
    rest = line[match.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[opening:closing]))
    return Instruction(match.group(1), shape, rest[:opening], operands, rest[closing + 1 :])


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")
