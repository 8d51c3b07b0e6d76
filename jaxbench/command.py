"""The command line of `python -m jaxbench.train`: arguments, and every mistake that can be found
before slow work."""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxbench import environment, job, ops, profiling, recipes, session, xla_flags
from jaxbench.config import RecipeError, Run, positive
from jaxbench.session import Session
from jaxbench.systems import MEMORY_FRACTION

STEPS = 50
"""Optimizer steps of a run, as published."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The arguments; `--help` is their documentation."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxbench.train", description="Runs one training benchmark."
    )
    add = parser.add_argument
    add("--config", required=True, help="recipe file, such as configs/llama2_70b_bf16.yaml")
    add("--gpus", type=int, help="fail unless the job has exactly this many GPUs")
    add(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="change a setting of the row: parallelism.fsdp=4",
    )  # fmt: skip
    add(
        "--steps", type=int,
        help="optimizer steps (default 50, as published; with --restore one more than it has)",
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
    group = parser.add_argument_group("save and resume")
    add = group.add_argument
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
    add_observation(parser)
    return parser.parse_args(argv)


def add_observation(parser: argparse.ArgumentParser) -> None:
    """Options that look into a run, and exclude each other."""
    group = parser.add_argument_group("profile")
    add = group.add_argument
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
        xla_flags.check_environment(os.environ.get("XLA_FLAGS", ""))
        environment.select_platform(args.cpu_devices)
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))
        environment.join_job()
        if args.local_devices is not None:
            environment.check_local_devices(args.local_devices)
        devices, platform = jax.device_count(), jax.devices()[0].platform
        if platform == "cpu" and args.cpu_devices is None and environment.has_nvidia_gpu():
            print(
                "warning: JAX does not see this machine's GPU: pip install '.[gpu]'",
                file=sys.stderr,
            )
        row = recipes.choose_row(recipe, platform, devices, args.gpus)
        run = recipes.resolve(
            recipe, row, devices=devices, overrides=overrides, steps=args.steps or STEPS,
            seed=args.seed,
        )  # fmt: skip
        ops.fp8_implementation(run.precision)
        xla_flags.options(run, platform)
        if args.pgle and platform != "gpu":
            raise RecipeError("--pgle needs GPUs: a CPU has no latencies to hide")
        run, plan = prepare(run, args)
    except (RecipeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if plan is None:
        print(f"nothing to do: the run in {args.output} is completed")
        return 0
    return session.benchmark(run, plan)


def check_arguments(args: argparse.Namespace) -> None:
    """Raises RecipeError for values that are impossible and for options that exclude each other."""
    for name in ("steps", "cpu_devices", "local_devices", "checkpoint_every", "keep", "watchdog"):
        if getattr(args, name) is not None:
            positive(f"--{name.replace('_', '-')}", getattr(args, name))
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


def prepare(run: Run, args: argparse.Namespace) -> tuple[Run, Session | None]:
    """The run and its session with folder and checkpoint found; no session if the run is complete.

    The first process decides for all: the others may see another moment of a shared file system.
    """
    decided = json.loads(job.from_first("start", lambda: json.dumps(_decide(run, args))))
    if decided["completed"]:
        return run, None
    plan = Session(
        folder=Path(decided["folder"]),
        resume=args.resume,
        checkpoint=args.checkpoint or args.checkpoint_every is not None,
        checkpoint_every=args.checkpoint_every,
        keep=args.keep,
        restore=decided["restore"] and Path(decided["restore"]),
        watchdog=args.watchdog,
        profile=args.profile,
        profile_steps=args.profile_steps,
        profile_ranks=args.profile_ranks,
        nccl_trace=args.nccl_trace,
        pgle=args.pgle,
        compilation_cache=args.compilation_cache,
    )
    if plan.nccl_trace:
        profiling.trace_nccl(plan.folder)
    return replace(run, steps=decided["steps"]), plan


def _decide(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """What only one process may find out: folder, length of the run, and checkpoint."""
    folder = args.output or Path("results", run.recipe, run.row, time.strftime("%Y%m%d-%H%M%S"))
    there = (folder / "run.json").exists()
    if there and not args.resume:
        raise RecipeError(
            f"--output {folder} already holds a run; name another folder, or continue with --resume"
        )
    steps, restore = run.steps, None
    if args.restore is not None or args.resume:
        from jaxbench import checkpoint  # Orbax, which no other run needs

        if args.restore is not None:
            restore = checkpoint.find(args.restore)
            if args.steps is None:
                steps = int(restore.name) + 1
            if int(restore.name) >= steps:
                raise RecipeError(f"--steps {steps}: {restore} has as many already")
        if args.resume and checkpoint.steps(folder / checkpoint.FOLDER):
            restore = checkpoint.find(folder)
        if restore is not None:
            checkpoint.check(restore, recipes.describe(run))
    completed = there and _continues(folder / "run.json", replace(run, steps=steps))
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "folder": str(folder),
        "steps": steps,
        "restore": restore and str(restore),
        "completed": completed,
    }


def _continues(path: Path, run: Run) -> bool:
    """Whether the recorded run is complete. Raises RecipeError if it is another one: devices and
    mesh may change, the work may not."""

    def work(recipe: dict[str, Any]) -> dict[str, Any]:
        batch = {key: recipe["batch"][key] for key in ("global_batch", "sequence_length")}
        rest = ("recipe", "model", "precision", "optimizer", "steps", "seed")
        return {"batch": batch, **{key: recipe[key] for key in rest}}

    record = json.loads(path.read_text())
    theirs, ours = work(record["recipe"]), work(json.loads(json.dumps(recipes.describe(run))))
    differing = [key for key in ours if theirs[key] != ours[key]]
    if differing:
        raise RecipeError(f"--resume: {path} is another run: its {differing[0]} differs")
    return record["status"] == "completed"
