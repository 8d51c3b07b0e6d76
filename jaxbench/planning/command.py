"""The command line of `python -m jaxbench.plan`: compiles the program that `train` would run, for
GPUs that are not there, and says whether it fits, what it sends, what it runs, and its least time.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from jaxbench import hardware, mesh
from jaxbench.errors import RecipeError, RunFailed
from jaxbench.files import write_json
from jaxbench.forecast.tables import load
from jaxbench.hardware import Gpu
from jaxbench.plan import driver, text
from jaxbench.plan.absent import check_compiler, compile_only_devices
from jaxbench.plan.plan import Plan, make_plan, read
from jaxbench.planning import scaling, search, sweep
from jaxbench.planning.estimate import activations
from jaxbench.planning.processes import Target
from jaxbench.recipe import derive, recipes
from jaxbench.recipe.checks import positive
from jaxbench.recipe.settings import Run
from jaxbench.train.program import check_run, compile_program
from jaxbench.xla import flags

KEYS = (
    "recipe", "gpus", "target", "fits", "parameters", "bytes_per_device", "flops", "collectives",
    "kernels", "stages", "lower_s", "compile_s", "bound_step_s", "forecast_step_s", "forecast",
    "rates", "published",
)  # fmt: skip
"""What `--json` prints. A plan has more, for people and for `--diff`."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The arguments; `--help` is their documentation."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxbench.plan",
        description="Compiles a benchmark for GPUs that are not there, and describes its step.",
    )
    add = parser.add_argument
    add("--config", help="recipe file or name, such as llama2_70b_bf16")
    add("--gpus", type=int, help="the row: number of GPUs; any that fills nodes")
    add("--gpu", choices=list(hardware.PLANNED), default="h100", help="default h100")
    add(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="change a setting of the row: batch.microbatch=4",
    )  # fmt: skip
    add(
        "--system", action="append", default=[], metavar="KEY=VALUE",
        help="change the system: nvlink=450 and nic=50 (GB/s per GPU, one direction), node=8 (GPUs "
        "of a host), domain=8 (GPUs that NVLink joins)",
    )  # fmt: skip
    add(
        "--kernels", type=Path, metavar="FILE",
        help="measured kernels for the forecast, of jaxbench.calibrate; before the package's own",
    )  # fmt: skip
    add("--json", action="store_true", help="print the plan as JSON")
    add(
        "--remedy", action=argparse.BooleanOptionalAction, default=True,
        help="compile settings that may help where a row does not fit (default: yes)",
    )  # fmt: skip
    add("--dump", type=Path, metavar="DIR", help="keep the scheduled program and the whole plan")
    add(
        "--diff", nargs=2, metavar=("A", "B"),
        help="what moved between two plans: JSON files of --dump, or rows with settings, as in "
        "'llama2_70b_bf16:64 execution.remat=full'",
    )  # fmt: skip
    add("--all", action="store_true", help="plan every row of every recipe")
    add("--scaling", action="store_true", help="plan every row of a recipe: what grows with GPUs")
    add("--search", action="store_true", help="try other meshes and remat policies for the row")
    add("--limit", type=int, help=f"candidates that --search compiles (default {search.LIMIT})")
    add("--output", type=Path, default=Path("docs"), help="folder of --all's table (default docs)")
    return parser.parse_args(argv)


def with_settings(gpu: Gpu, settings: list[str]) -> Gpu:
    """The GPU with `key=value` settings of its links applied, such as `nic=25`. Raises
    RecipeError."""
    for setting in settings:
        key, _, value = setting.partition("=")
        counts = ("node", "domain")
        try:
            number = int(value) if key in counts else float(value)
        except ValueError:
            number = 0
        if key not in ("nvlink", "nic", *counts) or not 0 < number < float("inf"):
            raise RecipeError(
                f"--system {setting}: expected nvlink=N, nic=N, node=N or domain=N, N above 0"
            )
        changes: dict[str, Any] = {key: number}
        gpu = replace(gpu, **changes)
    if gpu.domain % gpu.node:
        raise RecipeError(
            f"--system: a domain of {gpu.domain} GPUs is not one of nodes of {gpu.node}"
        )
    return gpu


def resolve(
    config: str, gpus: int | None, changes: list[str], gpu: Gpu
) -> tuple[Run, recipes.Recipe]:
    """The run of a row, which may be derived, and its recipe, on a GPU. Raises RecipeError for what
    cannot run there."""
    recipe = recipes.load(config).on(gpu)
    if gpus is None:
        raise RecipeError(f"--gpus: recipe {recipe.name} has the rows {recipe.row_names()}")
    overrides = recipes.parse_overrides(changes)
    recipe = derive.extend(recipe, gpus, gpu, overrides)
    run = recipes.resolve(recipe, gpus, overrides=overrides)
    if run.precision.implementation == "te":
        assert gpu.chip is not None
        driver.pretend(gpu.chip.capability)
    check_run(run, "gpu")
    return run, recipe


def plan_spec(spec: str, gpu: Gpu, kernels: Path | None) -> Plan:
    """The plan of `recipe:gpus key=value ..`, or of a file that `--dump` left."""
    path = Path(spec)
    if path.is_dir() or path.suffix == ".json":
        return read(path / "plan.json" if path.is_dir() else path)
    row, *changes = spec.split() or [""]
    name, _, gpus = row.partition(":")
    run, _ = resolve(name, int(gpus) if gpus.isdecimal() else None, changes, gpu)
    check_compiler()
    return make_plan(run, gpu, kernels=kernels)


