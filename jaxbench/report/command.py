"""The command `jaxbench report`: compares runs with published ones, and has an exit status for
CI."""

import argparse
import io
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from jaxbench.base.errors import RecipeError, counted
from jaxbench.base.files import as_json
from jaxbench.base.hardware import NULL
from jaxbench.base.terminal import WIDTH, command, console, live, write
from jaxbench.recipe import published
from jaxbench.report import folders, formats, history, logs, page, terminal
from jaxbench.report.arguments import make_parser
from jaxbench.report.compare import compare
from jaxbench.report.named import named
from jaxbench.report.runs import Result, RunData, Steps, Window, evaluate
from jaxbench.results.window import WINDOWS, window

LOG_SUFFIXES = (".out", ".log", ".txt")
OTHER_LOGS = ("sbatch_", "vboost")
"""The names of logs that are not logs of runs begin with one of these."""

CHECKPOINTS = "checkpoints"


def find(path: Path) -> Iterator[RunData]:
    """The runs at a path, in the order of their names. Raises RecipeError for a missing path, and
    for a file that is neither a log nor a table."""
    if path.suffix == ".csv" and path.is_file():
        yield from published_runs(path)
    elif path.is_file():
        if (run := _log(path)) is None:
            raise RecipeError(
                f"{path}: neither its name nor its content shows a log of a published script"
            )
        yield run
    elif path.is_dir():
        yield from _below(path, set())
    else:
        raise RecipeError(f"{path}: no such file or folder")


def _below(folder: Path, seen: set[Path]) -> Iterator[RunData]:
    """The runs in a folder and below it. Follows each link once. If a result folder of ours has
    logs directly in it, they belong to its run."""
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    try:
        if ours := folders.is_run(folder):
            yield folders.read(folder)
        for child in sorted(folder.iterdir()):
            if child.is_dir() and child.name != CHECKPOINTS:
                yield from _below(child, seen)
            elif not ours and _is_log(child) and child.resolve() not in seen:
                seen.add(child.resolve())
                if (run := _log(child)) is not None:
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
    reason = f"it cannot be read: {error.strerror}"
    return RunData(path=path, recipe=path.name, failed=reason)


def published_runs(path: Path) -> Iterator[RunData]:
    """The rows of a table of published figures, as runs of one iteration."""
    for row in published.read(path):
        errata = f" ({', '.join(row.errata)})" if row.errata else ""
        yield RunData(
            path=path, recipe=f"{row.title}{errata}",
            gpus=row.gpus, dtype=row.dtype, label="published", model=row.title,
            steps=Steps(seconds={0: row.step_time_s}, expected=1, last=0),
            tokens=row.tokens_per_step, flops={"published": row.flops_per_gpu},
            peak_tflops=row.gpu.tflops[row.dtype], published=asdict(row),
            not_comparable=["the published figure itself"],
        )  # fmt: skip


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
    """The sort key: the recipe without its row or errata, then numbers."""
    r = result.run
    return re.split(r"[:(]", r.recipe)[0].strip(), r.dtype or "", r.gpus or 0, r.recipe


def _check(arguments: argparse.Namespace, name: str, *formats: str) -> None:
    """Raises RecipeError for arguments that do not combine with --compare or --history."""
    if arguments.results or not 0 < arguments.threshold < 100:
        raise RecipeError(f"{name} takes a threshold between 0 and 100 %, and no RESULTS")
    if arguments.format not in formats:
        raise RecipeError(
            f"{name} has no --format {arguments.format}; expected one of {', '.join(formats)}"
        )


def _refuse_null(results: list[Result]) -> None:
    """Raises RecipeError for a run of null GPUs, since its times must not stand among other
    times."""
    for path in (r.run.path for r in results if r.run.null):
        raise RecipeError(f"{path}: {NULL}; leave it out")


def _compare(arguments: argparse.Namespace) -> tuple[str, bool]:
    _check(arguments, "--compare", "table", "json")
    a, b = (report([path], arguments.window) for path in arguments.compare)
    _refuse_null([*a, *b])
    result = compare(a, b, arguments.threshold / 100)
    text = as_json(result) if arguments.format == "json" else result.text()
    return text, result.verdict == "slower"


def _history(arguments: argparse.Namespace) -> str:
    _check(arguments, "--history", "table", "json", "html")
    threshold = arguments.threshold / 100
    results = report([arguments.history], arguments.window)
    _refuse_null(results)
    series = history.history(results, threshold)
    if arguments.format == "json":
        return history.as_json(series)
    as_text = page.history_page if arguments.format == "html" else history.text
    return as_text(series, threshold)


def _results(arguments: argparse.Namespace) -> tuple[str | None, list[Result]]:
    """The report and its results. The text is None if the report is printed in the terminal's own
    width and colours."""
    if not arguments.results:
        raise RecipeError("name RESULTS, or give --compare A B or --history FOLDER")
    results = report(arguments.results, arguments.window)
    if arguments.format in formats.TEXTS:
        lines = [formats.line(r, arguments.flops) for r in results]
        return formats.TEXTS[arguments.format](lines), results
    if arguments.format == "html":
        return page.page(results, arguments.flops), results
    text = io.StringIO()
    output = Console(file=text, width=WIDTH, markup=False) if arguments.output else console()
    terminal.print_report(named(results, arguments.flops), arguments.flops, output)
    return text.getvalue() if arguments.output else None, results


@command
def main(argv: Sequence[str] | None) -> int:
    """Prints or writes the report. Returns the exit status."""
    text: str | None
    results: list[Result] = []
    slower = False
    arguments = make_parser().parse_args(argv)
    if arguments.compare:
        text, slower = _compare(arguments)
    elif arguments.history:
        text = _history(arguments)
    else:
        text, results = _results(arguments)
    if text is not None and arguments.format == "table" and not arguments.output:
        terminal.print_text(text, console())
    elif text is not None:
        write(text, arguments.output)
    bad = sum(r.verdict.bad for r in results)
    if any(r.run.label != "published" for r in results):
        print(
            f"{counted(len(results), 'run')}: {len(results) - bad} without fault, "
            f"{bad} failed, interrupted, incomplete or slow",
            file=sys.stderr,
        )
    return int(slower or bad > 0)
