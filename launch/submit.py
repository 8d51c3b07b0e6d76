"""launch/submit.sh: runs one benchmark as one Slurm job.

Reads options and the published variables (docs/reference/launch.md), checks them, and submits
launch/slurm.sbatch. With DRY_RUN=true it only prints the batch script. Options after `--` are
options of `train`.
"""

import argparse
import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import sbatch  # noqa: E402
import site_file  # noqa: E402
from options import parse_train, train_options  # noqa: E402
from variables import Variables, gpu_type, misspelt, recipe_path, stage_folder  # noqa: E402

import jaxbench  # noqa: E402
from jaxbench.base.errors import RecipeError, counted  # noqa: E402
from jaxbench.base.hardware import Gpu  # noqa: E402
from jaxbench.base.terminal import Parser  # noqa: E402
from jaxbench.recipe import derived_rows, published, recipes  # noqa: E402
from jaxbench.recipe.settings import Run  # noqa: E402
from jaxbench.run import arguments  # noqa: E402


@dataclass(frozen=True)
class Job:
    """A job to submit: the `arguments` of `jaxbench.train`, the `settings` that its script exports,
    and the `options` of sbatch."""

    run: Run
    gpu: Gpu
    results: Path
    arguments: tuple[str, ...]
    settings: Mapping[str, str]
    options: sbatch.Options

    def script(self, submission: str = "") -> str:
        """The batch script. `submission` distinguishes the job from others with the same number,
        since numbers may occur again."""
        return "\n".join((
            "#!/usr/bin/env bash",
            *(sbatch.directive(name, value) for name, value in self.options.items()),
            # Remove what another job or a shell's profile has set.
            'unset "${!JAXBENCH_@}" "${!RUN_CONF_@}"',
            *(f"export {name}={shlex.quote(value)}" for name, value in self.settings.items()),
            f"arguments=({shlex.join(self.arguments)})",
            f"submission={submission}",
            f"described={shlex.quote(json.dumps(self.record(submission)))}",
            "",
            (ROOT / "launch" / "slurm.sbatch").read_text().partition("\n")[2],
        ))  # fmt: skip

    def record(self, submission: str) -> dict[str, Any]:
        """job.json, which describes the job before it has a run.json, or if it never gets one."""
        return {
            "submission": submission,
            "status": "running", "cause": None, "reason": None, "label": self.run.label,
            "recipe": recipes.describe(self.run), "not_comparable_because": [],
            "published": None, "hardware": {"device": self.gpu.name},
        }  # fmt: skip

    def folder(self, number: str) -> Path:
        return self.results / number

    def log(self, number: str) -> Path:
        """The main log. Parsers of published logs leave out `sbatch_` files; the steps that they
        read are in the run's own log."""
        name = f"sbatch_jaxbench_{self.settings['JAXBENCH_NAME']}_{number}.out"
        return self.folder(number) / name

    def warnings(self) -> list[str]:
        """Consequences that the user may not have meant."""
        saves = self.settings["JAXBENCH_RESUME"] == "true"
        if saves and "signal" not in self.options:
            return [
                f"a time limit of {self.options['time']} leaves no time to save before it: Slurm "
                f"gives notice {sbatch.SAVE_SECONDS} s before the limit"
            ]
        return []

    def remarks(self) -> list[str]:
        """Remarks for a reader of the result."""
        if self.run.row == recipes.SMOKE or not published.differences(self.run, self.gpu.device):
            return []
        row = f"{self.run.recipe} on {counted(self.run.gpus, self.gpu.name)}"
        settings = " with these settings" if self.run.overrides else ""
        return [f"nothing is published for {row}{settings}: the result is not comparable"]


class Layout(NamedTuple):
    """How a job is spread over nodes: the number of GPUs, of GPUs per node, and of processes per
    node."""

    gpus: int
    per_node: int
    processes_per_node: int

    @property
    def nodes(self) -> int:
        return self.gpus // self.per_node

    @property
    def per_process(self) -> int:
        """The GPUs of a process."""
        return self.per_node // self.processes_per_node


def layout(args: argparse.Namespace, variables: Variables, gpu: Gpu) -> Layout:
    """The layout that options and variables ask for. Raises RecipeError."""
    counts = {args.gpus, variables.number("JOB_TOTAL_GPUS")} - {None}
    if len(counts) != 1:
        raise RecipeError("--gpus and JOB_TOTAL_GPUS contradict" if counts else "name --gpus")
    (gpus,) = counts
    if gpus < 1:
        raise RecipeError(f"--gpus {gpus}: expected a whole number above 0")
    node = variables.number(*site_file.VARIABLES["gpus_per_node"]) or gpu.node
    per_node = min(node, gpus)
    if gpus % per_node:
        raise RecipeError(f"{gpus} GPUs do not fill nodes of {per_node}")
    processes = per_node if args.processes_per_node is None else args.processes_per_node
    if processes not in (1, per_node):
        raise RecipeError(f"--processes-per-node {processes}: expected 1 or {per_node}")
    return Layout(gpus, per_node, processes)


