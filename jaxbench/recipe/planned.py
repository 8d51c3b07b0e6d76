"""The table of all plans, `plan.csv`, which `jaxbench plan --all` wrote last: a line for each row,
and comments that say when and with which versions it was made."""

import csv
from pathlib import Path

PATH = Path(__file__).with_name("plan.csv")

ERRORS = "Errors of forecasts on programs that others timed: "
"""The comment with the errors of these forecasts begins with this."""


def read(path: Path = PATH) -> tuple[list[str], list[dict[str, str]]]:
    """The comments and the lines of a table. Raises OSError, ValueError or csv.Error."""
    text = path.read_text(encoding="utf-8-sig").splitlines()
    comments = [line.removeprefix("# ") for line in text if line.startswith("#")]
    return comments, [*csv.DictReader(line for line in text if not line.startswith("#"))]
