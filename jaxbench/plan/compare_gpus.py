"""`jaxbench compare`: one model on several GPUs and numbers of GPUs, for whoever has a budget.

A cell of the comparison is a GPU and a number of GPUs. It is planned as `jaxbench plan` plans a
row, in a process of its own and with the same cache. Days, cost and energy follow from its step
time and from the goodput of a job with as many GPUs (`forecast.goodput`). A cell that cannot run
says why, and the others go on.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from rich.table import Table

from jaxbench.base import hardware
from jaxbench.base.errors import RecipeError, RunFailed
from jaxbench.base.files import as_json, owned
from jaxbench.base.terminal import command, console, folded, write
from jaxbench.forecast.goodput import OBSERVED, Assumed, job_goodput
from jaxbench.plan import search, systems
from jaxbench.plan.absent import check_compiler
from jaxbench.plan.arguments import LIMIT
from jaxbench.plan.command import resolve
from jaxbench.plan.compare_arguments import Options, parse_options
from jaxbench.plan.compare_cells import Cell, Figures, PlannedRow, as_table, mark, train_state
from jaxbench.plan.compare_page import compare_page
from jaxbench.plan.plan import Plan
from jaxbench.plan.processes import plan_all, resumable
from jaxbench.plan.systems import Target
from jaxbench.recipe import flops, hugging_face, recipes
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.names import model_name
from jaxbench.recipe.recipes import Recipe
from jaxbench.recipe.settings import Run

NARROWEST = ("nvfp4", "mxfp8", "fp8", "bf16", "fp32")
"""Formats of matmuls, the one with the fewest bits first. MXFP8 has finer scales than FP8."""

CURVE = [*(2**n for n in range(3, 17)), 100_000]
"""The numbers of GPUs for which the page shows goodput."""


@command
@resumable
def main(argv: Sequence[str] | None) -> int:
    """Returns 0, or 1 if no cell fits."""
    options = parse_options(argv)
    configs, changes = chosen(options.config)
    targets = [with_system(target, options.system) for target in options.gpu]
    check_compiler()
    with owned(options.output) if options.output else nullcontext():
        return _compare(options, configs, [*changes, *options.set], targets)


def _compare(
    options: Options, configs: dict[str, Recipe], changes: list[str], targets: Sequence[Target]
) -> int:
    """Plans and prints all cells of some recipes with `changes`. Returns the exit status."""
    assumed = Assumed(
        mtbf_gpu_hours=options.mtbf, storage_gb_s=options.storage, restart_s=60 * options.restart
    )
    limit = (options.limit or LIMIT) if options.search else None
    cells = []
    for target in targets:
        price, power = options.price.get(target.name), target.gpu.power
        for cell, planned in plan_cells(target, configs, options.gpus, changes, limit):
            if planned:
                add_figures(cell, *planned, assumed, options.tokens, price, power)
            cells.append(cell)
    mark(cells)
    model, state = _model(options.config[0], configs, changes), train_state(cells)
    goodput = curves(state, assumed) if state else {}
    remarks = notes(cells, assumed, options.price)
    if options.format == "json":
        content = {"model": model, "tokens": options.tokens, "assumed": asdict(assumed)}
        objects = [vars(cell) | {"fits": cell.fits} for cell in cells]
        content |= {"cells": objects, "goodput": goodput, "notes": remarks}
        write(as_json(content), options.output)
    elif options.format == "html":
        write(compare_page(model, options.tokens, cells, goodput, remarks), options.output)
    else:
        show(model, options.tokens, cells, remarks)
    return int(not any(cell.fits for cell in cells))


def _model(config: str, configs: dict[str, Recipe], changes: list[str]) -> str:
    """The name of the model, with the changes that a user makes to it."""
    if config.endswith(".json"):
        return config
    published = MODELS[next(iter(configs.values())).model]
    of_model = [change for change in changes if change.startswith("model.")]
    return ", ".join([model_name(published.family, published.size), *of_model])


def chosen(configs: Sequence[str]) -> tuple[dict[str, Recipe], list[str]]:
    """The recipes that are named, by what loads them, and changes to their model. A model stands
    for all of its recipes, and a `config.json` for those of a model that is changed to it. Raises
    RecipeError for an unknown name, and for recipes of different models."""
    named: list[str] = []
    changes: list[str] = []
    if any(config.endswith(".json") for config in configs):
        if len(configs) > 1:
            raise RecipeError("--config: a config.json excludes other models and recipes")
        base, changes = hugging_face.read(Path(configs[0]))
        configs = [base]
    for config in configs:
        of_model = [name for name in recipes.names() if name.rpartition("_")[0] == config]
        named += of_model or [config]
    loaded = {name: recipes.load(name) for name in named}
    found = dict.fromkeys(recipe.model for recipe in loaded.values())
    if len(found) > 1:
        raise RecipeError(
            f"--config: these recipes train different models, {' and '.join(found)}; "
            "compare one at a time"
        )
    return loaded, changes


def with_system(target: Target, settings: Sequence[str]) -> Target:
    """A GPU with those `--system` settings that are for its name, or for all. Raises
    RecipeError."""
    parts = (text.rpartition(":") for text in settings)
    mine = [text for gpu, _, text in parts if systems.named(gpu) in ("", target.name)]
    return target.changed(mine)


def narrowest(configs: Mapping[str, Recipe], gpu: hardware.Gpu) -> str:
    """The recipe for a GPU: first those in whose format it multiplies, then those with rows of
    several GPUs for it, then the narrowest format. Raises RecipeError for an unknown format."""
    known = ", ".join(NARROWEST)

    def order(config: str) -> tuple[bool, bool, int]:
        recipe = configs[config]
        dtype = recipe.shared["precision"].get("dtype", "bf16")
        if dtype not in NARROWEST:
            raise RecipeError(f"{config}: precision.dtype = {dtype}: expected one of {known}")
        rows = [row for row in recipe.on(gpu).rows if isinstance(row, int) and row > 1]
        return not gpu.multiplies(dtype), not rows, NARROWEST.index(dtype)

    return min(configs, key=order)


def plan_cells(
    target: Target, configs: Mapping[str, Recipe], counts: Sequence[int], changes: list[str],
    limit: int | None,
) -> Iterator[tuple[Cell, tuple[Run, Plan] | None]]:  # fmt: skip
    """The cells of a GPU before they have figures, one for each number of GPUs in `counts`, with
    the row and its plan if there is one. With a `limit`, a plan is the best of a search with so
    many candidates."""
    config = narrowest(configs, target.gpu)
    cells = [Cell(gpu=target.name, gpus=gpus, recipe=configs[config].name) for gpus in counts]
    rows: dict[int, tuple[Run, Recipe]] = {}
    for cell in cells:
        try:
            rows[cell.gpus] = whole_row(config, cell.gpus, changes, target.gpu)
        except RecipeError as error:
            cell.why = str(error)
    found: dict[Run, Plan | str]
    if limit:
        found = {run: tuned(recipe, run, config, limit, target) for run, recipe in rows.values()}
    else:
        plans, failures = plan_all([run for run, _ in rows.values()], target, config)
        found = {**plans, **failures}
    for cell in cells:
        planned = None
        if cell.gpus in rows:
            run, _ = rows[cell.gpus]
            outcome = found[run]
            if isinstance(outcome, Plan):
                planned = run, outcome
            else:
                cell.why = outcome
        yield cell, planned


def whole_row(config: str, gpus: int, changes: list[str], gpu: hardware.Gpu) -> tuple[Run, Recipe]:
    """The recipe's row, or else a derived one, and the recipe with it. A row with fewer layers than
    the model gets all of them. Raises RecipeError, also if the row's model is still not the whole
    one, since cells would compare different models."""
    run, recipe = resolve(config, gpus, changes, gpu)
    whole = MODELS[recipe.model]
    layers = whole.layers
    asked = any(change.partition("=")[0] == "model.layers" for change in changes)
    if run.model.layers != layers and not asked:
        run, recipe = resolve(config, gpus, [*changes, f"model.layers={layers}"], gpu)
    there, expected_there = (flops.parameters(model)["total"] for model in (run.model, whole))
    if there != expected_there and not any(change.startswith("model.") for change in changes):
        raise RecipeError(
            f"the recipe has no row with the whole model here: its nearest row has "
            f"{there / 1e9:.3g} of {expected_there / 1e9:.4g} billion parameters"
        )
    return run, recipe


def tuned(recipe: Recipe, row: Run, config: str, limit: int, target: Target) -> Plan | str:
    """The best plan of a search from a row, or why there is none."""
    try:
        state = search.run(recipe, row, config, limit, target)
    except (RecipeError, RunFailed) as error:
        return str(error)
    best = state.best()
    if best is None:
        return f"none of {len(state.tried)} candidates fits"
    plan = state.tried[best].plan
    assert plan is not None
    return plan


def add_figures(
    cell: Cell, row: Run, plan: Plan, assumed: Assumed, tokens: float, price: float | None,
    power: float,
) -> None:  # fmt: skip
    """Adds to a cell what follows from its plan, or why it has no figures. GPUs draw `power`
    watts."""
    cell.state_bytes = row.optimizer.state_bytes * flops.parameters(row.model)["total"]
    cell.goodput = job_goodput(cell.gpus, cell.state_bytes, assumed)
    cell.work = PlannedRow.of(plan)
    if not plan.fits:
        hint = "--search looks for settings with which it fits"
        cell.why = f"{search.why(plan, None)}; {hint}"
    if unknown := plan.forecast.unknown:
        cell.why = f"no forecast: no rule for {', '.join(unknown)}"
    elif not cell.goodput.share:
        cell.why = "GPUs fail faster than a checkpoint is written"
    else:
        cell.figures = figures(plan, cell.goodput.share, tokens, price, power)


def figures(plan: Plan, share: float, tokens: float, price: float | None, power: float) -> Figures:
    """The figures of a plan, if a `share` of the time is goodput and GPUs draw `power` watts."""
    f, rates, row = plan.forecast, plan.rates["forecast"], plan.published
    days = tokens / (rates.tokens_per_s_per_gpu * plan.gpus) / 86400 / share
    hours = 24 * days * plan.gpus
    return Figures(
        step_s=f.step_s,
        low_s=f.interval.low_s,
        high_s=f.interval.high_s,
        tokens_per_s_per_gpu=rates.tokens_per_s_per_gpu,
        mfu=rates.mfu,
        days=days,
        days_low=days * f.interval.low_s / f.step_s,
        days_high=days * f.interval.high_s / f.step_s,
        gpu_hours=hours,
        cost=hours * price if price else None,
        mwh=hours * power / 1e6 if power else None,
        rests_on={name: seconds / f.step_s for name, seconds in f.rests_on.items()},
        assumed_rates=f.interval.assumed,
        published_step_s=row.step_time_s if row else None,
        published_gpu=row.gpu_type if row else None,
    )


def curves(state: int, assumed: Assumed) -> dict[str, dict[int, float]]:
    """The share of goodput by numbers of GPUs, first at the assumed failure rate and then at the
    other published ones; at the lowest and the highest of them if the assumed one is the user's."""
    given = assumed.mtbf_gpu_hours
    rates = {each.name: each.mtbf_gpu_hours for each in OBSERVED}
    first = next((name for name, hours in rates.items() if hours == given), "--mtbf")
    if first == "--mtbf":
        lowest, *_, highest = sorted(rates, key=rates.__getitem__, reverse=True)
        rates = {name: rates[name] for name in (lowest, highest)}
    curves = {}
    for name, hours in ({first: given} | rates).items():
        here = replace(assumed, mtbf_gpu_hours=hours)
        curves[name] = {n: job_goodput(n, state, here).share for n in CURVE}
    return curves


