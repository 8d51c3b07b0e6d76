"""Forecasts the programs that others timed: MaxText's train step, compiled for absent GPUs with the
options of the published run, and read as `plan --hlo` reads a program.

`like_for_like.yaml` has the published steps and the options. MaxText is installed as
`host_time_maxtext.py` says. The first command compiles the programs that are missing; the second
one forecasts all of them again in seconds, and writes the tables of the document:

    python benchmarks/like_for_like.py --maxtext MAXTEXT/bin/python [ROW ..]
    python benchmarks/like_for_like.py --output docs/like_for_like.md

`--output` also writes the errors to the package (`forecast.interval`), which makes the intervals of
all forecasts from them. Programs stay in results/like_for_like (or `--folder`). `--record STEP`
adds the forecasts to like_for_like_steps.csv under the name of a change, so that the document shows
what each change of the forecast did.

`maxtext_program.py` says how programs are compiled. The table says how much memory XLA's scheduler
believed to need.
"""

import argparse
import csv
import io
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import like_for_like_causes as causes
import maxtext_program as maxtext
import yaml
from tables import line, replace_table, table

from jaxbench.base.files import write_whole
from jaxbench.base.hardware import Gpu, placed
from jaxbench.forecast.costs import Measured
from jaxbench.forecast.forecast import Forecast
from jaxbench.forecast.interval import (
    ERRORS,
    Interval,
    Timed,
    accuracy,
    interval,
    timed_programs,
)
from jaxbench.forecast.tables import load
from jaxbench.xla.hlo import Work
from jaxbench.xla.schedule import Walk

FAMILIES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text()
)
FOLDER = Path("results", "like_for_like")
STEPS = Path(__file__).with_name("like_for_like_steps.csv")


@dataclass(frozen=True)
class Row:
    """A published step of a family."""

    family: str
    gpus: int

    @property
    def name(self) -> str:
        return f"{self.family}:{self.gpus}"

    @property
    def of(self) -> dict[str, Any]:
        """What all rows of the family share."""
        return FAMILIES[self.family]

    @property
    def own(self) -> dict[str, Any]:
        return self.of["rows"][self.gpus]

    @property
    def published_s(self) -> float:
        return self.own["step_s"]

    @property
    def program(self) -> maxtext.Program:
        reduce, gather, scatter = self.of["combine"]
        return maxtext.Program(
            gpu=self.of["gpu"],
            gpus=self.gpus,
            dtype=self.of["dtype"],
            sequence=self.of["sequence"],
            batch=self.of["batch"],
            mesh=self.own["mesh"],
            options=self.of["options"],
            combine=(reduce, gather, self.own.get("scatter", scatter)),
            profiled=self.of.get("profiled", False),
            nic=self.of.get("nic"),
        )

    @property
    def gpu(self) -> Gpu:
        """The GPU, in the network of the run."""
        return placed(self.program.target, self.gpus)

    def stem(self, folder: Path) -> Path:
        """The names of the row's files begin with this."""
        return folder / f"{self.family}-{self.gpus}-{self.program.digest}"


def rows() -> list[Row]:
    """All rows."""
    return [Row(family, gpus) for family, of in FAMILIES.items() for gpus in of["rows"]]


def compile_missing(python: str, row: Row, folder: Path) -> None:
    """Compiles a row's programs if they are not in the folder. Exits with the end of its errors."""
    try:
        maxtext.compiled(python, row.program, row.stem(folder))
    except RuntimeError as error:
        sys.exit(str(error))


@dataclass(frozen=True)
class Result:
    """A row's program and its forecast, with the guided schedule if there is one. `first` is the
    forecast with XLA's own schedule."""

    row: Row
    walk: Walk
    forecast: Forecast
    first: Forecast
    believed: int

    @property
    def guided(self) -> bool:
        return self.forecast is not self.first

    @property
    def timed(self) -> Timed:
        """The errors of the package have this of a program."""
        return Timed(
            family=self.row.family,
            gpus=self.row.gpus,
            gpu=self.row.of["gpu"],
            dtype=self.row.of["dtype"],
            experts=self.row.of.get("experts", False),
            weak="weak" in self.row.of,
            published_s=self.row.published_s,
            forecast_s=self.forecast.step_s,
            assumed=self.forecast.interval.assumed,
        )


def result(row: Row, folder: Path) -> Result:
    """The forecast of a row's stored programs."""
    stem = row.stem(folder)
    own, counts = maxtext.path(stem), maxtext.scheduled(stem)
    walk, first = maxtext.read(row.program, own)
    walk, step = maxtext.read(row.program, counts) if counts != own else (walk, first)
    return Result(row, walk, step, first, maxtext.facts(stem).believed)


