"""The command line of `python -m jaxbench.plan`: plans of a row or of many, and differences."""

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
from jaxbench.hardware import Gpu, placed
from jaxbench.plan import candidates, driver, hlo, scaling, search, sweep, text
from jaxbench.plan.absent import compile_only_devices
from jaxbench.plan.plan import Memory, Plan, make_plan, read
from jaxbench.plan.processes import Target
from jaxbench.recipe import derive, recipes
from jaxbench.recipe.checks import positive
from jaxbench.recipe.settings import Run
from jaxbench.train.program import check_run, compile_program
from jaxbench.xla import flags

MODES = ("diff", "all", "hlo", "scaling", "search")
"""Options that do another thing than to plan one row."""

DEFAULT_GPU = "h100"

REMEDIES = 8
"""Candidates that are compiled, at most, in place of a row that does not fit."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The arguments; `--help` is their documentation."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxbench.plan",
        description="Compiles a benchmark for absent GPUs, and describes its step.",
    )
    add = parser.add_argument
    add("--config", help="recipe file or name, such as llama2_70b_bf16")
    add("--gpus", type=int, help="number of GPUs: a row, or any count that fills nodes")
    add("--gpu", choices=list(hardware.PLANNED), help=f"default {DEFAULT_GPU}")
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
        help="measurements of jaxbench.calibrate, which replace the package's in the forecast",
    )  # fmt: skip
    add("--json", action="store_true", help="print the plan as JSON")
    add(
        "--remedy", action=argparse.BooleanOptionalAction, default=True,
        help="compile settings that may help where a row does not fit (default: yes)",
    )  # fmt: skip
    add("--dump", type=Path, metavar="DIR", help="keep the scheduled program and the plan as JSON")
    add(
        "--diff", nargs=2, metavar=("A", "B"),
        help="what moved between two plans: JSON files of --dump, or rows with settings, as in "
        "'llama2_70b_bf16:64 execution.remat=full'; or between two tables of --all (plan.csv), "
        "with status 1 if a row got worse",
    )  # fmt: skip
    add(
        "--percent", type=float, default=2.0,
        help="change that --diff of two tables reports (default 2)",
    )  # fmt: skip
    add(
        "--hlo", type=Path, metavar="FILE",
        help="describe a compiled program of whatever code: text of compiled.as_text(), or the "
        "program after optimizations that XLA_FLAGS=--xla_dump_to=DIR writes",
    )  # fmt: skip
    add(
        "--all", action="store_true",
        help=f"plan every row of every recipe on {DEFAULT_GPU}, and those of other GPUs on these; "
        "with --gpu, --system or --kernels every row on one GPU",
    )  # fmt: skip
    add("--scaling", action="store_true", help="plan every row of a recipe: what grows with GPUs")
    add("--search", action="store_true", help="try other meshes and remat policies for the row")
    add("--limit", type=int, help=f"candidates that --search compiles (default {search.LIMIT})")
    add("--output", type=Path, default=Path("docs"), help="folder of --all's table (default docs)")
    return parser.parse_args(argv)


def with_settings(gpu: Gpu, settings: list[str]) -> Gpu:
    """The GPU with `--system` settings such as `nic=25`. Raises RecipeError."""
    for setting in settings:
        key, _, value = setting.partition("=")
        kind = {"nvlink": float, "nic": float, "node": int, "domain": int}.get(key)
        try:
            number = kind(value) if kind else 0
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
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
    """The run of a row, derived where the recipe has none for `gpus`, and the recipe with that row.
    Raises RecipeError for what cannot run on the GPU."""
    recipe = recipes.load(config).on(gpu)
    if gpus is None:
        raise RecipeError(f"--gpus: recipe {recipe.name} has the rows {recipe.row_names()}")
    overrides = recipes.parse_overrides(changes)
    recipe = derive.extend(recipe, gpus, gpu, overrides)
    run = recipes.resolve(recipe, gpus, overrides=overrides)
    if run.precision.implementation == "te":
        assert gpu.chip is not None
        driver.load_stub(gpu.chip.capability)
    check_run(run, "gpu")
    placed(gpu, gpus)
    return run, recipe


def plan_spec(spec: str, gpu: Gpu, kernels: Path | None) -> Plan:
    """The plan of `recipe:gpus key=value ..`, or from a file or folder of `--dump`."""
    path = Path(spec)
    if path.is_dir() or path.suffix == ".json":
        return read(path / "plan.json" if path.is_dir() else path)
    row, *changes = spec.split() or [""]
    name, _, gpus = row.partition(":")
    run, _ = resolve(name, int(gpus) if gpus.isdecimal() else None, changes, gpu)
    return make_plan(run, gpu, kernels=kernels)


def find_remedy(run: Run, plan: Plan, gpu: Gpu) -> Iterator[str]:
    """Compiles candidates of a search until one fits; yields a line for each."""
    searching = search.Search(run, gpu)
    searching.tried[searching.row] = search.Outcome.of(plan)
    devices = compile_only_devices(gpu, run.gpus)
    for candidate in (new for _ in range(REMEDIES) for new in searching.batch(1)):
        with jax.set_mesh(mesh.make_mesh(candidate.mesh_shape, devices)):
            compiled, _, _ = compile_program(candidate)
        size = Memory.of(compiled, gpu)
        fits = size.fits
        searching.tried[candidate] = search.Outcome(peak=size.peak, fits=fits)
        changes = candidates.changes(candidate, searching.row)
        options = " ".join(f"--set {change}" for change in changes)
        yield f"  {'it fits' if fits else 'still too big'}, {text.gib(size.peak)}, with {options}"
        if fits:
            return
    yield "  none of these settings makes it fit: it needs more GPUs or fewer layers"


def check_arguments(args: argparse.Namespace) -> None:
    """Raises RecipeError for options that are missing or exclude each other."""
    modes = [f"--{name}" for name in MODES if getattr(args, name)]
    if len(modes) > 1:
        raise RecipeError(f"{' and '.join(modes)}: one of them at a time")
    if modes and args.dump:
        raise RecipeError(f"--dump keeps a single plan; expected no {modes[0]}")
    ignored = [name for name in ("json", "set", "config", "gpus") if getattr(args, name)]
    if args.hlo:
        ignored = [name for name in ignored if name != "json"]
    if ignored and (args.diff or args.all or args.hlo):
        raise RecipeError(f"{modes[0]} takes no --{ignored[0]}")
    if args.kernels:
        load(args.gpu or DEFAULT_GPU, args.kernels)
    if args.limit is not None and not args.search:
        raise RecipeError("--limit is for --search")
    positive("--", args, "limit")
    if args.scaling and (not args.config or args.gpus is not None):
        raise RecipeError("--scaling needs --config, and takes all of its rows: no --gpus")
    if modes in ([], ["--search"]) and (not args.config or args.gpus is None):
        raise RecipeError("--config and --gpus are needed (or --all, --hlo FILE, or --diff A B)")


def find_targets(args: argparse.Namespace) -> list[Target]:
    """The GPU of the options, the default one first where `--all` is for every GPU. Raises
    RecipeError."""
    one = args.gpu or args.system or args.kernels or not args.all
    others = [] if one else [name for name in hardware.PLANNED if name != DEFAULT_GPU]
    system = tuple(args.system)
    return [
        Target(with_settings(hardware.PLANNED[name], args.system), name, system, args.kernels)
        for name in (args.gpu or DEFAULT_GPU, *others)
    ]


def plan_many(args: argparse.Namespace, targets: list[Target]) -> int:
    """Runs `--diff`, `--all`, `--scaling` or `--search`."""
    target = targets[0]
    if args.diff and all(spec.endswith(".csv") for spec in args.diff):
        before, after = map(Path, args.diff)
        lines, worse = sweep.difference(before, after, args.percent)
        print(lines)
        return int(worse)
    if args.diff:
        plans = (plan_spec(spec, target.gpu, args.kernels) for spec in args.diff)
        print(text.difference(*plans))
        return 0
    if args.search:
        row, recipe = resolve(args.config, args.gpus, args.set, target.gpu)
        limit = args.limit or search.LIMIT
        return search.search(recipe, row, args.config, limit, target, args.json)
    if args.scaling:
        recipe = recipes.load(args.config).on(target.gpu)
        return scaling.scaling(recipe, args.config, args.set, target, args.json)
    return sweep.sweep(targets, args.output)


def plan_one(args: argparse.Namespace, gpu: Gpu) -> int:
    """Prints the plan of one row, and remedies where it does not fit."""
    run, _ = resolve(args.config, args.gpus, args.set, gpu)
    if args.dump:
        args.dump.mkdir(parents=True, exist_ok=True)
    plan = make_plan(run, gpu, args.dump, args.kernels)
    if args.dump:
        write_json(args.dump / "plan.json", asdict(plan))
    print(json.dumps(asdict(plan), indent=2) if args.json else text.report(plan))
    if not plan.fits:
        print(text.too_big(plan), file=sys.stderr)
    if not plan.fits and args.remedy:
        print("what would make it fit:", file=sys.stderr)
        for line in find_remedy(run, plan, gpu):
            print(line, file=sys.stderr, flush=True)
    return 0 if plan.fits else 1


def main(argv: list[str] | None = None) -> int:
    """The command; returns 0, 1 when a plan does not fit, or 2 for a user's mistake."""
    args = parse_arguments(argv)
    try:
        flags.check_environment(os.environ.get("XLA_FLAGS", ""))
        jax.config.update("jax_platforms", "cpu")
        targets = find_targets(args)
        check_arguments(args)
        gpu = targets[0].gpu
        if args.hlo:
            step = hlo.read(args.hlo, gpu, args.kernels)
            print(json.dumps(asdict(step), indent=2) if args.json else hlo.report(step))
            return 0
        if args.diff or args.all or args.scaling or args.search:
            return plan_many(args, targets)
        return plan_one(args, gpu)
    except (RecipeError, RunFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "interrupted; finished plans are kept: the same --all, --scaling or --search resumes",
            file=sys.stderr,
        )
        return 130
