"""Parser of a compiled program: what one device executes per step, according to XLA's scheduled HLO
text.

XLA's own cost analysis returns nothing for an absent GPU, and counts loop bodies once. Here every
instruction is counted as often as it runs: the trip counts of nested loops are multiplied.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxbench.base.scopes import ALLOCATES
from jaxbench.xla.instruction import (
    SOURCE,
    TRIP_COUNT,
    Instruction,
    Scope,
    add_elements,
    ints,
    parse_line,
    result_shape,
)  # fmt: skip
from jaxbench.xla.rewrites import SEVERAL, rewrite

GEMM_CALLS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
"""Targets of matmuls. `Rules` give the work of other custom calls."""

PROFILED = "program.txt"
"""The file in the folder of a JAX profile that has the text of the profiled program."""

MEMORY_BOUND = re.compile(
    rf"{ALLOCATES}|__cub\$.*|__gpu\$TopK|cu_threefry2x32.*|cu_lu_pivots_to_permutation|"
    r"__cudnn\$norm|PadToStatic|SliceToDynamic"
)
"""Targets of custom calls that take only the time to move their bytes. They need no rule."""

DOTS = "dot", "scaled-dot"
"""Opcodes of matmuls. The operands of the second have a scale for each block."""

GROUPED = "grouped", "grouped_weights"
"""Kinds of grouped matmuls (`ops.grouped`): of the rows of each group with a weight of its own, and
the gradient of these weights."""

UNKNOWN = (
    "fft", "convolution", "cholesky", "triangular-solve", "send", "recv", "ragged-dot", SEVERAL,
)  # fmt: skip
"""Opcodes of instructions that compute or send, and for which we have no rule."""

EMULATED = re.compile(r'(?:algorithm=|"algorithm":"ALG_)dot_(\w+)', re.IGNORECASE)
"""Pattern of the algorithm that a program asks for, as in `dot_bf16_bf16_f32_x3`: the dtype in
which operands are multiplied, and how many matmuls of this dtype emulate the one of the program."""

PRECISION = r'operand_precision"?[=:]([{\[][^}\]]*[}\]])'
"""Pattern of the precision of both operands, in an instruction and in the settings of cuBLAS."""


def display_name(kind: str) -> str:
    """The name of a kind of work, or of a table of it, in what we show: a `product` is a matmul."""
    return kind.replace("product", "matmul")


@dataclass(frozen=True)
class Work:
    """The arithmetic of one run of a kernel. A multiply-add is 2 FLOPs.

    `kind` is `product` for a matmul, one of `GROUPED`, or the kind that a rule gives. `dtype` is
    the dtype in which it multiplies: the operands' own, or `tf32` for fp32 operands on tensor
    cores. The `sizes` of a matmul are (batch, m, n, k) for `[m, k]` times `[k, n]`. The batch of a
    grouped one is its groups, and m is their mean number of rows; a matmul that is emulated by
    several has that many times as large a k. The `sizes` of attention are (batch, heads, length,
    head dim of keys, head dim of values), and `backward` marks its gradient. `bytes` is the memory
    traffic, if it is not the size of operands and results. `blocks` is true for operands with a
    scale for each block. `launches` is the number of kernels, for a custom call that has several.
    """

    kind: str
    dtype: str
    flops: int
    sizes: tuple[int, ...] = ()
    backward: bool = False
    bytes: int | None = None
    blocks: bool = False
    launches: int = 1

    @property
    def matmul(self) -> bool:
        """True for a matmul, grouped or not."""
        return self.kind == "product" or self.kind in GROUPED

    @property
    def format(self) -> str:
        """The name of the format in which a matmul multiplies: `fp8`, `mxfp8`, `nvfp4`, or the HLO
        dtype."""
        short = self.dtype[:2]
        return {"f8": "mxfp8" if self.blocks else "fp8", "f4": "nvfp4"}.get(short, self.dtype)


Rules = Mapping[str, Callable[[Instruction, Scope], Work | None]]
"""Functions that give the work of custom calls, by target; None for a call that they do not
know."""


Concurrency = Literal["none", "synchronous", "all"]
"""Which collectives do not wait for earlier ones on other links (NVLink or the network)."""


@dataclass
class Program:
    """A compiled module: its computations by name, the name of its entry computation, the number of
    devices that it is compiled for, and the rules for its custom calls.

    `assumed` names what may run in another way than we counted it. `concurrent` says which
    collectives run at the same time as others on other links. The text does not say so; it follows
    from compiler options (`flags.concurrent`).
    """

    entry: str
    computations: dict[str, Scope] = field(repr=False)
    devices: int = 1
    rules: Rules = field(default_factory=dict, repr=False)
    assumed: list[str] = field(default_factory=list)
    concurrent: Concurrency = "none"

    @classmethod
    def parse(cls, text: str, rules: Rules | None = None, strict: bool = True) -> "Program":
        """Reads the text of `compiled.as_text()`, or of the program that `--xla_dump_to` writes
        after optimizations. Unless `strict`, loops without a trip count run once."""
        header = re.search(r"^HloModule .*", text, re.MULTILINE)
        counts = dict(
            re.findall(r"(num_partitions|replica_count)=(\d+)", header[0] if header else "")
        )
        replicas, partitions = (int(counts.get(n, 1)) for n in ("replica_count", "num_partitions"))
        program = cls("", {}, replicas * partitions, rules or {})
        current: Scope | None = None
        for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
            if opening := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                current = program.computations.setdefault(opening.group(2), {})
                program.entry = opening.group(2) if opening.group(1) else program.entry
            elif current is not None and (instruction := parse_line(line)):
                add_elements(instruction, current)
                current[instruction.name] = instruction
        rewrite(program.computations, replicas, partitions)
        if not strict:
            program._run_uncounted_loops_once()
        program._choose_branches()
        return program

    def _run_uncounted_loops_once(self) -> None:
        for scope in self.computations.values():
            for i in scope.values():
                if i.opcode == "while" and i.counted is None and not i.attribute(TRIP_COUNT):
                    scope[i.name] = replace(i, counted=1)
                    self.assumed.append(f"{i.name}: a loop without a trip count, counted once")

    def _choose_branches(self) -> None:
        """Makes every conditional run its largest branch."""
        for scope in self.computations.values():
            for i in scope.values():
                if branches := i.branches:
                    largest = max(branches, key=self._size)
                    scope[i.name] = replace(i, branch=largest)
                    self.assumed.append(
                        f"{i.name}: the largest of its {len(branches)} branches, {largest}"
                    )

    def _size(self, computation: str) -> tuple[int, int]:
        """The FLOPs of a computation and the bytes of all its results, with all branches of
        conditionals."""
        flops = size = 0
        for i, scope, runs in self._walk(computation, 1):
            if i.opcode != "parameter":
                size += i.bytes * runs
            if work := self.work(i, scope):
                flops += work.flops * runs
        return flops, size

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
        """The work of a matmul or of a custom call with a rule; None for others."""
        if i.is_start and i.target:
            i = replace(i, opcode=i.kind, shape=result_shape(i))
        if i.opcode in DOTS or i.target in GEMM_CALLS:
            return _product(i, scope)
        rule = self.rules.get(i.target)
        return rule(i, scope) if rule else None

    def works(self) -> Iterator[tuple[Work, int, str]]:
        """All work, each with its runs per step and its JAX operation."""
        for i, scope, runs in self.walk():
            if work := self.work(i, scope):
                yield work, runs, i.attribute(SOURCE) or ""

    def unknown(self, i: Instruction, scope: Scope) -> str:
        """The name of what an instruction computes or sends, possibly inside a fusion, if its work
        is unknown: the target of a custom call, or an opcode. Empty for other instructions."""
        if i.kind in UNKNOWN:
            return i.kind
        if i.target:
            known = MEMORY_BOUND.fullmatch(i.target) or self.work(i, scope)
            return "" if known else i.target
        if not i.opcode.startswith("fusion"):
            return ""
        fused = i.body(self.computations)
        return next((name for inner in fused.values() if (name := self.unknown(inner, fused))), "")

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


def _product(i: Instruction, scope: Scope) -> Work:
    dtype, lhs = scope[i.operands[0]].arrays[0]
    k = math.prod(lhs[d] for d in _dimensions(i, "lhs_contracting"))
    batch = math.prod(lhs[d] for d in _dimensions(i, "lhs_batch"))
    result = math.prod(i.arrays[0][1])
    multiplied, matmuls = _multiplied(dtype, i)
    m = math.prod(lhs) // (batch * k)
    sizes = (batch, m, result // (batch * m), matmuls * k)
    flops, blocks = 2 * result * matmuls * k, i.opcode == "scaled-dot"
    return Work("product", multiplied, flops, sizes, blocks=blocks)


def _dimensions(i: Instruction, role: str) -> list[int]:
    """The dimensions of an operand of a matmul that have a role (`lhs_contracting`), from an
    attribute or from the settings of cuBLAS."""
    return ints(i.attribute(rf'"?{role}_dim\w*"?[=:][{{\[]([\d,"]*)[}}\]]'))


def _multiplied(dtype: str, i: Instruction) -> tuple[str, int]:
    """The dtype in which a matmul of these operands multiplies, and the number of real matmuls of
    this dtype that it takes.

    XLA multiplies fp32 operands in TF32, on tensor cores, unless a higher precision is asked for.
    The precision `high` is TF32 for cuBLAS and fp32 for Triton (openxla/xla, `IsTf32Allowed` in
    service/gpu/matmul_utils.cc and backends/gpu/codegen/triton/dot_algorithms.cc). A complex matmul
    takes four real ones.
    """
    real = {"c64": "f32", "c128": "f64"}.get(dtype, dtype)
    parts = 1 if real == dtype else 4
    algorithm = EMULATED.search(i.attributes)
    if algorithm and not algorithm[1].lower().startswith("any"):
        of, *_, last = algorithm[1].lower().split("_")
        return of, parts * int(last.removeprefix("x") if last.startswith("x") else 1)
    precision = (i.attribute(PRECISION) or "").lower()
    exact = "highest" in precision or ("high" in precision and not i.target)
    return ("tf32" if real == "f32" and not exact else real), parts
