"""launch/submit.sh: one benchmark as one Slurm job.

Reads options and the published variables (docs/launch.md), checks them, and submits
launch/slurm.sbatch; DRY_RUN=true only prints it.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jaxbench  # noqa: E402
from jaxbench.errors import RecipeError  # noqa: E402
from jaxbench.recipe import recipes  # noqa: E402
from jaxbench.recipe.settings import STEPS, Run  # noqa: E402

PROFILED_STEPS = {"grok1": (20, 30, 50), "nemotron4": (20, 30, 50), "nemotronh": (45, 50, 50)}
"""First and last profiled step and run length by workload, as published; Llama's stand below."""
LLAMA_PROFILED_STEPS = (20, 25, 25)
TRACED_STEPS = 5
SAVE_SECONDS = 120
"""Slurm's notice before the time limit: long enough to save."""


@dataclass(frozen=True)
class Job:
    """What is submitted. `arguments` are those of `jaxbench.train`, `settings` are exported."""

    run: Run
    nodes: int
    processes_per_node: int
    time_limit: str
    results: Path
    arguments: tuple[str, ...]
    settings: Mapping[str, str]
    sbatch: tuple[str, ...]

    @property
    def name(self) -> str:
        """As the published experiments are named: model, size, precision, GPUs."""
        return f"{self.run.recipe}_{self.run.gpus}"

    def script(self) -> str:
        """The whole batch script."""
        options = (
            f"--job-name={self.name}", f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.processes_per_node}", f"--time={self.time_limit}",
            f"--output={self.results}/slurm-%j.out", "--open-mode=append", "--requeue",
            f"--signal=TERM@{SAVE_SECONDS}", *self.sbatch,
        )  # fmt: skip
        return "\n".join((
            "#!/usr/bin/env bash",
            *(f"#SBATCH {option}" for option in options),
            *(f"export {name}={shlex.quote(value)}" for name, value in self.settings.items()),
            f"arguments=({shlex.join(self.arguments)})",
            "",
            (ROOT / "launch" / "slurm.sbatch").read_text().partition("\n")[2],
        ))  # fmt: skip


class Variables:
    """Environment variables, with mistakes in them as RecipeError."""

    def __init__(self, environment: Mapping[str, str]):
        self._environment = environment

    def text(self, *names: str) -> str | None:
        """The value of the first variable that is set; the others must agree with it."""
        found = {name: value for name in names if (value := self._environment.get(name))}
        if len(set(found.values())) > 1:
            raise RecipeError(" and ".join(f"{n}={v}" for n, v in found.items()) + " contradict")
        return next(iter(found.values()), None)

    def flag(self, *names: str) -> bool:
        """A variable that is `true` or `false`, in any case of letters."""
        value = (self.text(*names) or "false").lower()
        if value not in ("true", "false"):
            raise RecipeError(f"{names[0]}={value}: expected true or false")
        return value == "true"

    def number(self, *names: str) -> int | None:
        """A whole number above zero."""
        value = self.text(*names)
        if value is not None and not (value.isdigit() and int(value) > 0):
            raise RecipeError(f"{names[0]}={value}: expected a whole number above 0")
        return None if value is None else int(value)


def recipe_path(config: str | None, variables: Variables) -> Path:
    """The recipe of the option, or of WORKLOAD, MODEL_SIZE and DTYPE, which must agree with it."""
    dtype = (variables.text("DTYPE") or "").lower() or None
    workload, size = variables.text("WORKLOAD"), variables.text("MODEL_SIZE")
    if config is None:
        if not (workload and size and dtype):
            raise RecipeError("name a recipe, or set WORKLOAD, MODEL_SIZE and DTYPE")
        return recipes.config_folder() / f"{workload}_{size}_{dtype}.yaml"
    path = Path(config).resolve()
    for name, value in (("WORKLOAD", workload), ("MODEL_SIZE", size), ("DTYPE", dtype)):
        if value and value not in path.stem.split("_"):
            raise RecipeError(f"{name}={value} contradicts the recipe {config}")
    return path


def stage_folder(variables: Variables, workload: str) -> Path:
    """The root of the results."""
    stage, install = variables.text("STAGE_PATH"), variables.text("LLMB_INSTALL")
    if stage and install:
        raise RecipeError("STAGE_PATH and LLMB_INSTALL are both set; use one")
    if install:
        stage = variables.text("LLMB_WORKLOAD") or f"{install}/workloads/pretrain_{workload}"
    if not stage:
        raise RecipeError("set STAGE_PATH (or LLMB_INSTALL) to a folder that all nodes share")
    return Path(stage).absolute()


