"""Writes tables into documents, below the line `MARK`. As a command it writes docs/plan.md from the
table of all plans, which `jaxbench plan --all` makes:

    jaxbench plan --all --output jaxbench/recipe && python benchmarks/tables.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from jaxbench.base.files import write_whole  # noqa: E402
from jaxbench.recipe import planned  # noqa: E402

MARK = "<!-- table -->"


def replace_table(document: Path, table: str) -> None:
    """Replaces all that is below `MARK` in a document."""
    before, mark, _ = document.read_text().partition(MARK)
    assert mark, f"{document} has no line {MARK}"
    write_whole(document, f"{before}{MARK}\n\n{table.rstrip()}\n")


def plans() -> str:
    """The table of all plans as Markdown, below its comments."""
    comments, lines = planned.read()
    return "\n".join(
        [
            *comments,
            "",
            f"| {' | '.join(lines[0])} |",
            f"|{'---|' * len(lines[0])}",
            *(f"| {' | '.join(line.values())} |" for line in lines),
        ]
    )


if __name__ == "__main__":
    replace_table(ROOT / "docs" / "plan.md", plans())
