"""Options of `jaxbench qualify`. Needs no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxbench.base.terminal import Parser
from jaxbench.recipe.checks import positive

EXAMPLES = """
    jaxbench qualify --nodes 'n[1-256]' --gres 8
    jaxbench qualify --partition batch --account physics --output handover --wait 60
    jaxbench qualify --nodes 'n[1-32]' --minutes 60 --row llama31_8b_fp8
    jaxbench qualify --nodes 'n[1-4]' \\
        --on-fail 'scontrol update nodename=$NODE state=drain reason="$EVIDENCE"'
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a command line, as `--help` documents them."""

    nodes: str | None
    partition: str | None
    account: str | None
    gpus_per_node: int
    gres: int | None
    srun: list[str]
    cpu_devices: int | None
    output: Path
    wait: int
    limit: int
    minutes: int | None
    row: list[str]
    on_fail: str | None

    @property
    def devices_per_node(self) -> int:
        """The GPUs of a node, or its CPU devices in a rehearsal."""
        return self.cpu_devices or self.gpus_per_node


def make_parser() -> Parser:
    """The parser of all options; `--help` documents them."""
    parser = Parser(
        prog="jaxbench qualify", examples=EXAMPLES,
        description="Checks the nodes of a Slurm cluster: each by itself, then pairs of them, then "
        "2, 4, 8 and so on together, and at last all, each with jaxbench check in a job of its "
        "own. Then it runs benchmarks that you name. Ends with a table of nodes and an acceptance "
        "page. The same command continues where it was interrupted.",
    )  # fmt: skip
    add = parser.add_argument_group("which nodes").add_argument
    add("--nodes", metavar="LIST", help="nodes in Slurm's notation: n[1-8,12]")
    add("--partition", help="Slurm's partition; without --nodes, all of its nodes")
    add("--account", help="Slurm's account")
    add(
        "--gpus-per-node", type=int, default=8, metavar="N",
        help="GPUs and processes of a node (default 8)",
    )  # fmt: skip
    add("--gres", type=int, metavar="N", help="GPUs to ask for where they are a generic resource")
    add(
        "--srun", action="append", default=[], metavar="KEY=VALUE",
        help="any other option of srun: qos=high",
    )  # fmt: skip
    add("--cpu-devices", type=int, metavar="N", help="rehearse with N CPU devices on each node")
    add = parser.add_argument_group("how").add_argument
    add(
        "--output", type=Path, default=Path("qualify"), metavar="FOLDER",
        help="folder for qualify.json and the records of all checks, which all nodes share; checks "
        "that it has already are not repeated (default qualify)",
    )  # fmt: skip
    add(
        "--wait", type=int, default=10, metavar="MINUTES",
        help="how long to wait for nodes that are busy (default 10)",
    )  # fmt: skip
    add(
        "--limit", type=int, default=10, metavar="MINUTES",
        help="time limit of a check (default 10)",
    )  # fmt: skip
    add(
        "--minutes", type=int, metavar="N",
        help="also load all GPUs for N minutes, in each node and in all nodes together, and "
        "compare the counters of errors before and after",
    )  # fmt: skip
    add(
        "--row", action="append", default=[], metavar="ROW",
        help="a benchmark to run last on nodes that pass, as options of launch/submit.sh: "
        "'llama31_8b_fp8 --gpus 16'; without --gpus the largest row for these nodes",
    )  # fmt: skip
    add(
        "--on-fail", metavar="COMMAND",
        help="a shell command to run once for each node that fails, with the variables NODE, CAUSE "
        "and EVIDENCE",
    )  # fmt: skip
    return parser


def parse_options(argv: Sequence[str] | None) -> Options:
    """The options of a command line. Raises RecipeError."""
    options = Options(**vars(make_parser().parse_args(argv)))
    positive("--", options, "gpus_per_node", "gres", "cpu_devices", "wait", "limit", "minutes")
    return options