def percent(value: float) -> str:
    return f"{100 * value:+.1f}"


COLUMNS = (
    "program", "GPUs", "mesh", "published s", "forecast s", "error %", "interval s", "inside",
    "waiting for collectives s", "schedule", "scheduler's memory GiB, run's",
    "beyond the tables %",
)  # fmt: skip


def by_others(timed: Timed, programs: list[Timed]) -> Interval:
    """The interval of a program's forecast, by the errors on the programs of other families."""
    others = [other for other in programs if other.family != timed.family]
    return interval(timed.forecast_s, timed.assumed, [], others)


def held(timed: Timed, programs: list[Timed]) -> bool:
    """The published step lies in the interval that other families give."""
    found = by_others(timed, programs)
    return found.low_s <= timed.published_s <= found.high_s


def cells_of(found: Result, programs: list[Timed]) -> list[str]:
    """The cells of a row. Its interval is that of the other families of `programs`."""
    f, row, timed = found.forecast, found.row, found.timed
    memory = row.gpu.memory * row.of["memory"] / 2**30
    within = by_others(timed, programs)
    guided = f"profile ({maxtext.exposed(found.first):.3f} s without)"
    return [
        row.family + (" (weak)" if "weak" in row.of else ""),
        f"{row.gpus} {row.of['gpu'].upper()}",
        " x ".join(f"{axis} {size}" for axis, size in row.own["mesh"].items()),
        f"{timed.published_s:.3f}",
        f"{timed.forecast_s:.3f}",
        percent(timed.error),
        f"{within.low_s:.3f} to {within.high_s:.3f}",
        "yes" if held(timed, programs) else "no",
        f"{maxtext.exposed(f):.3f}",
        guided if found.guided else "XLA's own",
        f"{found.believed / 2**30:.0f} of {memory:.0f}" if found.believed else "",
        f"{100 * f.outside:.0f}",
    ]


def spread(errors: list[float]) -> list[str]:
    """Cells: number, median, median size, worst, forecasts that are too low."""
    low = sum(error < 0 for error in errors)
    return [
        str(len(errors)),
        percent(statistics.median(errors)),
        f"{100 * statistics.median(map(abs, errors)):.1f}",
        percent(max(errors, key=abs)),
        f"{low} of {len(errors)}",
    ]


SPREAD = "programs", "median error %", "median size %", "worst %", "too low"


def grouped(
    found: list[Timed], by: Callable[[Timed], str], programs: list[Timed]
) -> list[list[str]]:
    """Lines of cells with the errors of each group of programs, and how many published steps lie in
    the interval that other families give."""
    lines = []
    for group in dict.fromkeys(map(by, found)):
        own = [timed for timed in found if by(timed) == group]
        inside = sum(held(timed, programs) for timed in own)
        cells = [group, *spread([t.error for t in own]), f"{inside} of {len(own)}"]
        lines.append(cells)
    return lines


def coverage(programs: list[Timed]) -> list[str]:
    """The table of intervals: each family by the others."""
    lines = []
    for family in dict.fromkeys(timed.family for timed in programs):
        own = [timed for timed in programs if timed.family == family]
        ratios = [f"{timed.published_s / timed.forecast_s:.3f}" for timed in own]
        within = [by_others(timed, programs) for timed in own]
        calibrated = [
            i.calibrated_s / timed.published_s - 1 for i, timed in zip(within, own, strict=True)
        ]
        low, high = within[0].low_s / own[0].forecast_s, within[0].high_s / own[0].forecast_s
        cells = [
            family,
            " to ".join(dict.fromkeys((min(ratios), max(ratios)))),
            f"{low:.3f} to {high:.3f}",
            f"{sum(held(timed, programs) for timed in own)} of {len(own)}",
            " to ".join(dict.fromkeys((percent(min(calibrated)), percent(max(calibrated))))),
        ]
        lines.append(cells)
    return table(
        ["program", "published over forecast", "90 % interval by the others", "inside",
         "calibrated error %"],
        lines,
    )  # fmt: skip


def model(timed: Timed) -> str:
    """The model of a program, whatever the precision and the GPU."""
    return FAMILIES[timed.family]["options"]["model_name"]


ALTERNATIVES: dict[str, tuple[Callable[[Timed], bool], Callable[[Timed], str]]] = {
    "all programs": (lambda t: True, lambda t: t.family),
    "all programs, a whole model left out": (lambda t: True, model),
    "without experts": (lambda t: not t.experts, lambda t: t.family),
    "bf16": (lambda t: t.dtype == "bf16", lambda t: t.family),
    "FP8": (lambda t: t.dtype == "fp8", lambda t: t.family),
}
"""Which programs an interval may rest on, and what is left out to predict one of them."""


