"""Measurements of a GPU and its links, in small CSV files that name their sources first.

A line has a kind, a name, sizes joined by `x`, and what was measured, in microseconds unless the
kind says otherwise:

- `product`, its format, m x n x k: [m, k] times [k, n]
- `grouped`, a format, groups x rows of each x n x k: the rows of each group times a [k, n] of its
  own; `grouped_weights`, the gradient of these [k, n]
- `attention`, `forward` or `backward`, batch x heads x length x head dim of keys x head dim of
  values, in bf16 and causal
- `kept`, `forward` or `backward`, the head dims of which it was measured: the share of its table's
  rate that attention keeps in a step, for tables of short runs
- `collective`, its kind, GPUs x bytes of the whole buffer, inside an NVLink domain
- `memory`, `any`, bytes that a kernel reads and writes; `fp8`, the same of a kernel that casts to
  FP8 or transposes it
- `sustained`, a matmul's format, milliseconds of uninterrupted matmuls before: TFLOP/s
- `scan`, one of our kernels, state x head dim: TFLOP/s of a kernel of Mamba-2's scan
- `network` and `nvlink`: the share of a link's rate that is reached after the latencies
  (`measured/network.csv`)

A comment `# assumed KIND NAME: ..`, or `KIND` for all of its names, says what stands in for times
that were not measured. For attention, NAME are the head dims of keys and values, as in `192x128`.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import ge
from pathlib import Path

from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import PLANNED

FOLDER = Path(__file__).parent / "measured"
GPU, ASSUMED, PACKAGE = "# gpu: ", "# assumed ", "the package's"
COLUMNS = "kind,name,sizes"

FORMATS = ("bf16", "fp8", "mxfp8", "nvfp4")
"""Formats of matmuls."""

KINDS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "product": (FORMATS, (1, 1, 1)),
    "grouped": (FORMATS, (1, 1, 1, 1)),
    "grouped_weights": (FORMATS, (1, 1, 1, 1)),
    "attention": (("forward", "backward"), (1, 1, 1, 1, 1)),
    "kept": (("forward", "backward"), (1, 1)),
    "collective": (("all-gather", "all-reduce", "reduce-scatter", "all-to-all"), (2, 1)),
    "memory": (("any", "fp8"), (0,)),
    "sustained": (FORMATS, (1,)),
    "scan": (("forward", "reverse", "to_x", "to_b", "to_c"), (1, 1)),
    "network": (("ring", "direct"), (2,)),
    "nvlink": (("direct",), (2,)),
}
"""The names of each kind, and the least value of each of its sizes."""

Sizes = tuple[int, ...]
Times = dict[Sizes, float]


@dataclass(frozen=True)
class Tables:
    """Values by (kind, name) and sizes. `sources` has their files by `"kind name"`. `assumed` says
    what stands in for measurements, by `"kind name"` or `"kind"`."""

    values: Mapping[tuple[str, str], Mapping[Sizes, float]]
    sources: Mapping[str, str]
    assumed: Mapping[str, str] = field(default_factory=dict)

    def names(self, kind: str) -> set[str]:
        """The names of a kind that were measured."""
        return {name for known, name in self.values if known == kind}


@cache
def load(gpu: str, file: Path | None = None) -> Tables:
    """The tables of a GPU in the package. Tables in `file` take precedence.

    Raises RecipeError for a GPU without tables, and for a file that is not a table or is for
    another GPU.
    """
    packaged = FOLDER / f"{gpu}.csv"
    if not packaged.is_file():
        known = ", ".join(sorted(name for name in PLANNED if (FOLDER / f"{name}.csv").is_file()))
        raise RecipeError(f"we have no measured kernels of {gpu}; there are tables of {known}")
    values: dict[tuple[str, str], Times] = {}
    sources: dict[str, str] = {}
    assumed = assumptions(packaged)
    for path in (FOLDER / "network.csv", packaged, *([file] if file else [])):
        of, measured = read(path)
        if of not in (gpu, "any"):
            instead = f"; use --gpu {of}" if of in PLANNED else ""
            raise RecipeError(f"{path} has kernels of {of}, but the plan is for {gpu}{instead}")
        here = path.name if path == file else f"{PACKAGE} {path.name}"
        for key, times in measured.items():
            kept = _beside(key[0], values.get(key, {}), times)
            sources[" ".join(key)] = f"{here} and {sources[' '.join(key)]}" if kept else here
            values[key] = kept | times
            if path == file:
                replaced = key[0] if key[0] == "attention" else " ".join(key)
                assumed = {of: text for of, text in assumed.items() if not within(of, replaced)}
                assumed.pop(key[0], None)
                share = ("kept", key[1])
                if key[0] == "attention" and share not in measured:
                    values.pop(share, None)  # of the package's table
                    sources.pop(" ".join(share), None)
    return Tables(values, sources, assumed)


def within(name: str, wider: str) -> bool:
    """True if `wider` is a name, or the kind that it begins with."""
    return f"{name} ".startswith(f"{wider} ")


def assumptions(path: Path) -> dict[str, str]:
    """The assumptions that a file of the package states."""
    lines = (line for line in path.read_text().splitlines() if line.startswith(ASSUMED))
    return dict(line.removeprefix(ASSUMED).split(": ", 1) for line in lines)


def _beside(kind: str, packaged: Times, user: Times) -> Times:
    """The package's values that remain next to a user's values of the same kind. For collectives
    these are the other numbers of GPUs, for links the other sizes. For `memory` it is the start of
    a kernel (0 bytes), which `calibrate` does not measure."""
    if kind == "collective":
        groups = {sizes[0] for sizes in user}
        return {sizes: time for sizes, time in packaged.items() if sizes[0] not in groups}
    if kind in ("network", "nvlink"):
        return {sizes: share for sizes, share in packaged.items() if sizes not in user}
    if kind == "memory" and (0,) not in user:
        return {sizes: time for sizes, time in packaged.items() if sizes == (0,)}
    return {}


def line(kind: str, name: str, sizes: Sizes, microseconds: float) -> str:
    """A line of a file."""
    return f"{kind},{name},{'x'.join(map(str, sizes))},{microseconds:.6g}"


def text(gpu: str, comments: Sequence[str], lines: Sequence[str]) -> str:
    """The text of a file."""
    head = [f"{GPU}{gpu}", *(f"# {comment}" for comment in comments)]
    return "\n".join([*head, f"{COLUMNS},microseconds", *lines]) + "\n"


def read(path: Path) -> tuple[str, dict[tuple[str, str], Times]]:
    """The GPU of a file, and its values. A spreadsheet's byte order mark is ignored, and so are
    empty cells at the end of a line. If the file is no table, raises RecipeError with the line."""
    values: dict[tuple[str, str], Times] = {}
    gpu, heading = "", False
    try:
        for number, cells in enumerate(csv.reader(path.read_text("utf-8-sig").splitlines()), 1):
            line = ",".join(cells).rstrip(", ")
            if line.startswith(GPU):
                gpu = line.removeprefix(GPU).strip()
            elif heading and line and not line.startswith("#"):
                key, sizes, value = _parsed(cells, number)
                values.setdefault(key, {})[sizes] = value
            elif line and not line.startswith("#"):
                heading = True
                if not line.startswith(COLUMNS):
                    raise ValueError(f"line {number}: expected {COLUMNS},.. and got {line!r}")
        if not (gpu and heading):
            raise ValueError(f"no line '{GPU}NAME'" if heading else f"no line {COLUMNS},..")
        for (kind, name), times in values.items():
            least = tuple(map(min, zip(*times, strict=True)))
            if kind == "product" and least not in times:
                raise ValueError(f"{kind} {name}: no line has the smallest m, n and k of all")
    except (OSError, ValueError, csv.Error) as error:
        raise RecipeError(f"{path}: not a table of kernels: {error}") from error
    return gpu, values


def _parsed(cells: list[str], line: int) -> tuple[tuple[str, str], Sizes, float]:
    """The kind and name, the sizes, and the value of a line. Raises ValueError."""
    try:
        kind, name, text, value, *rest = (cell.strip() for cell in cells)
        sizes, number = tuple(map(int, text.split("x"))), float(value)
        names, least = KINDS[kind]
        fits = len(sizes) == len(least) and all(map(ge, sizes, least))
        if name in names and fits and 0 < number < float("inf") and not any(rest):
            return (kind, name), sizes, number
    except (ValueError, LookupError):
        pass
    example = "product,bf16,4096x4096x4096,250.5"
    raise ValueError(f"line {line}: expected values as {example}, got {','.join(cells)!r}")
