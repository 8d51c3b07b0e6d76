"""The command line of `python -m jaxbench.report`: runs beside what is published for them, and an
exit status for a gate."""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from jaxbench.errors import RecipeError
from jaxbench.files import write_whole
from jaxbench.recipe import flops, published
from jaxbench.recipe.window import WINDOWS, window
from jaxbench.report import folders, formats, history, logs, page
from jaxbench.report.compare import compare
from jaxbench.report.found import Found, Result, Steps, Window, result


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The arguments; `--help` is their documentation."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxbench.report",
        description="Results of runs beside the published ones. Reads our result folders and the "
        "logs of the published scripts, at any depth. The status is 1 when a run failed, is "
        "incomplete or is slow: below 95 % of the published throughput.",
    )
    add = parser.add_argument
    add(
        "results", nargs="*", type=Path, metavar="RESULTS",
        help="folders or logs; or published.csv, for the published figures themselves",
    )  # fmt: skip
    add(
        "--compare", nargs=2, type=Path, metavar=("A", "B"),
        help="two runs, or folders of repeats: the ratio of their step times with its confidence "
        "interval, and what differs; status 1 when B is slower by more than the threshold",
    )  # fmt: skip
    add(
        "--history", type=Path, metavar="FOLDER",
        help="runs of many dates: where the step time of each row changed, and what with it",
    )  # fmt: skip
    add(
        "--threshold", type=float, default=2.0, metavar="PERCENT",
        help="of --compare and --history: smaller changes are none (default 2)",
    )  # fmt: skip
    add(
        "--format", choices=[*formats.TEXTS, "html"], default="table",
        help="default table; html is a page for people, whole in one file",
    )  # fmt: skip
    add("--output", type=Path, metavar="FILE", help="write there instead of to the terminal")
    add(
        "--window", metavar="NAME", default=None,
        help="iterations that count: published (11 to 44), newer (35 to 44, as later releases "
        "have it), or first:last; default published, of a shorter run its last half",
    )  # fmt: skip
    add("--flops", choices=flops.CONVENTIONS, default="published", help="how FLOPs are counted")
    add("--no-gate", action="store_true", help="status 0 whatever the verdicts")
    return parser.parse_args(argv)


LOGS = (".out", ".log", ".txt")
NO_LOGS = ("sbatch_", "vboost")
"""Suffixes of logs, and beginnings of the names of others beside them."""

CHECKPOINTS = "checkpoints"


def find(path: Path) -> Iterator[Found]:
    """The runs at a path, in the order of their names. Raises RecipeError for a missing one, and
    for a file that is none."""
    if path.suffix == ".csv" and path.is_file():
        yield from tables(path)
    elif path.is_file():
        if (found := _log(path)) is None:
            raise RecipeError(f"{path}: neither a log of a published script nor one of its name")
        yield found
    elif path.is_dir():
        yield from _below(path, set())
    else:
        raise RecipeError(f"{path}: no such file or folder")


def _below(folder: Path, seen: set[Path]) -> Iterator[Found]:
    """The runs in a folder and below it, each once, whatever links lead there. In the folder of a
    run of ours its own logs are none."""
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    ours = folders.is_run(folder)
    if ours:
        yield folders.read(folder)
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        yield _unreadable(folder, error)
        return
    for child in children:
        if child.is_dir() and child.name != CHECKPOINTS:
            yield from _below(child, seen)
        elif not ours and _is_log(child) and child.resolve() not in seen:
            seen.add(child.resolve())
            if (found := _log(child)) is not None:
                yield found


def _is_log(path: Path) -> bool:
    return path.suffix in LOGS and not path.name.startswith(NO_LOGS) and path.is_file()


def _log(path: Path) -> Found | None:
    try:
        return logs.read(path)
    except OSError as error:
        return _unreadable(path, error)


def _unreadable(path: Path, error: OSError) -> Found:
    return Found(
        path=path, source="", recipe=path.name, gpus=None, dtype=None, label="", steps=Steps(),
        failed=f"it cannot be read: {error.strerror}",
    )  # fmt: skip


