"""The command line of `python -m jaxbench.train`: arguments, and every mistake that can be found
before slow work."""

import argparse
import os
import sys
from pathlib import Path

import jax

from jaxbench.cluster import job
from jaxbench.errors import RecipeError
from jaxbench.hardware import MEMORY_FRACTION
from jaxbench.recipe import recipes
from jaxbench.recipe.checks import positive
from jaxbench.recipe.settings import STEPS, Run
from jaxbench.run import devices, profiling, session
from jaxbench.run.start import prepare
from jaxbench.train.program import check_run
from jaxbench.xla import flags


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The arguments; `--help` is their documentation."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxbench.train", description="Runs one training benchmark."
    )
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
    return parser.parse_args(argv)


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


def main(argv: list[str] | None = None) -> int:
    """The command; returns 0, 1 for a failed run, 2 for a user's mistake, or 128 + a signal."""
    args = parse_arguments(argv)
    try:
        recipe = recipes.load(args.config)
        overrides = recipes.parse_overrides(args.set)
        check_arguments(args)
        run, chosen = prepare(find_run(args, recipe, overrides), args)
    except (RecipeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if chosen is None:
        print(f"nothing to do: the run in {args.output} is completed")
        return 0
    return session.benchmark(run, chosen)


def check_arguments(args: argparse.Namespace) -> None:
    """Raises RecipeError for values that are impossible and for options that exclude each other."""
    positive(
        "--", args, "steps", "cpu_devices", "local_devices", "checkpoint_every", "keep", "watchdog"
    )
    observations = {"--profile": args.profile, "--nccl-trace": args.nccl_trace, "--pgle": args.pgle}
    chosen = [name for name, value in observations.items() if value]
    if len(chosen) > 1:
        raise RecipeError(f"{' and '.join(chosen)} exclude each other")
    if args.profile == "nsys":
        profiling.check_nsys()
    if args.profile and args.profile_steps[0] >= (args.steps or STEPS):
        raise RecipeError(f"--profile-steps {args.profile_steps[0]} is beyond the last step")
    if args.resume and args.output is None:
        raise RecipeError("--resume needs --output, the folder of the run to continue")


def find_run(
    args: argparse.Namespace, recipe: recipes.Recipe, overrides: tuple[recipes.Override, ...]
) -> Run:
    """Joins the job, and chooses the recipe's row for its devices. Raises RecipeError for what
    cannot run on them."""
    flags.check_environment(os.environ.get("XLA_FLAGS", ""))
    devices.select_platform(args.cpu_devices)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))
    job.join()
    if args.local_devices is not None:
        devices.check_local_devices(args.local_devices)
    count, platform = jax.device_count(), jax.devices()[0].platform
    if platform == "cpu" and args.cpu_devices is None and devices.has_nvidia_gpu():
        print("warning: JAX does not see this machine's GPU: pip install '.[gpu]'", file=sys.stderr)
    row = recipes.choose_row(recipe, platform, count, args.gpus)
    run = recipes.resolve(
        recipe, row, devices=count, overrides=overrides, steps=args.steps or STEPS, seed=args.seed
    )
    check_run(run, platform)
    if args.pgle and platform != "gpu":
        raise RecipeError("--pgle needs GPUs: a CPU has no latencies to hide")
    return run