def slurm_options(
    args: argparse.Namespace, variables: Variables, job: sbatch.Options
) -> sbatch.Options:
    """All options of sbatch: the job's, the cluster's, and the user's."""
    traced = variables.flag("ENABLE_NCCLTRACE", "ENABLE_NCCL_TRACE")
    default = "00:15:00" if traced else "00:30:00"
    limit = args.time or variables.text("TIME_LIMIT") or default
    seconds = sbatch.seconds(limit, "--time" if args.time else "TIME_LIMIT")
    gpus = variables.number(*site_file.VARIABLES["gres_gpus"])
    options = {
        **job, "time": limit,
        # In a shorter job the signal would come before processes can handle it.
        "signal": f"USR1@{sbatch.SAVE_SECONDS}" if seconds > sbatch.SAVE_SECONDS else None,
        **{name: variables.text(*site_file.VARIABLES[name]) for name in sbatch.SITE},
        "gres": gpus and f"gpu:{gpus}",
        "mem": None if args.cpu else "0",
    }  # fmt: skip
    flags: sbatch.Options = {"requeue": None} if args.cpu else {"requeue": None, "exclusive": None}
    launcher = {name: value for name, value in options.items() if value is not None} | flags
    user = sbatch.parse(args.sbatch, variables.text("ADDITIONAL_SLURM_PARAMS") or "")
    return sbatch.merge(launcher, user)


def make_job(args: argparse.Namespace, environment: Mapping[str, str]) -> Job:
    """The job that options and environment describe. Raises RecipeError for every mistake in
    them."""
    site = site_file.read(environment)
    variables = Variables(site_file.completed(environment, site))
    system = args.system or site.get("system", "")
    path = recipe_path(args.config, variables)
    gpu = gpu_type(variables)
    recipe = recipes.load(path).on(gpu)
    on = layout(args, variables, gpu)
    if system and not (ROOT / "launch" / "env" / f"{system}.sh").exists():
        raise RecipeError(f"--system {system}: there is no launch/env/{system}.sh")
    workload = recipe.name.split("_")[0]
    stage = stage_folder(variables, workload)
    sbatch.check_path(stage)
    options, settings = train_options(args, variables, workload, stage)
    overrides = recipes.parse_overrides(options["set"])
    row = recipes.SMOKE if args.cpu else on.gpus
    run = recipes.resolve(
        derived_rows.extend(recipe, row, gpu, overrides, whole_nodes=False), row, devices=on.gpus,
        steps=options.get("steps"), overrides=overrides, seed=options["seed"],
    )  # fmt: skip
    version = jaxbench.__version__ + ("-nccl-trace" if "nccl_trace" in options else "")
    results = stage / "results" / version / run.precision.dtype / run.model.size / str(on.gpus)
    local = str(on.per_process)
    texts = (
        "--config", str(path),
        *(["--cpu-devices", local] if args.cpu else ["--gpus", str(on.gpus)]),
        "--local-devices", local, *arguments.as_texts(options),
        "--compilation-cache", str(stage / f"cache-{os.getuid()}"), "--resume",
    )  # fmt: skip
    train = arguments.parse_arguments([*texts, "--output", str(results)])
    arguments.check_arguments(train)
    arguments.check_profiled(train, on.nodes * on.processes_per_node)
    name = f"{run.recipe}_{on.gpus}"
    check = args.check or ("on" if not args.cpu and on.nodes > 1 else "off")
    if args.exclude_slow and check == "off":
        raise RecipeError("--exclude-slow on one node needs --check on")
    image, venv = variables.text("RUN_CONF_IMAGE"), variables.text("JAXBENCH_VENV")
    settings |= {
        "JAXBENCH_ROOT": str(ROOT), "JAXBENCH_RESULTS": str(results),
        "JAXBENCH_NAME": name, "JAXBENCH_SYSTEM": system, "JAXBENCH_GPU": gpu.name,
        "JAXBENCH_LOCAL_DEVICES": local, "JAXBENCH_RESTARTS": str(args.restarts),
        "JAXBENCH_CHECK": check, "JAXBENCH_EXCLUDE_SLOW": str(args.exclude_slow).lower(),
        "JAXBENCH_CHECK_OPTIONS": f"--{'cpu' if args.cpu else 'local'}-devices {local}",
    }  # fmt: skip
    needed = [ROOT, stage, path, options.get("restore")]
    if venv:
        folder = Path(venv).absolute()
        settings["JAXBENCH_VENV"] = str(folder)
        needed.append(folder if folder.exists() else None)  # else it is one of the image
    if image:
        settings |= sbatch.container(image, filter(None, needed))
    slurm: sbatch.Options = {
        "job-name": name, "nodes": str(on.nodes), "ntasks-per-node": str(on.processes_per_node),
        "output": f"{results}/slurm-%j.out", "open-mode": "append",
    }  # fmt: skip
    slurm = slurm_options(args, variables, slurm)
    if "exclude" in site:
        slurm["exclude"] = ",".join(filter(None, [site["exclude"], slurm.get("exclude")]))
    return Job(run, gpu, results, texts, settings, slurm)


