"""The options of `python -m jaxbench.train`, and what can be wrong with them by themselves.

Nothing here needs JAX: `launch/submit.py` checks the options of a job with it, on a login node.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxbench.errors import RecipeError
from jaxbench.recipe.checks import positive
from jaxbench.recipe.settings import STEPS


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are RecipeError: one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would print."""
        raise RecipeError(message)


def make_parser() -> Parser:
    """The options; `--help` is their documentation."""
    parser = Parser(prog="python -m jaxbench.train", description="Runs one training benchmark.")
    add = parser.add_argument
    add("--config", required=True, help="recipe file or name, such as llama2_70b_bf16")
    add("--gpus", type=int, help="fail unless the job has exactly this many GPUs")
    add(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="change a setting of the row: parallelism.fsdp=4",
    )  # fmt: skip
    add(
        "--steps", type=int,
        help=f"optimizer steps (default {STEPS}, as published; with --restore one more than it "
        "has)",
    )  # fmt: skip
    add("--seed", type=int, default=0, help="seed of weights and tokens")
    add(
        "--output", type=Path,
        help="new folder for the records (default results/<recipe>/<row>/<time>)",
    )  # fmt: skip
    add("--cpu-devices", type=int, metavar="N", help="use N virtual CPU devices, to try a mesh")
    add(
        "--local-devices", type=int, metavar="N",
        help="fail, naming the node, where a process does not see exactly N devices",
    )  # fmt: skip
    add_saving(parser)
    add_observation(parser)
    return parser


def add_saving(parser: argparse.ArgumentParser) -> None:
    """Options that save, resume and watch a run."""
    add = parser.add_argument_group("save and resume").add_argument
    add("--checkpoint", action="store_true", help="save at the end, and when a signal stops it")
    add("--checkpoint-every", type=int, metavar="N", help="save every N steps too")
    add("--keep", type=int, default=2, metavar="K", help="checkpoints that stay (default 2)")
    add(
        "--resume", action="store_true",
        help="continue the run in --output from its last checkpoint, or begin it",
    )  # fmt: skip
    add(
        "--restore", type=Path, metavar="PATH",
        help="start from this checkpoint, or from the last one of this run",
    )  # fmt: skip
    add(
        "--watchdog", type=float, metavar="SECONDS",
        help="end the job when a process gives no sign of life, or completes no step, for so long",
    )  # fmt: skip


def add_observation(parser: argparse.ArgumentParser) -> None:
    """Options that look into a run, and exclude each other."""
    add = parser.add_argument_group("profile").add_argument
    add("--profile", choices=("jax", "nsys"), help="profile some steps")
    add(
        "--profile-steps", type=profile_steps, default=(20, 25), metavar="FIRST-STOP",
        help="from before step FIRST to before step STOP (default 20-25)",
    )  # fmt: skip
    add(
        "--profile-ranks", default="0,1,2,3,4,5,6,7", metavar="N,N", type=ranks,
        help="processes that are profiled (default 0 to 7)",
    )  # fmt: skip
    add("--nccl-trace", action="store_true", help="let NCCL write what it does")
    add(
        "--pgle", action="store_true",
        help="profile some steps, compile again with their times (profile-guided latencies), train",
    )  # fmt: skip
    add(
        "--check-repeatable", action="store_true",
        help="first run some steps twice, and fail unless losses and state are equal bit for bit",
    )  # fmt: skip
    add(
        "--compilation-cache", type=Path, metavar="FOLDER",
        help="keep compiled programs here; safe for all processes of all jobs",
    )  # fmt: skip


def profile_steps(text: str) -> tuple[int, int]:
    """`20-25` as numbers."""
    first, last = map(int, text.split("-"))
    if not first < last:
        raise ValueError
    return first, last


def ranks(text: str) -> tuple[int, ...]:
    """`0,1` as numbers."""
    return tuple(map(int, text.split(",")))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of the command. Raises RecipeError."""
    return make_parser().parse_args(argv)


def given(texts: Sequence[str]) -> dict[str, Any]:
    """The options that stand in `texts`, by their names in the namespace, without any default.
    Raises RecipeError for what is no option of `train`, or no value of one."""
    nothing = argparse.Namespace(**dict.fromkeys(names()))
    args = make_parser().parse_args(["--config", "", *texts], nothing)
    return {name: value for name, value in vars(args).items() if value not in (None, "")}


def names() -> list[str]:
    """All options by their names in the namespace."""
    return list(vars(parse_arguments(["--config", ""])))


def as_texts(options: Mapping[str, Any]) -> list[str]:
    """The command line of options as `given` has them."""
    joined = {"profile_steps": "-", "profile_ranks": ","}
    texts: list[str] = []
    for name, value in options.items():
        if name in joined:
            value = joined[name].join(map(str, value))
        for item in value if isinstance(value, list) else [value]:
            texts += [flag(name)] if item is True else [flag(name), str(item)]
    return texts


def flag(name: str) -> str:
    """`--checkpoint-every` for `checkpoint_every`."""
    return "--" + name.replace("_", "-")


def check_arguments(args: argparse.Namespace) -> None:
    """Raises RecipeError for values that are impossible and for options that exclude each other."""
    positive(
        "--", args, "steps", "cpu_devices", "local_devices", "checkpoint_every", "keep", "watchdog"
    )
    observations = {"--profile": args.profile, "--nccl-trace": args.nccl_trace, "--pgle": args.pgle}
    chosen = [name for name, value in observations.items() if value]
    if len(chosen) > 1:
        raise RecipeError(f"{' and '.join(chosen)} exclude each other")
    if args.profile and args.profile_steps[0] >= (args.steps or STEPS):
        raise RecipeError(f"--profile-steps {args.profile_steps[0]} is beyond the last step")
    if args.resume and args.output is None:
        raise RecipeError("--resume needs --output, the folder of the run to continue")
