"""The command `jaxbench`, or `python -m jaxbench`. It finds the command that you mean, checks its
options before JAX is loaded, and runs it."""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from jaxbench.base import jax_variables, terminal
from jaxbench.base.errors import RecipeError
from jaxbench.base.versions import versions
from jaxbench.xla import flags


@dataclass(frozen=True)
class Command:
    """A command: the module of its options (`make_parser`), the module of its `main`, and what it
    does.

    With `prints`, the command only prints, and ends quietly when a pipe closes, as in `jaxbench
    list | head`. With `jax`, the variables of JAX and XLA are checked first. `first` is a module
    with a function `prepare`, which gets the command line before JAX is imported.
    """

    options: str
    module: str
    does: str
    prints: bool = True
    jax: bool = True
    first: str = ""


COMMANDS = {
    "list": Command(
        "recipe.listing", "recipe.listing",
        "every recipe with its rows, forecasts and published steps", jax=False,
    ),
    "train": Command("run.arguments", "run.command", "run a benchmark", prints=False),
    "plan": Command(
        "plan.arguments", "plan.command", "compile a benchmark for GPUs that are not here: does it "
        "fit, how long will it take?", first="plan.stubs",
    ),
    "compare": Command(
        "plan.compare_arguments", "plan.compare_gpus", "compare GPUs that are not here for one "
        "model: days, cost and energy, with failures", first="plan.stubs",
    ),
    "report": Command(
        "report.command", "report.command", "compare results with published ones", jax=False
    ),
    "jobs": Command(
        "cluster.jobs", "cluster.jobs",
        "jobs of launch/submit.sh: list, status, log, cancel", jax=False,
    ),
    "check": Command(
        "check.arguments", "check.command", "is every GPU, link and node as fast as it should be?",
        prints=False,
    ),
    "qualify": Command(
        "check.qualify_options", "check.qualify",
        "check the nodes of a Slurm cluster, alone, in pairs and together", prints=False, jax=False,
    ),
    "calibrate": Command(
        "calibrate.arguments", "calibrate.command", "measure this machine's GPUs for forecasts",
        prints=False,
    ),
}  # fmt: skip

EXAMPLES = """
    jaxbench list llama --gpu gb200
    jaxbench train --config llama2_70b_bf16
    jaxbench plan --config llama2_70b_bf16 --gpus 64
    jaxbench report results/
    jaxbench plan --help
"""


def make_parser() -> terminal.Parser:
    """The parser of all commands, which lists them."""
    parser = terminal.Parser(
        prog="jaxbench",
        description="LLM training benchmarks in pure JAX, with one recipe per model, size and "
        "precision. Runs them on GPUs, plans them without one, and compares results with "
        "published figures.",
        examples=EXAMPLES,
    )
    parser.add_argument(
        "--version", action="store_true", help="show the versions that decide results"
    )
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        parser_of_command = options_of(command)
        commands.add_parser(
            name, help=command.does, description=parser_of_command.description or "",
            parents=[parser_of_command], add_help=False,
        )  # fmt: skip
    return parser


def options_of(command: Command) -> terminal.Parser:
    """The parser of one command."""
    return import_module(f"jaxbench.{command.options}").make_parser()


def version() -> str:
    """The version of this program and of what it was installed with, on one line."""
    found = versions()
    return ", ".join(f"{name} {found[name]}" for name in found if found[name] and name != "source")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns its exit status, or 2 for a mistake in the command line."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if words[:1] == ["--version"]:
        print(version())
        return 0
    try:
        if not words or words[0] not in COMMANDS:
            make_parser().parse_args(words[:1] or ["--help"])  # raises, or exits after the help
        command = COMMANDS[words[0]]
        options_of(command).parse_args(words[1:])
        if command.first:
            import_module(f"jaxbench.{command.first}").prepare(words[1:])
        if command.jax:
            flags.check(os.environ.get("XLA_FLAGS", ""))
            jax_variables.check_environment()
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if command.prints:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return import_module(f"jaxbench.{command.module}").main(words[1:])


if __name__ == "__main__":
    sys.exit(main())
