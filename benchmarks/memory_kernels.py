"""Prints the lines `memory` of the forecast's tables, from the kernels of measured steps.

    python benchmarks/memory_kernels.py FOLDER [FOLDER ..]

A folder is the output of `benchmarks/gpu.py` on an H100: it has the program of each row and the
time of each kernel. Kernels that only move bytes are sorted into classes by their bytes. A line is
the median number of bytes of a class, and the time at the median rate. The smallest class is the
start of a kernel. Slices of stacks are left out, since they may run next to matmuls, and so are
kernels of calls that we do not know.

A GPU without such steps gets the lines of the H100: a kernel of the same time moves as many more
bytes as its memory is faster.
"""

import csv
import gzip
import sys
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxbench.base.hardware import H100, PLANNED
from jaxbench.forecast import tables
from jaxbench.forecast.forecast import expected_schedule
from jaxbench.plan import compare_profile
from jaxbench.xla import custom_calls
from jaxbench.xla.hlo import Program
from jaxbench.xla.schedule import Walk
from jaxbench.xla.timeline import Kernel

CLASSES = 20_000, 200_000, 2_000_000, 10**7, 5 * 10**7, 2 * 10**8, 6 * 10**8, 2 * 10**9
"""The bytes between two classes."""

LEAST = 5
"""Kernels that a class needs."""


def kernels(row: Path) -> Iterator[tuple[str, int, float]]:
    """Kind, bytes and microseconds of each kernel of a step that only moves bytes."""
    program = gzip.decompress((row / "program.hlo.gz").read_bytes()).decode()
    walk = Walk(Program.parse(program, custom_calls.RULES, strict=False))
    expected = compare_profile.planned(expected_schedule(walk, H100, tables.load("h100")))
    lines = gzip.decompress((row / "kernels.csv.gz").read_bytes()).decode().splitlines()
    for line in csv.DictReader(lines):
        found = expected.get(line["instruction"])
        kernel, measured = found and found.cause, float(line["measured_us"])
        if not found or not isinstance(kernel, Kernel) or kernel.works or not kernel.bytes:
            continue
        if kernel.unknown or kernel.part == "scan" or "dynamic_" in line["instruction"]:
            continue
        if measured:
            kind = "fp8" if kernel.makes_fp8 else "any"
            yield kind, kernel.bytes, measured / found.runs


def points(folders: list[Path]) -> dict[str, list[tuple[float, float]]]:
    """(bytes, microseconds) of each class with enough kernels, by kind."""
    found: defaultdict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for row in sorted({path.parent for folder in folders for path in folder.glob("*/kernels*")}):
        for kind, moved, took in kernels(row):
            found[kind, bisect(CLASSES, moved)].append((moved, took))
    lines: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for (kind, _), every in sorted(found.items()):
        if len(every) >= LEAST:
            size = median(moved for moved, _ in every)
            lines[kind].append((size, size * median(took / moved for moved, took in every)))
    start = median(took for _, took in found["any", 0])
    del lines["any"][0]
    return {kind: [(0.0, start), *some] for kind, some in lines.items()}


def main() -> None:
    """Prints the lines of each GPU."""
    every = points([Path(folder) for folder in sys.argv[1:]])
    for name, gpu in PLANNED.items():
        print(f"# {name}")
        for kind, some in every.items():
            for moved, took in some:
                size = (round(moved * gpu.bandwidth / H100.bandwidth),)
                print(tables.line("memory", kind, size, round(took, 2)))


if __name__ == "__main__":
    main()