def submit(job: Job) -> str:
    """Submits the job. Returns its id. Raises RecipeError with Slurm's message."""
    number = sbatch.submit(job.script(f"{time.time_ns()}-{os.getpid()}"))
    with contextlib.suppress(OSError):  # for `tail -F`; if this fails, the job makes it
        job.folder(number).mkdir(mode=0o755, exist_ok=True)
    return number


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parses the options. `train` has the options after `--`. Raises RecipeError."""
    parser = Parser(
        prog="launch/submit.sh", description="Submits one benchmark.", allow_abbrev=False,
        usage="%(prog)s [CONFIG] [options] [-- options of train]",
        epilog="options of train: python -m jaxbench.train --help",
    )  # fmt: skip
    add = parser.add_argument
    add("config", nargs="?", help="recipe file or name (or WORKLOAD, MODEL_SIZE and DTYPE)")
    add("--gpus", type=int, help="total GPUs (or JOB_TOTAL_GPUS)")
    add("--time", metavar="LIMIT", help="time limit, as H:M:S (or TIME_LIMIT; default 00:30:00)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    add("--seed", type=int, help="seed of weights and tokens (default 0)")
    add("--processes-per-node", type=int, help="1, or one per GPU (default)")
    add("--system", help="name of a file in launch/env with settings of a system")
    add("--sbatch", action="append", default=[], metavar="KEY=VALUE",
        help="any other option of sbatch: qos=high")  # fmt: skip
    add("--checkpoint-every", type=int, help="save every N steps, at the end, and when stopped")
    add("--watchdog", type=float, help="seconds without progress that end the job (default 300)")
    add(
        "--restarts",
        type=int,
        default=3,
        help="how often a job that saves requeues itself (default 3)",
    )
    add("--requeue-at-time-limit", action="store_true",
        help="if a job that saves reaches its time limit, continue it in a new start")  # fmt: skip
    add("--check", choices=("on", "warn", "off"),
        help="first measure GPUs, links and nodes (jaxbench check): on ends the job if one is slow "
        "or broken, warn only says so (default: on for jobs of several nodes)")  # fmt: skip
    add("--exclude-slow", action="store_true",
        help="requeue the job without nodes that the check names or that lose a GPU")  # fmt: skip
    add(
        "--cpu",
        action="store_true",
        help="rehearse with the smoke row, on a CPU device for each GPU",
    )
    add("--dry-run", action="store_true", help="print the batch script and the resolved recipe")
    at = argv.index("--") if "--" in argv else len(argv)
    args, unknown = parser.parse_known_args(argv[:at])
    if unknown:
        names = (arguments.flag(option.name) for option in fields(arguments.Options))
        if unknown[0].partition("=")[0] in names:
            raise RecipeError(
                f"{unknown[0]} is an option of train; put it after --: ... -- {shlex.join(unknown)}"
            )
        parser.error(f"unrecognized arguments: {shlex.join(unknown)}")
    if args.restarts < 0:
        raise RecipeError(f"--restarts {args.restarts}: expected 0 or more")
    if args.exclude_slow and args.check in ("warn", "off"):
        raise RecipeError(f"--exclude-slow needs the check: leave out --check {args.check}")
    args.train = parse_train(argv[at + 1 :])
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns 0, or 2 for a mistake."""
    try:
        args = parse_arguments(sys.argv[1:] if argv is None else argv)
        job = make_job(args, os.environ)
        if args.dry_run or Variables(os.environ).flag("DRY_RUN"):
            print(job.script())
            print("# the resolved recipe:")
            recipe = recipes.describe(job.run)
            print(yaml.safe_dump(recipe, sort_keys=False), end="")
            print("".join(f"# {line}\n" for line in job.remarks()), end="")
            return 0
        sbatch.check(job.results, job.settings)
        warnings = [*misspelt(os.environ), *job.warnings(), *sbatch.refusal(job.script())]
        number = submit(job)
    except (RecipeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in warnings:
        print(f"warning: {line}", file=sys.stderr)
    print(f"job {number}: {job.folder(number)}")
    print(f"watch it: tail -F {shlex.quote(str(job.log(number)))}")
    print("".join(f"{line}\n" for line in job.remarks()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