def notes(cells: Sequence[Cell], assumed: Assumed, prices: Mapping[str, float]) -> list[str]:
    """What the figures rest on, in sentences."""
    given = assumed.mtbf_gpu_hours
    where = next(
        (f"{o.what} ({o.source})" for o in OBSERVED if o.mtbf_gpu_hours == given),
        "as --mtbf says",
    )
    storage = (
        f"{assumed.storage_gb_s:g} GB/s for a job"
        if assumed.storage_gb_s
        else "as fast as Llama 3's, 2,000 GB/s for 16,384 GPUs (arXiv 2407.21783), in proportion"
    )
    result = [
        "Step times are forecasts, and their 90 % intervals rest on the errors on programs that "
        "others timed. Cells whose intervals overlap may come out in the other order.",
        f"Failures: one in {given:,.0f} GPU-hours, {where}. Other GPUs and clusters differ.",
        f"Checkpoints: storage is {storage}. Training waits while a checkpoint is written, at the "
        f"best interval (Daly 2006). A restart takes {assumed.restart_s / 60:g} minutes and the "
        "time to load a checkpoint.",
    ]
    energies = [(cell.gpu, cell.figures.mwh) for cell in cells if cell.figures]
    if any(mwh for _, mwh in energies):
        result.append(
            "Energy: GPUs at their highest power setting all the time, an upper bound for the GPUs "
            "alone; hosts, network and cooling come on top. We know no typical power of these "
            "steps."
        )
    if without_power := dict.fromkeys(gpu for gpu, mwh in energies if not mwh):
        result.append(f"Energy of {', '.join(without_power)}: its power is not known.")
    without_price = dict.fromkeys(cell.gpu for cell in cells if cell.gpu not in prices)
    if prices and without_price:
        result.append(f"No --price is given for {', '.join(without_price)}.")
    works = {(c.gpus, c.work.global_batch, c.work.sequence_length) for c in cells if c.work}
    if len(works) > len({gpus for gpus, _, _ in works}):
        result.append("Batches differ on the same number of GPUs: each recipe has its own.")
    if len({cell.work.precision for cell in cells if cell.work}) > 1:
        result.append("Precisions differ, and a model may need more tokens in a narrower one.")
    return result


