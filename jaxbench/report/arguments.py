"""Options of `jaxbench report`."""

from pathlib import Path

from jaxbench.base.terminal import Parser
from jaxbench.recipe import flops
from jaxbench.report import formats

EXAMPLES = """
    jaxbench report results/                                  every run below a folder
    jaxbench report results/ --format html --output report.html
    jaxbench report --compare before/ after/                  is it slower, and what differs
    jaxbench report --history results/                        when did a row change
"""


def make_parser() -> Parser:
    """The parser of all options; `--help` documents them."""
    parser = Parser(
        prog="jaxbench report", examples=EXAMPLES,
        description="Compares runs with published ones. Reads our result folders and the logs of "
        "the published scripts, at any depth. The exit status is 1 if a run failed, is incomplete, "
        "or is slow, which means below 95 % of the published throughput.",
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
