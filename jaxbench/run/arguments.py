"""Options of `jaxbench train` and their checks.

Needs no JAX: `launch/submit.py` checks the options of a job on a login node.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxbench.base.errors import RecipeError
from jaxbench.base.terminal import Parser
from jaxbench.recipe.checks import positive
from jaxbench.recipe.settings import SMOKE_STEPS, STEPS

KEEP = 2
"""The number of checkpoints that a run keeps by default."""

PROFILED_RANKS = tuple(range(8))
"""The processes that are profiled by default. A smaller job profiles those that it has."""

EXAMPLES = """
    jaxbench train --config llama2_70b_bf16                      without a GPU: the smoke row
    jaxbench train --config llama31_8b_bf16 --gpus 8             the row for 8 GPUs
    jaxbench train --config llama31_8b_bf16 --steps 20 --cpu-devices 8 \\
        --set parallelism.fsdp=4 --set parallelism.tensor=2      a mesh of 8 CPU devices
    jaxbench train --config llama31_8b_bf16 --output run --checkpoint-every 50 --resume
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a command line, as `--help` documents them; None where a default depends on
    the run."""

    config: str
    gpus: int | None
    set: list[str]
    steps: int | None
    seed: int
    output: Path | None
    cpu_devices: int | None
    local_devices: int | None
    checkpoint: bool
    checkpoint_every: int | None
    keep: int | None
    resume: bool
    restore: Path | None
    watchdog: float | None
    profile: str | None
    profile_steps: tuple[int, int]
    profile_ranks: tuple[int, ...]
    nccl_trace: bool
    pgle: bool
    check_repeatable: bool
    tune_kernels: bool
    compilation_cache: Path | None


# fmt: off
def make_parser() -> Parser:
    """The parser of all options; `--help` documents them."""
    parser = Parser(
        prog="jaxbench train", examples=EXAMPLES, allow_abbrev=False,
        description="Runs one training benchmark on the devices of this job.",
    )
    add = parser.add_argument_group("what to run").add_argument
    add("--config", required=True, help="recipe file or name, such as llama2_70b_bf16")
    add("--gpus", type=int, help="fail unless the job has exactly this many GPUs")
    add("--set", action="append", default=[], metavar="KEY=VALUE",
        help="change a setting of the row: parallelism.fsdp=4")
    add("--steps", type=int,
        help=f"optimizer steps (default {STEPS}, as published, or {SMOKE_STEPS} for a smoke row "
        "without --profile; with --restore, one more than the checkpoint has)")
    add("--seed", type=int, default=0, help="seed of weights and tokens")
    add("--output", type=Path,
        help="new folder for the records (default results/<recipe>/<row>/<time>)")
    add = parser.add_argument_group("devices").add_argument
    add("--cpu-devices", type=int, metavar="N", help="use N virtual CPU devices, to try a mesh")
    add("--local-devices", type=int, metavar="N",
        help="fail, and name the node, if a process does not see exactly N devices")
    add_saving(parser)
    add_profiling(parser)
    return parser


def add_saving(parser: argparse.ArgumentParser) -> None:
    """Options that save, resume and watch a run."""
    add = parser.add_argument_group("save and resume").add_argument
    add("--checkpoint", action="store_true", help="save at the end, and if a signal stops the run")
    add("--checkpoint-every", type=int, metavar="N", help="also save every N steps")
    add("--keep", type=int, metavar="K", help=f"checkpoints to keep (default {KEEP})")
    add("--resume", action="store_true",
        help="continue the run in --output from its last checkpoint; begin it if there is none")
    add("--restore", type=Path, metavar="PATH",
        help="start from this checkpoint, or from the last checkpoint of this run")
    add("--watchdog", type=float, metavar="SECONDS",
        help="end the job after this time without progress; the limit is ten times as long before "
        "training and while the run saves")


def add_profiling(parser: argparse.ArgumentParser) -> None:
    """Options of profiles, traces and checks, and of the compilation cache."""
    add = parser.add_argument_group("profile").add_argument
    add("--profile", choices=("jax", "nsys"), help="profile some steps")
    add("--profile-steps", type=profile_steps, default=(20, 25), metavar="FIRST-STOP",
        help="the first step of the profile, and the first step after it (default 20-25)")
    add("--profile-ranks", default=PROFILED_RANKS, metavar="N,N", type=ranks,
        help="processes that are profiled (default 0 to 7)")
    add("--nccl-trace", action="store_true", help="let NCCL write a trace of what it does")
    add("--pgle", action="store_true",
        help="profile some steps, compile again with their latencies, then train")
    add("--check-repeatable", action="store_true",
        help="first run some steps twice, and fail unless losses and state are bitwise equal")
    add("--tune-kernels", action="store_true",
        help="first time the candidate sizes of our Pallas kernels on the GPUs; the compilation "
        "cache keeps the choice")
    add("--compilation-cache", type=Path, metavar="FOLDER",
        help="keep compiled programs and results of autotuning in this folder; it must belong to "
        "you alone, and all processes of all your jobs can use it")
# fmt: on


def profile_steps(text: str) -> tuple[int, int]:
    first, last = map(int, text.split("-"))
    if not first < last:
        raise ValueError
    return first, last


def ranks(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def parse_arguments(argv: Sequence[str] | None) -> Options:
    """The options of a command line, with defaults. Raises RecipeError."""
    return Options(**vars(make_parser().parse_args(argv)))


def given(texts: Sequence[str]) -> dict[str, Any]:
    """The options in `texts` by attribute name, without defaults. Raises RecipeError for an unknown
    option or a bad value."""
    names = (field.name for field in fields(Options))
    unset = argparse.Namespace(**dict.fromkeys(names))  # argparse adds no default to these
    args = make_parser().parse_args(["--config", "", *texts], unset)
    return {name: value for name, value in vars(args).items() if value not in (None, "")}


def as_texts(options: Mapping[str, Any]) -> list[str]:
    """The command line of options that `given` returned."""
    separators = {"profile_steps": "-", "profile_ranks": ","}
    texts: list[str] = []
    for name, value in options.items():
        if name in separators:
            value = separators[name].join(map(str, value))
        for item in value if isinstance(value, list) else [value]:
            texts += [flag(name)] if item is True else [flag(name), str(item)]
    return texts


def flag(name: str) -> str:
    """`--checkpoint-every` for `checkpoint_every`."""
    return "--" + name.replace("_", "-")


def check_arguments(options: Options) -> None:
    """Raises RecipeError for impossible values and for options that exclude each other."""
    counts = "steps", "cpu_devices", "local_devices", "checkpoint_every", "keep", "watchdog"
    positive("--", options, *counts)
    used = [flag(name) for name in ("profile", "nccl_trace", "pgle") if getattr(options, name)]
    if len(used) > 1:
        raise RecipeError(f"{' and '.join(used)} exclude each other")
    if options.profile and options.profile_steps[0] >= (options.steps or STEPS):
        raise RecipeError(f"--profile-steps {options.profile_steps[0]} comes after the last step")
    if options.keep is not None and not options.checkpoint and options.checkpoint_every is None:
        raise RecipeError(f"--keep {options.keep} needs --checkpoint or --checkpoint-every")
    if options.resume and options.output is None:
        raise RecipeError("--resume needs --output, the folder of the run to continue")


def check_profiled(options: Options, processes: int) -> None:
    """Raises RecipeError for ranks to profile that the job does not have."""
    absent = [rank for rank in options.profile_ranks if not 0 <= rank < processes]
    if options.profile and absent and options.profile_ranks != PROFILED_RANKS:
        raise RecipeError(
            f"--profile-ranks {','.join(map(str, absent))}: the job has ranks 0 to {processes - 1}"
        )
