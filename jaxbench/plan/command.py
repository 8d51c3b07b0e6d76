"""The command `jaxbench plan`: plans of one row or of many, and differences between plans."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import jax

from jaxbench import mesh
from jaxbench.base import hardware
from jaxbench.base.errors import RecipeError, counted
from jaxbench.base.files import as_json, owned, write_json
from jaxbench.base.hardware import Gpu, placed
from jaxbench.base.terminal import command, folded, live, write
from jaxbench.forecast.guide import guide
from jaxbench.plan import (
    ask_cudnn,
    candidates,
    compare_profile,
    difference,
    hlo_file,
    search,
    stubs,
    sweep,
    systems,
    text,
)
from jaxbench.plan.absent import compile_only_devices
from jaxbench.plan.arguments import DEFAULT_GPU, LIMIT, check_arguments, make_parser
from jaxbench.plan.plan import Memory, Plan, make_plan, read
from jaxbench.plan.processes import CACHE, resumable
from jaxbench.plan.row_page import plan_page
from jaxbench.plan.systems import Target
from jaxbench.recipe import derived_rows, recipes
from jaxbench.recipe.settings import Run
from jaxbench.train.program import compile_program
from jaxbench.train.program_checks import check_run
from jaxbench.xla import flags

REMEDIES = 8
"""The most candidates that we compile to replace a row that does not fit."""


def resolve(
    config: str, gpus: int | None, changes: list[str], gpu: Gpu
) -> tuple[Run, recipes.Recipe]:
    """The run of a row, and the recipe with that row. The row is derived if the recipe has none for
    `gpus`. Raises RecipeError for a row that cannot run on the GPU."""
    recipe = recipes.load(config).on(gpu)
    if gpus is None:
        raise RecipeError(f"--gpus is missing: {recipe.name} has the rows {recipe.row_names()}")
    overrides = recipes.parse_overrides(changes)
    recipe = derived_rows.extend(recipe, gpus, gpu, overrides)
    run = recipes.resolve(recipe, gpus, overrides=overrides)
    if run.precision.implementation == "te":
        stubs.load_for_engine(gpu.capability[0])
    check_run(run, "gpu", gpu)
    for line in flags.overruled(run, "gpu"):
        print(line, file=sys.stderr)
    placed(gpu, gpus)
    return run, recipe


def plan_spec(spec: str, target: Target) -> Plan:
    """The plan of `recipe:gpus key=value ..`, or a plan from a file or folder of `--dump`."""
    path = Path(spec)
    if path.is_dir() or path.suffix == ".json":
        return read(path / "plan.json" if path.is_dir() else path)
    row, *changes = spec.split() or [""]
    name, colon, gpus = row.partition(":")
    if colon and not gpus.isdecimal():
        raise RecipeError(f"{spec}: expected a number of GPUs after the recipe, such as {name}:8")
    run, _ = resolve(name, int(gpus) if gpus else None, changes, target.gpu)
    with compiling(run):
        return make_plan(run, target)


def compiling(run: Run) -> AbstractContextManager[Any]:
    """Shows what is compiled, and for how long."""
    return live(f"compiling {run.recipe} for {counted(run.gpus)}")


def find_remedy(run: Run, plan: Plan, gpu: Gpu, command: str) -> Iterator[str]:
    """Compiles candidates of a search until one fits. Yields a line for each candidate. The last
    line has the command that plans what fits; it begins with `command`, which plans the row."""
    yield "  looking for settings with which it fits:"
    searching = search.Search(run, gpu, search.fixed_keys(run))
    searching.tried[searching.row] = search.Outcome.of(plan)
    described, asking = ask_cudnn.for_compiler(gpu)
    devices = compile_only_devices(described, run.gpus)
    while len(searching.tried) <= REMEDIES and (batch := searching.batch(1)):
        (candidate,) = batch
        absent = mesh.make_mesh(candidate.mesh_shape, devices)
        with jax.set_mesh(absent), compiling(candidate):
            compiled, _, _ = compile_program(candidate, flags.PLANNED | asking, guide)
        size = Memory.of(compiled, gpu)
        searching.tried[candidate] = search.Outcome(peak=size.peak, fits=size.fits)
        changes = candidates.changes(candidate, searching.row)
        options = " ".join(f"--set {change}" for change in changes)
        if size.fits:
            yield f"  fits with {text.gib(size.peak)}: {command} {options}"
            return
        yield f"  still too big, {text.gib(size.peak)}: {options}"
    yield "  none of these settings makes it fit; use more GPUs or fewer layers"


def find_targets(args: argparse.Namespace) -> list[Target]:
    """The system of the options. If `--all` is for every GPU, all GPUs, beginning with the default
    one. Raises RecipeError."""
    one = args.gpu or args.system or args.kernels or not args.all
    others = [] if one else [name for name in hardware.PLANNED if name != DEFAULT_GPU]
    names = (args.gpu or DEFAULT_GPU, *others)
    return [systems.find(name, args.kernels).changed(args.system) for name in names]


def compare(args: argparse.Namespace, target: Target) -> int:
    """Runs `--diff`. Returns 1 if a row of a table got worse."""
    if all(spec.endswith(".csv") for spec in args.diff):
        before, after = map(Path, args.diff)
        lines, worse = sweep.compare_tables(before, after, args.percent)
        print(lines)
        return int(worse)
    plans = [plan_spec(spec, target) for spec in args.diff]
    as_text = difference.page if args.format == "html" else difference.report
    write(as_text(*plans), args.output)
    return 0


def plan_one(args: argparse.Namespace, target: Target) -> int:
    """Prints the plan of one row. If the row does not fit, prints remedies too, except next to
    JSON; a page has the last one."""
    run, _ = resolve(args.config, args.gpus, args.set, target.gpu)
    with compiling(run):
        plan = make_plan(run, target, args.dump)
    if args.dump:
        write_json(args.dump / "plan.json", plan)
    if args.format == "text":
        print(folded(text.answer(plan)), flush=True)
    remedy = ""
    if not plan.fits and args.format != "json":
        options = target.options() if args.gpu else target.further_options()
        options += [f"--set {change}" for change in args.set]
        words = ["jaxbench plan --config", args.config, "--gpus", run.row, *options]
        for remedy in find_remedy(run, plan, target.gpu, " ".join(words)):
            print(remedy, file=sys.stdout if args.format == "text" else sys.stderr, flush=True)
    if args.format == "text":
        print(folded(text.details(plan)))
    else:
        content = as_json(plan) if args.format == "json" else plan_page(plan, remedy.strip())
        write(content, args.output)
    return 0 if plan.fits else 1


def read_file(args: argparse.Namespace, target: Target) -> int:
    """Runs `--profile` or `--hlo`. Returns 0."""
    with live(f"reading {args.profile or args.hlo}"):
        if args.profile:
            named = target.gpu if args.gpu or args.system else None
            compared = compare_profile.read(args.profile, args.hlo, named, args.kernels)
            as_text = as_json if args.format == "json" else compare_profile.report
            content = as_text(compared)
        else:
            step = hlo_file.read(args.hlo, target)
            content = hlo_file.FORMATS[args.format](step)
    write(content, args.output)
    return 0


@command
@resumable
def main(argv: Sequence[str] | None) -> int:
    """Returns 0, or 1 when a plan does not fit."""
    args = make_parser().parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    targets = find_targets(args)
    check_arguments(args, targets[0].gpu)
    if args.all:
        args.output = args.output or CACHE
    for folder in filter(None, (args.dump, args.output if args.all else None)):
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        for path in filter(None, (args.dump, args.output)):
            held.enter_context(owned(path))
        if args.all:
            return sweep.sweep(targets, args.output)
        target = targets[0]
        if args.profile or args.hlo:
            return read_file(args, target)
        if args.diff:
            return compare(args, target)
        if args.search:
            row, recipe = resolve(args.config, args.gpus, args.set, target.gpu)
            limit = args.limit or LIMIT
            return search.search(recipe, row, args.config, limit, target, args.format, args.output)
        return plan_one(args, target)