def public(plan: Plan) -> dict[str, Any]:
    """The part of a plan that `--json` prints."""
    names = ("kind", "axes", "count", "bytes", "exposed_s")
    values = asdict(plan)
    chosen = {key: values[key] for key in KEYS} | {"label": plan.settings["label"]}
    return chosen | {"collectives": [{n: c[n] for n in names} for c in values["collectives"]]}


def remedies(run: Run) -> list[tuple[str, ...]]:
    """Changes that may make a run fit, the mildest first: all activations kept, but no gathered
    weights, smaller passes, more ranks for the weights, recomputation, and these together."""
    every = ",".join(activations(run.model, run.batch.sequence_length))
    listed = [f"execution.remat={every}"] if run.unrolled else []
    smaller = [
        f"batch.microbatch={n}"
        for n in sorted({run.microbatch // 2, 1}, reverse=True)
        if 0 < n < run.microbatch
    ]
    wider = [f"parallelism.fsdp={run.parallelism.fsdp * n}" for n in (2, 4, 8)]
    full = [] if run.execution.remat == "full" else ["execution.remat=full"]
    least = [*full, *smaller[-1:]]
    single = [(change,) for change in (*listed, *smaller, *wider, *full)]
    together = [tuple(least), (*least, "parallelism.tensor=8")]
    return [*single, *(changes for changes in together if len(changes) > 1)]


def find_remedy(run: Run, recipe: recipes.Recipe, row: int | str, gpu: Gpu) -> Iterator[str]:
    """Compiles the run with each of `remedies` until one fits; says what was tried."""
    for changes in remedies(run):
        try:
            overrides = recipes.parse_overrides([*run.overrides, *changes])
            changed = recipes.resolve(recipe, row, overrides=overrides)
        except RecipeError:
            continue
        with jax.set_mesh(mesh.make_mesh(changed.mesh_shape, compile_only_devices(gpu, run.gpus))):
            compiled, _, _ = compile_program(changed)
        peak = compiled.memory_analysis().peak_memory_in_bytes
        fits = peak <= gpu.memory_limit
        asked = " ".join(f"--set {change}" for change in changes)
        yield f"  {'it fits' if fits else 'still too big'}, {text.gib(peak)}, with {asked}"
        if fits:
            return
    yield "  none of these settings makes it fit: it needs more GPUs or fewer layers"


def check_arguments(args: argparse.Namespace) -> None:
    """Raises RecipeError for options that are missing, or that do not go together."""
    asked = [f"--{name}" for name in ("diff", "all", "scaling", "search") if getattr(args, name)]
    if len(asked) > 1:
        raise RecipeError(f"{' and '.join(asked)}: one of them at a time")
    if asked and args.dump:
        raise RecipeError(f"--dump keeps a single plan; expected no {asked[0]}")
    ignored = [name for name in ("json", "set", "config", "gpus") if getattr(args, name)]
    if ignored and (args.diff or args.all):
        raise RecipeError(f"{asked[0]} takes no --{ignored[0]}")
    if args.kernels:
        load(args.gpu, args.kernels)
    if args.limit is not None and not args.search:
        raise RecipeError("--limit is for --search")
    positive("--", args, "limit")
    if args.scaling and (not args.config or args.gpus is not None):
        raise RecipeError("--scaling needs --config, and takes all of its rows: no --gpus")
    if asked in ([], ["--search"]) and (not args.config or args.gpus is None):
        raise RecipeError("--config and --gpus are needed (or --all, or --diff A B)")


def plan_many(args: argparse.Namespace, target: Target) -> int:
    """What `--diff`, `--all`, `--scaling` and `--search` ask for."""
    if args.diff:
        plans = (plan_spec(spec, target.gpu, args.kernels) for spec in args.diff)
        print(text.difference(*plans))
        return 0
    check_compiler()
    if args.search:
        row, recipe = resolve(args.config, args.gpus, args.set, target.gpu)
        limit = args.limit or search.LIMIT
        return search.search(recipe, row, args.config, limit, target, args.json)
    if args.scaling:
        recipe = recipes.load(args.config).on(target.gpu)
        return scaling.scaling(recipe, args.config, args.set, target, args.json)
    return sweep.sweep(target, args.output)


def plan_one(args: argparse.Namespace, gpu: Gpu) -> int:
    """The plan of one row, and what would make it fit if it does not."""
    run, recipe = resolve(args.config, args.gpus, args.set, gpu)
    check_compiler()
    if args.dump:
        args.dump.mkdir(parents=True, exist_ok=True)
    plan = make_plan(run, gpu, args.dump, args.kernels)
    if args.dump:
        write_json(args.dump / "plan.json", asdict(plan))
    print(json.dumps(public(plan), indent=2) if args.json else text.report(plan))
    if not plan.fits:
        print(text.too_big(plan), file=sys.stderr)
    if not plan.fits and args.remedy:
        print("what would make it fit:", file=sys.stderr)
        for line in find_remedy(run, recipe, args.gpus, gpu):
            print(line, file=sys.stderr, flush=True)
    return 0 if plan.fits else 1


def main(argv: list[str] | None = None) -> int:
    """The command; returns 0, 1 when a plan does not fit, or 2 for a user's mistake."""
    args = parse_arguments(argv)
    try:
        flags.check_environment(os.environ.get("XLA_FLAGS", ""))
        jax.config.update("jax_platforms", "cpu")
        gpu = with_settings(hardware.PLANNED[args.gpu], args.system)
        check_arguments(args)
        if args.diff or args.all or args.scaling or args.search:
            return plan_many(args, Target(gpu, args.gpu, tuple(args.system), args.kernels))
        return plan_one(args, gpu)
    except (RecipeError, RunFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "interrupted; the plans that were made are kept (--all, --scaling and --search go on)",
            file=sys.stderr,
        )
        return 130
