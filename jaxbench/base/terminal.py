"""What the commands share in a terminal: the parser of their options, and the console for
tables."""

import argparse
import re
import shlex
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from textwrap import dedent, fill, indent
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from jaxbench.base.errors import RecipeError, RunFailed, meant
from jaxbench.base.files import write_whole
from jaxbench.base.untrusted import printable

WIDTH = 200
"""Width in characters of a table that is not printed to a terminal."""

LABEL = r"[a-z][\w-]* {2,}|[a-z ]{1,10}: "
"""A pattern of what stands before the text of a line: `memory      peak`, `  trust: 90 %`."""

RUNNING: ContextVar[str] = ContextVar("RUNNING", default="jaxbench")
"""The command that runs, as its user typed it. Pages show it."""


class Parser(argparse.ArgumentParser):
    """A parser that raises a RecipeError of one line, without the usage. For a mistyped option or
    value the line names the nearest one. `examples` end its help."""

    def __init__(self, *, description: str, examples: str = "", **options: Any):
        if examples:
            options["epilog"] = "examples:\n" + indent(dedent(examples).strip(), "  ")
        super().__init__(
            description=fill(description, 79),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, and keeps the words for `error` and `RUNNING`."""
        self._words = [*(sys.argv[1:] if args is None else args)]
        RUNNING.set(shlex.join([*self.prog.split(), *map(str, self._words)]))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would print before it exits. An unknown option is reported before a
        missing one, since the user may have meant the missing one."""
        options = [name for action in self._actions for name in action.option_strings]
        end = self._words.index("--") if "--" in self._words else len(self._words)
        for at, word in enumerate(self._words[:end]):
            name = word.partition("=")[0]
            known = (o.startswith(name) if self.allow_abbrev else o == name for o in options)
            if name.startswith("--") and not any(known):
                rest = " ".join(self._words[at:end])
                raise RecipeError(f"unrecognized arguments: {rest}{meant(name, options)}")
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            # 'a100' is no slip for 'h100' but another GPU, and the message lists all choices.
            cutoff = 0.8 if re.search(r"\d", choice[1]) else 0.6
            message += meant(choice[1], re.findall(r"[^\s,']+", choice[2]), cutoff)
        raise RecipeError(message)


def command(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """Decorates the function of a command, which maps its words to an exit status. For a user's
    mistake, and for a file that cannot be read or written, it prints one line and returns 2."""

    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except (RecipeError, RunFailed, OSError) as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            return 2

    return run


def console() -> Console:
    """Standard output as a console of rich, for tables."""
    output = Console(highlight=False, markup=False, emoji=False)
    if not output.is_terminal:
        output.width = WIDTH
    return output


def plain_table(*texts: str, figures: Iterable[str] = ()) -> Table:
    """A table without lines: columns of texts, then columns of figures, by their headings."""
    grid = Table(*texts, box=None, pad_edge=False, header_style="bold")
    for heading in figures:
        grid.add_column(heading, justify="right")
    return grid


def folded(text: str, output: Console | None = None, label: str = LABEL) -> str:
    """The text with lines folded to the width of the terminal. A line continues below the text
    behind its `label`, or is indented by 4. Without a terminal lines stay whole, so that tools can
    search them."""
    output = output or Console()
    if not output.is_terminal:
        return text
    return "\n".join(_folded(line, output.width, label) for line in text.splitlines())


def _folded(line: str, width: int, label: str) -> str:
    found = re.match(rf" *({label})?", line)
    assert found
    below = found.end() if found[1] else found.end() + 4
    return fill(line, width, subsequent_indent=" " * below, break_on_hyphens=False)


@contextmanager
def live(what: str, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Shows an activity and its duration on stderr until it ends. Shows nothing if stderr is no
    terminal, or if this process is not to be `shown`. Yields a function that changes the text."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not (shown and console.is_terminal)
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda text: bar.update(task, description=text)


def check_folder(output: Path) -> None:
    """Raises RecipeError if the folder of the file `--output` is missing."""
    if not output.parent.is_dir():
        raise RecipeError(f"--output {output}: no such folder")


def write(text: str, path: Path | None) -> None:
    """Writes a whole file, or prints to standard output if there is no path."""
    if path is None:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    check_folder(path)
    if _is_stream(path):
        path.write_text(text)
    else:
        write_whole(path, text)


def _is_stream(path: Path) -> bool:
    """True for a device, a pipe, or a link in /dev, such as /dev/null and /dev/stdout. We write to
    these, and must not replace them by a file."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    link = stat.S_ISLNK(mode) and path.is_relative_to("/dev")
    return link or stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)
