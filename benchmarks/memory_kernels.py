"""Prints the lines `memory` of the forecast's tables, from the kernels of measured steps.

    python benchmarks/memory_kernels.py h100=FOLDER [h100=FOLDER ..] h200=FOLDER

A folder is the output of `benchmarks/gpu.py` on that GPU: it has the program of each row and the
time of each kernel. Kernels that only move bytes are sorted into classes by their bytes. A line is
the median number of bytes of a class, and the time at the median rate. The smallest class is the
start of a kernel. Slices of stacks are left out, since they may run next to matmuls, and so are
kernels of calls that we do not know.

A GPU without such steps gets a line for each class that two GPUs have. The time of a large kernel
has two parts. One follows the bandwidth of the memory, the other the number of multiprocessors. An
H100 and an H200 have equally many of these, so the ratio of their times says how large each part
is. A kernel of less than 10 MB follows neither, and takes as long as on the H200.
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

from jaxbench.base.hardware import PLANNED, Gpu
from jaxbench.forecast import tables
from jaxbench.forecast.forecast import expected_schedule
from jaxbench.plan import compare_profile
from jaxbench.xla import custom_calls
from jaxbench.xla.hlo import Program
from jaxbench.xla.schedule import Walk
from jaxbench.xla.timeline import Kernel

CLASSES = 20_000, 200_000, 2_000_000, 10**7, 5 * 10**7, 2 * 10**8, 6 * 10**8, 2 * 10**9
"""The bytes between two classes."""

SMALL = 10**7
"""Kernels of fewer bytes wait for the memory rather than use its bandwidth."""

LEAST = 5
"""Kernels that a class needs."""

Points = dict[tuple[str, int], tuple[int, float]]
"""(bytes, microseconds) by kind and number of the class. The class 0 is the start of a kernel."""


def kernels(row: Path, gpu: Gpu) -> Iterator[tuple[str, int, float]]:
    """Kind, bytes and microseconds of each kernel of a step that only moves bytes."""
    program = gzip.decompress((row / "program.hlo.gz").read_bytes()).decode()
    walk = Walk(Program.parse(program, custom_calls.RULES, strict=False))
    schedule = expected_schedule(walk, gpu, tables.load(gpu.name.lower()))
    expected = compare_profile.planned(schedule)
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


def points(folders: list[Path], gpu: Gpu) -> Points:
    """A point for each class with enough kernels."""
    found: defaultdict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for row in sorted({path.parent for folder in folders for path in folder.glob("*/kernels*")}):
        for kind, moved, took in kernels(row, gpu):
            found[kind, bisect(CLASSES, moved)].append((moved, took))
    start = median(took for _, took in found.pop(("any", 0)))
    made: Points = {("any", 0): (0, start), ("fp8", 0): (0, start)}
    for key, every in sorted(found.items()):
        if key[1] and len(every) >= LEAST:
            size = median(moved for moved, _ in every)
            made[key] = size, size * median(took / moved for moved, took in every)
    return dict(sorted(made.items()))


def on_another(gpu: Gpu, measured: dict[str, Points]) -> Points:
    """Points of a GPU without steps, from those of two GPUs with equally many multiprocessors."""
    (one, few), (other, many) = measured.items()
    slow, fast = PLANNED[one], PLANNED[other]
    assert slow.chip
    assert fast.chip
    assert gpu.chip
    assert slow.chip.cores == fast.chip.cores
    made: Points = {}
    for key in few.keys() & many.keys():
        (size, slow_us), (fast_size, fast_us) = few[key], many[key]
        if fast_size < SMALL:
            made[key] = fast_size, fast_us
            continue
        fast_us *= size / fast_size
        memory_us = (slow_us - fast_us) / (1 - slow.bandwidth / fast.bandwidth)
        memory_us = min(max(memory_us, 0.0), slow_us)
        took = memory_us * slow.bandwidth / gpu.bandwidth
        made[key] = size, took + (slow_us - memory_us) * slow.chip.cores / gpu.chip.cores
    return dict(sorted(made.items()))


def main() -> None:
    """Prints the lines of each GPU."""
    folders: defaultdict[str, list[Path]] = defaultdict(list)
    for argument in sys.argv[1:]:
        name, _, folder = argument.partition("=")
        folders[name].append(Path(folder))
    measured = {name: points(some, PLANNED[name]) for name, some in folders.items()}
    for name, gpu in PLANNED.items():
        print(f"# {name}")
        for (kind, _), (size, took) in (measured.get(name) or on_another(gpu, measured)).items():
            print(tables.line("memory", kind, (round(size),), round(took, 2)))


if __name__ == "__main__":
    main()