def alternatives(programs: list[Timed]) -> list[str]:
    """The table of intervals that rest on fewer programs."""
    lines = []
    for name, (of, by) in ALTERNATIVES.items():
        own = [timed for timed in programs if of(timed)]
        inside = 0
        for timed in own:
            rest = [other for other in own if by(other) != by(timed)]
            found = interval(timed.forecast_s, timed.assumed, [], rest)
            inside += found.low_s <= timed.published_s <= found.high_s
        whole = interval(1.0, 0.0, [], own)
        cells = [
            name,
            str(whole.families),
            f"{whole.low_s:.2f} to {whole.high_s:.2f}",
            f"{whole.calibrated_s:.3f}",
            f"{inside} of {len(own)}",
        ]
        lines.append(cells)
    return table(
        ["interval of", "families", "low and high over forecast", "calibrated over forecast",
         "inside, when left out"],
        lines,
    )  # fmt: skip


def error_lines(found: list[Result]) -> str:
    """The text of the package's errors. With each program come the matmul and the attention that
    take longest in a step, with the milliseconds of one launch, so that a test sees when the tables
    give other times."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["family", "GPUs", "GPU", "precision", "experts", "weak", "published s",
                     "forecast s", "assumed", *KERNELS])  # fmt: skip
    for r in found:
        t = r.timed
        flags_of = ["yes" if flag else "no" for flag in (t.experts, t.weak)]
        writer.writerow([t.family, t.gpus, t.gpu, t.dtype, *flags_of, t.published_s,
                         f"{t.forecast_s:.4f}", f"{t.assumed:.3f}", *kernels(r)])  # fmt: skip
    return text.getvalue()


KERNELS = ("matmul", "matmul ms", "attention", "attention ms")


def kernels(found: Result) -> Iterator[str]:
    """The columns `KERNELS` of a program."""
    costs = Measured(found.row.gpu, load(found.row.of["gpu"]))
    seconds: defaultdict[Work, float] = defaultdict(float)
    for _, kernel, runs in found.walk.kernels():
        for work in kernel.works:
            seconds[work] += costs.work(work) * runs
    for kind in ("product", "attention"):
        longest = max((work for work in seconds if work.kind == kind), key=seconds.__getitem__)
        yield named(longest)
        yield f"{1000 * costs.work(longest):.4g}"


def named(work: Work) -> str:
    """Dtype and sizes of a matmul, or pass and sizes of attention."""
    passes = "backward" if work.backward else "forward"
    first = passes if work.kind == "attention" else work.dtype
    return f"{first} {'x'.join(map(str, work.sizes))}"


def recorded() -> dict[str, dict[str, float]]:
    """The forecasts that were recorded, in seconds by step and row."""
    steps: dict[str, dict[str, float]] = {}
    if STEPS.is_file():
        with STEPS.open() as file:
            for entry in csv.DictReader(file):
                steps.setdefault(entry["step"], {})[entry["row"]] = float(entry["forecast_s"])
    return steps


def record(step: str, found: list[Result]) -> None:
    """Adds forecasts to `STEPS`, in place of earlier ones of the same step and row."""
    steps = recorded()
    steps.setdefault(step, {}).update({r.row.name: r.forecast.step_s for r in found})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", "row", "forecast_s"])
    writer.writerows([name, row, f"{s:.4f}"] for name, of in steps.items() for row, s in of.items())
    write_whole(STEPS, text.getvalue())


def changes() -> list[str]:
    """The table of recorded steps: median and worst error by precision and GPU."""
    published = {row.name: row for row in rows()}
    groups = list(dict.fromkeys(kind(row) for row in published.values()))
    lines = []
    for step, of in recorded().items():
        cells = [step]
        for group in ["all", *groups]:
            errors = [
                s / published[name].published_s - 1
                for name, s in of.items()
                if name in published and group in ("all", kind(published[name]))
            ]
            worst = percent(max(errors, key=abs)) if errors else ""
            cells.append(
                f"{percent(statistics.median(errors))}, {worst} ({len(errors)})" if errors else ""
            )
        lines.append(cells)
    return table(["step", "all", *groups], lines)


def kind(row: Row) -> str:
    """A row's precision and GPU."""
    return f"{row.of['dtype']} {row.of['gpu'].upper()}"


WIDTHS = {"llama2-7b": 4096, "mixtral-8x7b": 4096, "llama3.1-405b": 16384}
"""Features of the models that have other ones than Llama 70B's 8192."""


