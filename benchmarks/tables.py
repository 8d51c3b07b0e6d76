"""Writes tables into documents, below the line `MARK`. As a command it writes what rests on the
table of all plans, docs/plan.md and README's picture:

    jaxbench plan --all --output jaxbench/recipe && python benchmarks/tables.py
"""

import csv
import io
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import gpus_picture  # noqa: E402

from jaxbench.base.files import write_whole  # noqa: E402
from jaxbench.recipe import listing, planned  # noqa: E402

MARK, END = "<!-- table -->", "<!-- end of the table -->"

TEXTS = ("recipe", "GPU", "fits", "mesh", "planned")
"""Columns of the table of all plans that are not figures."""


def line(cells: Iterable[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def table(heading: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table, from the cells of its rows."""
    return [line(heading), "|" + "---|" * len(heading), *map(line, rows), ""]


def replace_table(document: Path, table: str, mark: str = MARK) -> None:
    """Replaces what is below a mark in a document, up to `END` if that follows."""
    before, found, rest = document.read_text().partition(mark)
    assert found, f"{document} has no line {mark}"
    after = "".join(rest.partition(END)[1:])
    write_whole(document, f"{before}{mark}\n\n{table.rstrip()}\n{after and chr(10) + after}")


Key = tuple[str, str, str]
"""Recipe, GPU and number of GPUs, as the table of all plans has them."""


def key(line: dict[str, str]) -> Key:
    """The row of a line."""
    return line["recipe"], line["GPU"], line["GPUs"]


def kept(path: Path) -> dict[Key, dict[str, str]]:
    """The lines of a CSV file with a line for each of some rows; none if there is no such file."""
    if not path.is_file():
        return {}
    with path.open() as file:
        return {key(line): line for line in csv.DictReader(file)}


def keep(path: Path, line: dict[str, str]) -> None:
    """Writes the line of a row into such a file, which has the order of the table of all plans."""
    lines = kept(path) | {key(line): line}
    order = [key(plan) for plan in planned.read()[1]]
    text = io.StringIO()
    writer = csv.DictWriter(text, line, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines[row] for row in sorted(lines, key=order.index))
    write_whole(path, text.getvalue())


def plans() -> str:
    """The table of all plans as Markdown, above its comments. First the columns that most readers
    look for: the site hides the others until they are asked for."""
    comments, lines = planned.read()
    rows = {(row.recipe, row.gpu.name.lower(), str(row.gpus)): row for row in listing.rows()}
    table = []
    for plan in lines:
        row = rows[plan["recipe"], plan["GPU"], plan["GPUs"]]
        first = {
            "recipe": plan["recipe"],
            "GPU": row.gpu.name,
            "GPUs": plan["GPUs"],
            "tokens/s per GPU": f"{row.forecast:,.0f}",
            "forecast / published": f"{row.ratio:.2f}" if row.ratio else "",
            "fits": plan["fits"],
        }
        table.append(first | {name: plan[name] for name in plan if name not in first})
    rule = "|".join(["", *("---" if name in TEXTS else "---:" for name in table[0]), ""])
    cells = [line(row.values()) for row in table]
    return "\n".join([line(table[0]), rule, *cells, "", *comments])


if __name__ == "__main__":
    replace_table(ROOT / "docs/plan.md", plans())
    write_whole(ROOT / "docs/gpus.svg", gpus_picture.picture())