def show(model: str, tokens: float, cells: Sequence[Cell], remarks: Sequence[str]) -> None:
    """Prints the table and what it rests on."""
    lines = as_table(cells)
    grid = Table(title=f"{model}, {tokens:g} tokens", box=None, title_justify="left")
    for heading in ("GPUs", "precision"):
        grid.add_column(heading, no_wrap=True)
    intervals = {name for line in lines for name, (_, interval) in line.items() if interval}
    for name in lines[0]:
        grid.add_column(name, justify="right", no_wrap=True)
        if name in intervals:
            grid.add_column("90 % interval", justify="right", no_wrap=True)
    grid.add_column("")
    for cell, line in zip(cells, lines, strict=True):
        texts = [
            text
            for name, both in line.items()
            for text in (both if name in intervals else both[:1])
        ]
        first = [f"{cell.gpus} x {cell.gpu}", cell.work.precision if cell.work else ""]
        grid.add_row(*first, *texts, _last(cell))
    console().print(grid)
    reasons = [f"{cell.gpus} x {cell.gpu}: {cell.why}" for cell in cells if cell.why]
    for text in ["", *reasons, *remarks]:
        print(folded(text))


def _last(cell: Cell) -> str:
    """The last column: in what a cell is best, or what it lacks."""
    if not cell.why:
        return ", ".join(cell.marks)
    if not cell.work:
        return "not planned"
    return "does not fit" if cell.figures else "no figures"
