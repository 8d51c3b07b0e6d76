"""Options of `jaxbench check`. Needs no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxbench.base.terminal import Parser
from jaxbench.recipe.checks import positive

FILE = "check.json"

EXAMPLES = """
    jaxbench check
    jaxbench check --cpu-devices 4 --output check
    srun -A ACCOUNT -p PARTITION --gres=gpu:8 -N 2 --ntasks-per-node=8 jaxbench check
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a command line, as `--help` documents them."""

    output: Path
    minutes: int | None
    sizes: bool
    cpu_devices: int | None
    local_devices: int | None


def make_parser() -> Parser:
    """The parser of all options; `--help` documents them."""
    parser = Parser(
        prog="jaxbench check", examples=EXAMPLES,
        description="Measures each GPU and link of this job, asks the driver and the system, and "
        "names what is slow or broken. Runs in one process, or in all processes of a job.",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, default=Path("."), metavar="FOLDER",
        help="folder for check.json and for files that test the file system; name one that the job "
        "uses, and no other check or run at the same time (default .)",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=int, metavar="N",
        help="then load all GPUs for N minutes with matmuls and collectives, and compare the "
        "counters of errors before and after",
    )  # fmt: skip
    parser.add_argument(
        "--sizes",
        action="store_true",
        help="also measure collectives over all GPUs by size, from 8 B to 8 GiB",
    )
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--cpu-devices", type=int, metavar="N", help="try the check on N virtual CPU devices"
    )
    group.add_argument("--local-devices", type=int, metavar="N",
        help="fail, and name the node, if a process does not see exactly N devices")  # fmt: skip
    return parser


def parse_options(argv: Sequence[str] | None) -> Options:
    """The options of a command line. Raises RecipeError."""
    options = Options(**vars(make_parser().parse_args(argv)))
    positive("--", options, "cpu_devices", "local_devices", "minutes")
    return options