def shape(row: Row) -> str:
    """A row's precision, width, sequence length and GPU."""
    width = WIDTHS.get(row.of["options"]["model_name"], 8192)
    return f"{row.of['dtype']} {width} x {row.of['sequence']} {row.of['gpu'].upper()}"


PARTS = ("products", "attention", "other kernels", "launches", "slowed", "exposed")
"""Parts of a forecast, `exposed` whatever the axes."""


def parts(found: list[Result]) -> list[str]:
    """The table of a forecast's parts by program."""
    lines = []
    for family in dict.fromkeys(r.row.family for r in found):
        own = [r for r in found if r.row.family == family]
        cells = [
            statistics.median(
                sum(s for name, s in r.forecast.parts_s.items() if name.startswith(part))
                / r.row.published_s
                for r in own
            )
            for part in PARTS
        ]
        lines.append([family, *(f"{100 * cell:.1f}" for cell in cells)])
    return table(["program", "matmuls", *PARTS[1:]], lines)


def document(found: list[Result]) -> str:
    """The tables of the document."""
    every = [r.timed for r in found]
    strong = [r for r in found if not r.timed.weak] or found
    programs = [r.timed for r in strong]
    inside = sum(held(timed, programs) for timed in programs)
    calibrated = [by_others(t, programs).calibrated_s / t.published_s - 1 for t in programs]
    cells, now = spread([timed.error for timed in programs]), spread(calibrated)
    families = {timed.family for timed in programs}
    outside = ", ".join(sorted({t.family for t in programs if not held(t, programs)}))
    head = (
        f"{time.strftime('%Y-%m-%d')}. {len(programs)} programs of {len(families)} families: "
        f"{accuracy(programs)}. Together: median error {cells[1]} %, median size {cells[2]} %, "
        f"worst {cells[3]} %, too low {cells[4]}. {inside} of {len(programs)} published steps lie "
        "in the 90 % interval that the other families give"
        f"{f'; the others are of {outside}' if outside else ''}. "
        f"Calibrated by the other families: median size {now[2]} %, worst {now[3]} %."
    )
    columns = [*SPREAD, "in the interval"]
    return "\n".join([
        head, "",
        "### By precision and GPU", "",
        *table(["precision, GPU", *columns],
               grouped(programs, lambda t: f"{t.dtype} {t.gpu.upper()}", programs)),
        "### The interval, each family by the others", "",
        *coverage(programs),
        "### Other ways to make the interval", "",
        *alternatives(programs),
        "### By program", "",
        *table(["program", *columns], grouped(every, lambda t: t.family, programs)),
        "### Every program", "",
        *table(COLUMNS, (cells_of(r, programs) for r in found)),
        "### Where the time goes", "",
        "Parts of the forecast in % of the published step: the median of each program.", "",
        *parts(found),
        "### One assumption at a time", "",
        "Median error in % of each kind of program: precision, width of the model, length of the "
        "sequence, GPU. Weak figures are left out.", "",
        *table(*causes.table(((shape(r.row), r.walk, r.row.gpu,
                               r.row.published_s) for r in strong), percent)),
        "### What each change did", "",
        "Median and worst error in %, and the number of programs.", "",
        *changes(),
    ])  # fmt: skip


def main() -> None:
    """Compiles what is missing, forecasts rows one after another, and prints or writes tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help="names of rows or families, as llama2_70b_bf16:64")
    parser.add_argument("--maxtext", help="Python of the environment with MaxText, to compile")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the programs")
    parser.add_argument("--record", metavar="STEP", help="keep the forecasts under this name")
    parser.add_argument("--output", type=Path, help="document whose tables are replaced")
    args = parser.parse_args()
    chosen = [r for r in rows() if not args.rows or {r.name, r.family} & {*args.rows}]
    if not chosen:
        sys.exit(f"no such row; expected some of {', '.join(r.name for r in rows())}")
    found, missing = [], []
    for row in chosen:
        if args.maxtext:
            compile_missing(args.maxtext, row, args.folder)
        if maxtext.path(row.stem(args.folder)).is_file():
            found.append(result(row, args.folder))
            print(line(cells_of(found[-1], timed_programs())), flush=True)
        else:
            missing.append(row.name)
    if missing:
        print(f"No program in {args.folder}; --maxtext PYTHON compiles {', '.join(missing)}")
    if not found:
        sys.exit(1)
    if args.record:
        record(args.record, found)
    if args.maxtext and not args.output:
        return
    text = document(found)
    if args.output:
        replace_table(args.output, text)
        write_whole(ERRORS, error_lines(found))
    print(f"\n{text}")


if __name__ == "__main__":
    main()