def observation(
    variables: Variables, workload: str
) -> tuple[list[str], dict[str, str], int | None]:
    """(arguments, settings, run length or None) of profiling or of the NCCL trace."""
    profile = variables.flag("ENABLE_PROFILE")
    trace = variables.flag("ENABLE_NCCLTRACE", "ENABLE_NCCL_TRACE")
    if profile and trace:
        raise RecipeError("ENABLE_PROFILE and ENABLE_NCCLTRACE exclude each other")
    if trace:
        return ["--nccl-trace"], {}, TRACED_STEPS
    if not profile:
        return [], {}, None
    first, last, length = PROFILED_STEPS.get(workload, LLAMA_PROFILED_STEPS)
    first = variables.number("PROFILE_START_STEP", "RUN_CONF_PROFILE_START_STEP") or first
    last = variables.number("PROFILE_STOP_STEP", "RUN_CONF_PROFILE_STOP_STEP") or last
    if variables.number("PROFILE_STOP_STEP"):
        length = last  # the run ends with the profile, as published
    ranks = variables.text("RUN_CONF_PROFILE_RANKS") or "0,1,2,3,4,5,6,7"
    if first >= last:
        raise RecipeError(f"profiling from step {first} to step {last} profiles nothing")
    if not all(rank.isdigit() for rank in ranks.split(",")):
        raise RecipeError(f"RUN_CONF_PROFILE_RANKS={ranks}: expected numbers, such as 0,1")
    settings = {"JAXBENCH_NSYS_RANKS": ranks}
    for name in ("RUN_CONF_PROFILE_GPU_METRICS", "RUN_CONF_PROFILE_CPU"):
        settings[name] = str(variables.flag(name)).lower()
    arguments = ["--profile", "nsys", "--profile-steps", f"{first}-{last}"]
    return [*arguments, "--profile-ranks", ranks], settings, max(length, last)


def saving(args: argparse.Namespace, variables: Variables, stage: Path) -> list[str]:
    """Arguments for checkpoints."""
    arguments = ["--resume"]  # a requeued job finds its own folder
    if variables.flag("ENABLE_CHECKPOINT") or args.checkpoint_every:
        arguments.append("--checkpoint")
    if args.checkpoint_every:
        arguments += ["--checkpoint-every", str(args.checkpoint_every)]
    if load := variables.text("LOAD_CHECKPOINT_PATH"):
        path = stage / load
        if not path.is_dir():
            raise RecipeError(f"LOAD_CHECKPOINT_PATH={load}: {path} is no folder")
        arguments += ["--restore", str(path)]
    return arguments


def layout(args: argparse.Namespace, variables: Variables, recipe: recipes.Recipe):
    """(GPUs, GPUs of a node, processes of a node)."""
    asked = {"--gpus": args.gpus, "JOB_TOTAL_GPUS": variables.number("JOB_TOTAL_GPUS")}
    counts = {count for count in asked.values() if count is not None}
    if len(counts) != 1:
        raise RecipeError("--gpus and JOB_TOTAL_GPUS contradict" if counts else "name --gpus")
    (gpus,) = counts
    if not args.cpu and gpus not in recipe.rows:
        raise RecipeError(f"{recipe.name} has no row for {gpus} GPUs: {recipe.row_names()}")
    per_node = min(variables.number("GPUS_PER_NODE") or 8, gpus)
    if gpus % per_node:
        raise RecipeError(f"{gpus} GPUs do not fill nodes of {per_node}")
    processes = args.processes_per_node or per_node
    if processes not in (1, per_node):
        raise RecipeError(f"--processes-per-node {processes}: expected 1 or {per_node}")
    return gpus, per_node, processes


def run_length(variables: Variables, observed: int | None) -> int | None:
    """Steps of the run where something names them; an observed run has its own number."""
    steps = variables.number("MAX_STEPS")
    if observed and steps and steps != observed:
        raise RecipeError(f"MAX_STEPS={steps} contradicts a profiled or traced run of {observed}")
    return observed or steps


def slurm_options(variables: Variables, exclusive: bool) -> tuple[str, ...]:
    """What sbatch needs beyond the size of the job."""
    gpus = variables.number("SBATCH_GPUS_PER_NODE", "SLURM_GPUS_PER_NODE")
    options = {
        "account": variables.text("SBATCH_ACCOUNT", "SLURM_ACCOUNT"),
        "partition": variables.text("SBATCH_PARTITION", "SLURM_PARTITION"),
        "gres": gpus and f"gpu:{gpus}",
        "mem": "0" if exclusive else None,
    }
    given = tuple(f"--{name}={value}" for name, value in options.items() if value)
    return (*given, "--exclusive") if exclusive else given


