"""The command `jaxbench plan`: plans of one row or of many, and differences between plans."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import jax

from jaxbench import mesh
from jaxbench.base import hardware
from jaxbench.base.errors import RecipeError, RunFailed, counted
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
from jaxbench.plan.arguments import DEFAULT_GPU, LIMIT, Options, check_arguments, parse_arguments
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
        changes = candidates.changes(candidate, searching.row)
        options = " ".join(f"--set {change}" for change in changes)
        try:
            with jax.set_mesh(absent), compiling(candidate):
                compiled = compile_program(candidate, flags.PLANNED | asking, guide).program
        except (jax.errors.JaxRuntimeError, RecipeError, RunFailed) as error:
            searching.tried[candidate] = search.Outcome(error=str(error))
            yield f"  cannot be compiled: {options}"
            continue
        size = Memory.of(compiled, gpu)
        searching.tried[candidate] = search.Outcome(peak=size.peak, fits=size.fits)
        if size.fits:
            yield f"  fits with {text.gib(size.peak)}: {command} {options}"
            return
        yield f"  still too big, {text.gib(size.peak)}: {options}"
    yield "  none of these settings makes it fit; use more GPUs or fewer layers"


def find_targets(options: Options) -> list[Target]:
    """The system of the options. If `--all` is for every GPU, all GPUs, beginning with the default
    one. Raises RecipeError."""
    one = options.gpu or options.system or options.kernels or not options.all
    others = [] if one else [name for name in hardware.PLANNED if name != DEFAULT_GPU]
    names = (options.gpu or DEFAULT_GPU, *others)
    return [systems.find(name, options.kernels).changed(options.system) for name in names]


def compare(options: Options, target: Target) -> int:
    """Runs `--diff`. Returns 1 if a row of a table got worse."""
    if all(spec.endswith(".csv") for spec in options.diff):
        before, after = map(Path, options.diff)
        lines, worse = sweep.compare_tables(before, after, options.percent)
        print(lines)
        return int(worse)
    plans = [plan_spec(spec, target) for spec in options.diff]
    as_text = difference.page if options.format == "html" else difference.report
    write(as_text(*plans), options.output)
    return 0


def plan_one(options: Options, target: Target) -> int:
    """Prints the plan of one row. If the row does not fit, prints remedies too, except next to
    JSON; a page has the last one."""
    run, _ = resolve(options.config, options.gpus, options.set, target.gpu)
    with compiling(run):
        plan = make_plan(run, target, options.dump)
    if options.dump:
        write_json(options.dump / "plan.json", plan)
    if options.format == "text":
        print(folded(text.answer(plan)), flush=True)
    remedy = ""
    if not plan.fits and options.format != "json":
        words = ["jaxbench plan --config", options.config, "--gpus", run.row]
        words += target.options() if options.gpu else target.further_options()
        words += [f"--set {change}" for change in options.set]
        for remedy in find_remedy(run, plan, target.gpu, " ".join(words)):
            print(remedy, file=sys.stdout if options.format == "text" else sys.stderr, flush=True)
    if options.format == "text":
        print(folded(text.details(plan)))
    else:
        content = as_json(plan) if options.format == "json" else plan_page(plan, remedy.strip())
        write(content, options.output)
    return 0 if plan.fits else 1


def read_file(options: Options, target: Target) -> int:
    """Runs `--profile` or `--hlo`. Returns 0."""
    with live(f"reading {options.profile or options.hlo}"):
        if options.profile:
            named = target.gpu if options.gpu or options.system else None
            compared = compare_profile.read(options.profile, options.hlo, named, options.kernels)
            as_text = as_json if options.format == "json" else compare_profile.report
            content = as_text(compared)
        else:
            assert options.hlo
            content = hlo_file.FORMATS[options.format](hlo_file.read(options.hlo, target))
    write(content, options.output)
    return 0


def execute(options: Options, target: Target) -> int:
    """Runs what the options ask of one GPU. Returns the exit status."""
    if options.profile or options.hlo:
        return read_file(options, target)
    if options.diff:
        return compare(options, target)
    if options.search:
        row, recipe = resolve(options.config, options.gpus, options.set, target.gpu)
        limit, to = options.limit or LIMIT, options.output
        return search.search(recipe, row, options.config, limit, target, options.format, to)
    return plan_one(options, target)


@command
@resumable
def main(argv: Sequence[str] | None) -> int:
    """Returns 0, or 1 when a plan does not fit."""
    options = parse_arguments(argv)
    jax.config.update("jax_platforms", "cpu")
    targets = find_targets(options)
    check_arguments(options, targets[0].gpu)
    if options.all:
        folder = options.output or CACHE
        folder.mkdir(parents=True, exist_ok=True)
        with owned(folder):
            return sweep.sweep(targets, folder)
    if options.dump:
        options.dump.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        for path in filter(None, (options.dump, options.output)):
            held.enter_context(owned(path))
        return execute(options, targets[0])