def tables(path: Path) -> Iterator[Found]:
    """The published rows, as runs of one iteration."""
    for row in published.read(path):
        steps = Steps(expected=1)
        steps.add(0, row.step_time_s, 0.0)
        errata = f" ({', '.join(row.errata)})" if row.errata else ""
        yield Found(
            path=path, source="published", recipe=f"{row.title}{errata}",
            gpus=row.gpus, dtype=row.dtype, label="published", steps=steps,
            model=row.title,
            tokens=row.tokens_per_step, flops={"published": row.flops_per_gpu},
            peak_tflops=row.gpu.tflops[row.dtype], published=asdict(row),
            not_comparable=["the published figure itself"],
        )  # fmt: skip


def chosen_window(text: str | None, found: Found) -> Window:
    """The iterations that count. Raises RecipeError for a name or a span that is none."""
    if text is None:
        return window(found.steps.expected or len(found.steps.seconds) or 1)
    if text in WINDOWS:
        return WINDOWS[text]
    if (match := re.fullmatch(r"(\d+):(\d+)", text)) and int(match[1]) <= int(match[2]):
        return int(match[1]), int(match[2])
    raise RecipeError(f"--window {text}: expected {', '.join(WINDOWS)}, or first:last as in 11:44")


def report(paths: list[Path], window: str | None) -> list[Result]:
    """The results of all runs that are found, by recipe, GPUs and place. Raises RecipeError where
    there is none."""
    results = [
        result(found, chosen_window(window, found)) for path in paths for found in find(path)
    ]
    if not results:
        raise RecipeError(f"no run in {', '.join(map(str, paths))}")
    return sorted(results, key=_order)


def _order(r: Result) -> tuple[str, str, int, str]:
    """By recipe without its row or errata, then by numbers."""
    name = re.split(r"[:(]", r.found.recipe)[0].strip()
    return name, r.found.dtype or "", r.found.gpus or 0, r.found.recipe


def _check(arguments: argparse.Namespace, name: str, *formats: str) -> None:
    """Raises RecipeError for arguments that --compare or --history do not go with."""
    if arguments.results or not 0 < arguments.threshold < 100:
        raise RecipeError(f"{name} takes a threshold between 0 and 100 %, and no RESULTS")
    if arguments.format not in formats:
        raise RecipeError(f"{name} has no --format {arguments.format}: {', '.join(formats)}")


def _compare(arguments: argparse.Namespace) -> int:
    _check(arguments, "--compare", "table", "json")
    a, b = (report([path], arguments.window) for path in arguments.compare)
    found = compare(a, b, arguments.threshold / 100)
    text = formats.as_json(asdict(found)) if arguments.format == "json" else found.text()
    _out(text, arguments.output)
    return int(found.verdict == "slower" and not arguments.no_gate)


def _history(arguments: argparse.Namespace) -> int:
    _check(arguments, "--history", "table", "json", "html")
    threshold = arguments.threshold / 100
    rows = history.history(report([arguments.history], arguments.window), threshold)
    match arguments.format:
        case "html":
            text = page.history_page(rows, threshold)
        case "json":
            text = history.as_json(rows)
        case _:
            text = history.text(rows, threshold)
    _out(text, arguments.output)
    return 0


def _out(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="")
    else:
        write_whole(output, text)


def main(argv: list[str] | None = None) -> int:
    """Prints or writes the report; returns the exit status."""
    arguments = parse_arguments(argv)
    try:
        if arguments.compare:
            return _compare(arguments)
        if arguments.history:
            return _history(arguments)
        if not arguments.results:
            raise RecipeError("RESULTS are needed, or --compare A B, or --history FOLDER")
        results = report(arguments.results, arguments.window)
        lines = [formats.line(r, arguments.flops) for r in results]
        if arguments.format == "html":
            _out(page.page(results, arguments.flops), arguments.output)
        elif arguments.format == "table" and arguments.output is None:
            width = max(Console().width, formats.PLAIN_WIDTH)
            formats.print_table(lines, Console(width=width))
        else:
            _out(formats.TEXTS[arguments.format](lines), arguments.output)
    except (RecipeError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bad = [r for r in results if r.verdict.bad]
    print(
        f"{len(results)} runs: {len(results) - len(bad)} without fault, {len(bad)} failed, "
        "incomplete or slow",
        file=sys.stderr,
    )
    return int(bool(bad) and not arguments.no_gate)
