"""Runs of the training command: tiny ones beside a CPU's losses, real ones beside their plan."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from jaxbench import hardware
from jaxbench.files import write_json
from jaxbench.plan import plan
from jaxbench.plan.command import resolve
from jaxbench.recipe import recipes
from one_gpu.context import (
    MEASURED,
    OK,
    TINIER,
    WRONG,
    Context,
    Finding,
    Trained,
    largest_difference,
    small_share,
    tiny,
    train,
)

LANES = 4
STEPS = 20

LOSS = 0.01
"""Largest relative difference of a loss from the CPU's. A product's result is rounded to bf16,
2^-9 of it, after sums in another order; meshes of a CPU, which differ by that alone, keep within
2e-3 over 50 steps (tests/train). Kernels that also round probabilities have five times as much."""


def small(ctx: Context) -> Iterator[Finding]:
    """Trains every family's smoke row here and on the CPU, from the same seed."""
    steps = 6 if ctx.rehearsal else STEPS

    def here(recipe: str) -> Trained:
        options = (*tiny(ctx, recipe), f"--steps={steps}")
        return train(recipe, ctx.folder / f"here-{recipe}", *options, **small_share(LANES))

    def on_cpu(recipe: str) -> Trained:
        smaller = TINIER if ctx.rehearsal else ()
        options = ("--cpu-devices=1", f"--steps={steps}", *smaller)
        return train(recipe, ctx.folder / f"cpu-{recipe}", *options, JAX_PLATFORMS="cpu")

    with ctx.lanes(LANES) as gpu, ctx.lanes(2 * LANES) as cpu:
        expected = {recipe: cpu.submit(on_cpu, recipe) for recipe in ctx.recipes}
        for recipe, run in zip(ctx.recipes, gpu.map(here, ctx.recipes), strict=True):
            yield beside_cpu(recipe, run, expected[recipe].result())


def beside_cpu(recipe: str, run: Trained, reference: Trained) -> Finding:
    """Compares the losses of a tiny run with the CPU's."""
    what = f"{recipe}, tiny"
    if problem := run.problem or reference.problem:
        return Finding(what, WRONG, problem)
    difference = largest_difference(run.losses, reference.losses)
    same = difference <= LOSS
    figure = f"losses differ by {difference:.1e}"
    ends = f"{run.losses[0]:.4f} to {run.losses[-1]:.4f}, CPU {reference.losses[-1]:.4f}"
    kernels = run.record["kernels"]
    text = f"{ends}; {kernels['attention']}, {kernels['products']}"
    return Finding(what, OK if same else WRONG, figure, text, {"kernels": kernels})


def real(ctx: Context) -> Iterator[Finding]:
    """Runs row `1` of one model of each family."""
    for recipe in ctx.recipes:
        yield row(ctx, recipe)


def others(ctx: Context) -> Iterator[Finding]:
    """Runs row `1` of every other recipe."""
    for recipe in recipes.load_all():
        if recipe.name not in ctx.recipes:
            yield row(ctx, recipe.name)


def row(ctx: Context, recipe: str) -> Finding:
    """Runs a recipe's row `1`, which must complete, as a run with implausible losses does not, and
    within the planned memory; reports its speed beside the bound."""
    run = train(recipe, ctx.folder / f"row-{recipe}", f"--steps={STEPS}")
    if run.problem:
        return Finding(f"{recipe}, row 1", WRONG, run.problem)
    record, summary = run.record, run.record["summary"]
    planned = planned_row(ctx, recipe)
    wrong = list(complaints(run, planned))
    step, mfu = summary["step_time_s"], summary["mfu"]
    figure = f"{step['mean']:.4f} s +- {step['std']:.4f}, MFU " + ", ".join(
        f"{100 * mfu[c]:.1f} % {c}" for c in ("published", "causal", "full") if mfu[c]
    )
    beside = [
        f"peak {summary['peak_memory_bytes'] / 2**30:.1f} GiB",
        f"compiled in {record['compile_s']:.0f} s",
        *(f"{part}: {by}" for part, by in record["kernels"].items()),
    ]
    if planned is not None:
        ratio = step["mean"] / planned.bound_step_s
        beside[:0] = [
            f"bound {planned.bound_step_s:.4f} s, {ratio:.2f} of it",
            f"planned {planned.bytes_per_device.peak / 2**30:.1f} GiB",
        ]
    text = "; ".join((*wrong, *beside))
    return Finding(f"{recipe}, row 1", WRONG if wrong else OK, figure, text, summary)


def complaints(run: Trained, planned: plan.Plan | None) -> Iterator[str]:
    """Problems of a completed run."""
    record = run.record
    if record["status"] != "completed" or len(run.steps) != STEPS:
        yield f"the record is {record['status']} with {len(run.steps)} steps"
    peak = record["summary"]["peak_memory_bytes"]
    if planned and peak > planned.bytes_per_device.peak + hardware.RESERVE_BYTES:
        yield f"it took {peak / 2**30:.1f} GiB, more than planned and the reserve"


def plans(ctx: Context) -> Iterator[Finding]:
    """Plans every row `1`, in the order of the runs that are compared with the plans."""
    names = [recipe.name for recipe in recipes.load_all() if recipe.name not in ctx.recipes]
    for name in (*ctx.recipes, *names):
        run, _ = resolve(name, 1, [], ctx.gpu)
        planned = plan.make_plan(run, ctx.gpu)
        write_json(plan_file(ctx, name), asdict(planned))
        peak = planned.bytes_per_device.peak / 2**30
        figure = (
            f"bound {planned.bound_step_s:.4f} s, {planned.launches} launches, peak {peak:.1f} GiB"
        )
        yield Finding(f"plan of {name}, row 1", MEASURED, figure, f"{planned.compile_s:.0f} s")


def planned_row(ctx: Context, recipe: str) -> plan.Plan | None:
    """The plan of a row, if `plans` has made it already."""
    path = plan_file(ctx, recipe)
    return plan.read(path) if path.exists() else None


def plan_file(ctx: Context, recipe: str) -> Path:
    """The file of the plan of a row `1`."""
    return ctx.folder / f"plan-{recipe}.json"
