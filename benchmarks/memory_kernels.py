"""Prints the lines `memory` of the forecast's tables, from the kernels of measured steps.

    python benchmarks/memory_kernels.py h100=FOLDER [h100=FOLDER ..] h200=FOLDER

A folder is the output of `benchmarks/gpu.py` on that GPU: it has the program of each row and the
time of each kernel. Kernels that only move bytes are sorted into classes by their bytes. A line is
the median number of bytes of a class, and the time at the median rate. The smallest class is the
start of a kernel. Slices of stacks are left out, since some run next to Mamba-2's scan, and so are
kernels of calls that we do not know.

The lines are of the first GPU. On the second one, a class is faster by the median ratio of kernels
that both GPUs ran: of the same row, of as many bytes. For other GPUs, the time of a large kernel
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
from jaxbench.forecast.costs import Measured
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

Class = tuple[str, int]
"""Kind and number of a class of kernels. The class 0 is the start of a kernel."""

Samples = dict[tuple[str, str, int], list[float]]
"""Microseconds of the kernels of a GPU by row, kind and bytes."""


def kernels(row: Path, gpu: Gpu) -> Iterator[tuple[str, int, float]]:
    """Kind, bytes and microseconds of each kernel of a step that only moves bytes."""
    program = gzip.decompress((row / "program.hlo.gz").read_bytes()).decode()
    walk = Walk(Program.parse(program, custom_calls.RULES, strict=False))
    schedule = walk.under(Measured(gpu, tables.load(gpu.name.lower())))
    expected = compare_profile.by_instruction(schedule)
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


def samples(folders: list[Path], gpu: Gpu) -> Samples:
    """All kernels in the folders of a GPU."""
    found: defaultdict[tuple[str, str, int], list[float]] = defaultdict(list)
    for row in sorted({path.parent for folder in folders for path in folder.glob("*/kernels*")}):
        for kind, moved, took in kernels(row, gpu):
            found[row.name, kind, moved].append(took)
    return found


def class_of(kind: str, moved: int) -> Class:
    """The class of a kernel; the smallest ones are of one class."""
    number = bisect(CLASSES, moved)
    return (kind, number) if number else ("any", 0)


def points(measured: Samples) -> dict[Class, tuple[float, float]]:
    """The bytes and the microseconds of each class with enough kernels."""
    found: defaultdict[Class, list[tuple[int, float]]] = defaultdict(list)
    for (_, kind, moved), times in measured.items():
        found[class_of(kind, moved)] += [(moved, took) for took in times]
    start = median(took for _, took in found.pop(("any", 0)))
    made = {("any", 0): (0.0, start), ("fp8", 0): (0.0, start)}
    for key, every in sorted(found.items()):
        if len(every) >= LEAST:
            size = median(moved for moved, _ in every)
            made[key] = size, size * median(took / moved for moved, took in every)
    return dict(sorted(made.items()))


def ratios(slow: Samples, fast: Samples) -> dict[Class, float]:
    """How many times as fast the kernels of each class are on the second GPU, if both ran
    some of it."""
    found: defaultdict[Class, list[float]] = defaultdict(list)
    for row, kind, moved in slow.keys() & fast.keys():
        both = median(slow[row, kind, moved]), median(fast[row, kind, moved])
        found[class_of(kind, moved)].append(both[0] / both[1])
    gains = {key: median(every) for key, every in found.items()}
    return gains | {("fp8", 0): gains["any", 0]}


def seconds_on(gpu: Gpu, slow: Gpu, fast: Gpu, gain: float, large: bool) -> float:
    """The time of a kernel on a GPU over that on the slow one, if the fast one is `gain` times as
    fast as the slow one."""
    if gpu is slow:
        return 1.0
    if gpu is fast or not large:
        return 1 / gain
    assert slow.chip
    assert fast.chip
    assert gpu.chip
    assert slow.chip.cores == fast.chip.cores
    memory = (1 - 1 / gain) / (1 - slow.bandwidth / fast.bandwidth)
    memory = min(max(memory, 0.0), 1.0)
    others = (1 - memory) * slow.chip.cores / gpu.chip.cores
    return memory * slow.bandwidth / gpu.bandwidth + others


def main() -> None:
    """Prints the lines of each GPU."""
    folders: defaultdict[str, list[Path]] = defaultdict(list)
    for argument in sys.argv[1:]:
        name, _, folder = argument.partition("=")
        folders[name].append(Path(folder))
    slow, fast = (PLANNED[name] for name in folders)
    of_slow, of_fast = (samples(some, PLANNED[name]) for name, some in folders.items())
    gains = ratios(of_slow, of_fast)
    for name, gpu in PLANNED.items():
        print(f"# {name}")
        for (kind, number), (size, took) in points(of_slow).items():
            large = size >= SMALL
            # A class that only one of them ran gains as much as the nearest one of its kind.
            alike = min((key for key in gains if key[0] == kind), key=lambda k: abs(k[1] - number))
            took *= seconds_on(gpu, slow, fast, gains[alike], large)
            print(tables.line("memory", kind, (round(size),), round(took, 2)))


if __name__ == "__main__":
    main()
