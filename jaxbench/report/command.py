"""The command `jaxbench report`: compares runs with published ones, and has an exit status for
CI."""

import io
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxbench.base.errors import RecipeError, counted
from jaxbench.base.files import as_json
from jaxbench.base.hardware import NULL
from jaxbench.base.terminal import WIDTH, Parser, command, console, live, write
from jaxbench.recipe import flops
from jaxbench.report import folders, formats, history, logs, page, terminal
from jaxbench.report.compare import compare
from jaxbench.report.named import named
from jaxbench.report.runs import Result, RunData, Window, evaluate
from jaxbench.results.window import WINDOWS, window

EXAMPLES = """
    jaxbench report results/                                  every run below a folder
    jaxbench report results/ --format html --output report.html
    jaxbench report --compare before/ after/                  is it slower, and what differs
    jaxbench report --history results/                        when did a row change
"""

LOG_SUFFIXES = (".out", ".log", ".txt")
OTHER_LOGS = ("sbatch_", "vboost")
"""The names of logs that are not logs of runs begin with one of these."""

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a command line, as `--help` documents them."""

    results: list[Path]
    compare: list[Path] | None
    history: Path | None
    threshold: float
    window: str | None
    flops: str
    format: str
    output: Path | None


def make_parser() -> Parser:
    """The parser of all options; `--help` documents them."""
    parser = Parser(
        prog="jaxbench report", examples=EXAMPLES,
        description="Compares runs with published ones. Reads our result folders and the logs of "
        "the published scripts, at any depth. The exit status is 1 if a run failed, was "
        "interrupted, is incomplete, or is slow, which means below 95 % of the published "
        "throughput.",
    )  # fmt: skip
    add = parser.add_argument_group("what to read").add_argument
    add("results", nargs="*", type=Path, metavar="RESULTS", help="folders or logs")
    add(
        "--compare", nargs=2, type=Path, metavar=("A", "B"),
        help="two runs, or folders of repeats: the ratio of their step times with its confidence "
        "interval, and what differs; status 1 if B is slower by more than the threshold",
    )  # fmt: skip
    add(
        "--history", type=Path, metavar="FOLDER",
        help="runs of many dates: when the step time of each row changed, and what else did",
    )  # fmt: skip
    add = parser.add_argument_group("how to count").add_argument
    add(
        "--threshold", type=float, default=2.0, metavar="PERCENT",
        help="--compare and --history ignore smaller changes (default 2)",
    )  # fmt: skip
    add(
        "--window", metavar="NAME", default=None,
        help="iterations that count: published (11 to 44), newer (35 to 44, as later releases "
        "have it), or first:last; default published, or the last half of a shorter run",
    )  # fmt: skip
    add("--flops", choices=flops.CONVENTIONS, default="published", help="how FLOPs are counted")
    add = parser.add_argument_group("what to write").add_argument
    add(
        "--format", choices=["table", *formats.TEXTS, "html"], default="table",
        help="default table; html is a page in a single file",
    )  # fmt: skip
    add("--output", type=Path, metavar="FILE", help="write to this file instead of the terminal")
    return parser


def find(path: Path) -> Iterator[RunData]:
    """The runs at a path, in the order of their names. Raises RecipeError for a missing path, and
    for a file that is not a log."""
    if path.is_dir():
        yield from _below(path, set())
    elif not path.is_file():
        raise RecipeError(f"{path}: no such file or folder")
    elif run := _log(path):
        yield run
    else:
        shows = "neither its name nor its content shows a log of a published script"
        raise RecipeError(f"{path}: {shows}")


def _below(folder: Path, seen: set[Path], logs_too: bool = True) -> Iterator[RunData]:
    """The runs in a folder and below it. Follows each link once. Logs in a result folder of ours
    and below it belong to its run."""
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    try:
        if folders.is_run(folder):
            yield folders.read(folder)
            logs_too = False
        for child in sorted(folder.iterdir()):
            if child.is_dir() and child.name != CHECKPOINTS:
                yield from _below(child, seen, logs_too)
            elif logs_too and _is_log(child) and child.resolve() not in seen:
                seen.add(child.resolve())
                if run := _log(child):
                    yield run
    except OSError as error:
        yield _unreadable(folder, error)


def _is_log(path: Path) -> bool:
    named = path.suffix in LOG_SUFFIXES and not path.name.startswith(OTHER_LOGS)
    return named and path.is_file()


def _log(path: Path) -> RunData | None:
    try:
        return logs.read(path)
    except OSError as error:
        return _unreadable(path, error)


def _unreadable(path: Path, error: OSError) -> RunData:
    return folders.unreadable(path, f"it cannot be read: {error.strerror}")


def chosen_window(text: str | None, run: RunData) -> Window:
    """The iterations that count. Raises RecipeError for an unknown name or an empty range."""
    if text is None:
        if len(run.begins) > 1 and run.recorded_window:
            return run.recorded_window  # within one start
        return window(run.steps.expected or len(run.steps.seconds) or 1, run.steps.first)
    if text in WINDOWS:
        return WINDOWS[text]
    if (match := re.fullmatch(r"(\d+):(\d+)", text)) and int(match[1]) <= int(match[2]):
        return int(match[1]), int(match[2])
    raise RecipeError(f"--window {text}: expected {', '.join(WINDOWS)}, or first:last as in 11:44")


def report(paths: list[Path], window: str | None) -> list[Result]:
    """The results of all runs at these paths, sorted by recipe, dtype and GPUs. Raises RecipeError
    if there is no run."""
    runs = []
    with live("reading runs") as say:
        for run in (run for path in paths for run in find(path)):
            runs.append(run)
            say(f"reading runs: {len(runs)}")
    if not runs:
        raise RecipeError(f"found no run in {', '.join(map(str, paths))}")
    return sorted((evaluate(run, chosen_window(window, run)) for run in runs), key=_order)


def _order(result: Result) -> tuple[str, str, int, str]:
    """The sort key: the recipe without its row, then numbers."""
    r = result.run
    return r.recipe.partition(":")[0], r.dtype or "", r.gpus or 0, r.recipe


def _compared(path: Path, options: Options, option: str, *known: str) -> list[Result]:
    """The runs to compare with each other. Raises RecipeError for arguments that do not combine
    with --compare or --history, and for a run of null GPUs, since its times must not stand among
    other times."""
    if options.results or not 0 < options.threshold < 100:
        raise RecipeError(f"{option} takes a threshold between 0 and 100 %, and no RESULTS")
    if options.format not in known:
        expected = ", ".join(known)
        raise RecipeError(f"{option} has no --format {options.format}; expected one of {expected}")
    results = report([path], options.window)
    for result in results:
        if result.run.null:
            raise RecipeError(f"{result.run.path}: {NULL}; leave it out")
    return results


def _compare(paths: Sequence[Path], options: Options) -> int:
    a, b = (_compared(path, options, "--compare", "table", "json") for path in paths)
    result = compare(a, b, options.threshold / 100)
    _write(as_json(result) if options.format == "json" else result.text(), options)
    return int(result.verdict == "slower")


def _history(folder: Path, options: Options) -> int:
    results = _compared(folder, options, "--history", "table", "json", "html")
    threshold = options.threshold / 100
    series = history.history(results, threshold)
    if options.format == "json":
        text = history.as_json(series)
    else:
        as_text = page.history_page if options.format == "html" else history.text
        text = as_text(series, threshold)
    _write(text, options)
    return 0


def _write(text: str, options: Options) -> None:
    """Prints a text or a table, or writes it to --output."""
    if options.format == "table" and not options.output:
        terminal.print_text(text, console())
    else:
        write(text, options.output)


def _report(options: Options) -> int:
    if not options.results:
        raise RecipeError("name RESULTS, or give --compare A B or --history FOLDER")
    results = report(options.results, options.window)
    if options.format in formats.TEXTS:
        lines = [formats.line(r, options.flops) for r in results]
        write(formats.TEXTS[options.format](lines), options.output)
    elif options.format == "html":
        write(page.page(results, options.flops), options.output)
    elif options.output:
        text = io.StringIO()
        output = Console(file=text, width=WIDTH, markup=False, emoji=False)
        terminal.print_report(named(results, options.flops), options.flops, output)
        write(text.getvalue(), options.output)
    else:
        terminal.print_report(named(results, options.flops), options.flops, console())
    bad = sum(r.verdict.bad for r in results)
    print(
        f"{counted(len(results), 'run')}: {len(results) - bad} without fault, "
        f"{bad} failed, interrupted, incomplete or slow",
        file=sys.stderr,
    )
    return int(bad > 0)


@command
def main(argv: Sequence[str] | None) -> int:
    """Prints or writes the report. Returns the exit status."""
    options = Options(**vars(make_parser().parse_args(argv)))
    if options.compare:
        return _compare(options.compare, options)
    return _history(options.history, options) if options.history else _report(options)