def make_job(args: argparse.Namespace, environment: Mapping[str, str]) -> Job:
    """The job of options and environment. Raises RecipeError for all that can be known now."""
    variables = Variables(environment)
    path = recipe_path(args.config, variables)
    recipe = recipes.load(path)
    gpus, per_node, processes = layout(args, variables, recipe)
    if args.system and not (ROOT / "launch" / "env" / f"{args.system}.sh").exists():
        raise RecipeError(f"--system {args.system}: there is no launch/env/{args.system}.sh")
    workload = recipe.name.split("_")[0]
    stage = stage_folder(variables, workload)
    observed, observed_settings, length = observation(variables, workload)
    steps = run_length(variables, length)
    run = recipes.resolve(
        recipe, recipes.SMOKE if args.cpu else gpus, devices=gpus, steps=steps or STEPS,
        overrides=recipes.parse_overrides(args.set), seed=args.seed,
    )  # fmt: skip
    traced = "--nccl-trace" in observed
    version = jaxbench.__version__ + ("-nccl-trace" if traced else "")
    results = stage / "results" / version / run.precision.dtype / run.model.size / str(gpus)
    local = per_node // processes
    saved = saving(args, variables, stage)
    arguments = (
        "--config", str(path),
        *(["--cpu-devices", str(local)] if args.cpu else ["--gpus", str(gpus)]),
        "--local-devices", str(local), "--seed", str(args.seed),
        *([] if steps is None else ["--steps", str(steps)]),
        *(part for text in args.set for part in ("--set", text)),
        "--watchdog", str(args.watchdog), "--compilation-cache", str(stage / "cache"),
        *saved, *observed,
    )  # fmt: skip
    settings = {
        "JAXBENCH_ROOT": str(ROOT), "JAXBENCH_STAGE": str(stage), "JAXBENCH_RESULTS": str(results),
        "JAXBENCH_NAME": f"{run.recipe}_{gpus}", "JAXBENCH_SYSTEM": args.system or "",
        "JAXBENCH_LOCAL_DEVICES": str(local), "JAXBENCH_RESTARTS": str(args.restarts),
        "JAXBENCH_RESUME": str("--checkpoint" in saved).lower(), **observed_settings,
    }  # fmt: skip
    return Job(
        run=run,
        nodes=gpus // per_node,
        processes_per_node=processes,
        time_limit=variables.text("TIME_LIMIT") or ("00:15:00" if traced else "00:30:00"),
        results=results,
        arguments=arguments,
        settings=settings,
        sbatch=slurm_options(variables, exclusive=not args.cpu),
    )


def submit(job: Job) -> str:
    """Submits the job; returns its id. Raises RecipeError with what Slurm said."""
    job.results.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=job.script(), capture_output=True, text=True
        )  # fmt: skip
    except FileNotFoundError as error:
        raise RecipeError(
            "there is no sbatch here; on one host use launch/run.sh --config RECIPE"
        ) from error
    if done.returncode:
        raise RecipeError(f"sbatch: {' '.join(done.stderr.split())}")
    return done.stdout.split(";")[0].strip()


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options; most have a published variable too."""
    parser = argparse.ArgumentParser(prog="launch/submit.sh", description="Submits one benchmark.")
    add = parser.add_argument
    add("config", nargs="?", help="recipe file (or WORKLOAD, MODEL_SIZE and DTYPE)")
    add("--gpus", type=int, help="total GPUs (or JOB_TOTAL_GPUS)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    add("--seed", type=int, default=0, help="seed of weights and tokens")
    add("--processes-per-node", type=int, help="default one per GPU; 1: one per node")
    add("--system", help="settings of a system: a name in launch/env")
    add("--checkpoint-every", type=int, help="save every N steps, at the end, and when stopped")
    add("--watchdog", type=float, default=300, help="seconds without progress that end the job")
    add("--restarts", type=int, default=3, help="times that a saving job is requeued by itself")
    add("--cpu", action="store_true", help="rehearse: the smoke row, a CPU device for each GPU")
    add("--dry-run", action="store_true", help="print the batch script and the resolved recipe")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command; returns 0, or 2 for a mistake."""
    args = parse_arguments(argv)
    try:
        job = make_job(args, os.environ)
        if args.dry_run or Variables(os.environ).flag("DRY_RUN"):
            print(job.script())
            print("# the resolved recipe:")
            print(yaml.safe_dump(plain(recipes.describe(job.run)), sort_keys=False), end="")
            return 0
        number = submit(job)
    except (RecipeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"job {number}: {job.results / number}")
    return 0


def plain(value):
    """The value with lists for tuples, as YAML has them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


if __name__ == "__main__":
    sys.exit(main())
