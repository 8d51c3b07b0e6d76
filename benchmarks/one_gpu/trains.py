"""Does it train? Runs of the command: tiny ones beside a CPU's, real ones beside their plan."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from jaxbench import hardware
from jaxbench.files import write_json
from jaxbench.plan import plan
from jaxbench.planning.command import resolve
from jaxbench.recipe import recipes
from one_gpu.place import (
    MEASURED,
    OK,
    TINIER,
    WRONG,
    Finding,
    Place,
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


def small(place: Place) -> Iterator[Finding]:
    """Every family's smoke row here and on the CPU, from the same seed."""
    steps = 6 if place.rehearsal else STEPS

    def here(recipe: str) -> Trained:
        options = (*tiny(place, recipe), f"--steps={steps}")
        return train(recipe, place.folder / f"here-{recipe}", *options, **small_share(LANES))

    def on_cpu(recipe: str) -> Trained:
        smaller = TINIER if place.rehearsal else ()
        options = ("--cpu-devices=1", f"--steps={steps}", *smaller)
        return train(recipe, place.folder / f"cpu-{recipe}", *options, JAX_PLATFORMS="cpu")

    with place.lanes(LANES) as gpu, place.lanes(2 * LANES) as cpu:
        expected = {recipe: cpu.submit(on_cpu, recipe) for recipe in place.recipes}
        for recipe, run in zip(place.recipes, gpu.map(here, place.recipes), strict=True):
            yield beside_cpu(recipe, run, expected[recipe].result())


def beside_cpu(recipe: str, run: Trained, reference: Trained) -> Finding:
    """The losses of a tiny run beside those of the CPU."""
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


def real(place: Place) -> Iterator[Finding]:
    """Row `1` of a model of each family."""
    for recipe in place.recipes:
        yield row(place, recipe)


def others(place: Place) -> Iterator[Finding]:
    """Row `1` of every other recipe."""
    for recipe in recipes.load_all():
        if recipe.name not in place.recipes:
            yield row(place, recipe.name)


def row(place: Place, recipe: str) -> Finding:
    """A recipe's row `1` through the command: complete, learning, its memory as planned; and what
    it measures, beside the bound."""
    run = train(recipe, place.folder / f"row-{recipe}", f"--steps={STEPS}")
    if run.problem:
        return Finding(f"{recipe}, row 1", WRONG, run.problem)
    record, summary = run.record, run.record["summary"]
    planned = planned_row(place, recipe)
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
    """What is not as it should be with a completed run."""
    record, losses = run.record, run.losses
    if record["status"] != "completed" or len(losses) != STEPS:
        yield f"the record is {record['status']} with {len(losses)} steps"
    if not abs(losses[0] - record["loss"]["ln_vocabulary"]) < 0.1 * losses[0]:
        yield f"the first loss is {losses[0]:.3f}, not near {record['loss']['ln_vocabulary']:.3f}"
    if not all(map(math.isfinite, losses)):
        yield f"losses {losses}"
    peak = record["summary"]["peak_memory_bytes"]
    if planned and peak > planned.bytes_per_device.peak + hardware.RESERVE_BYTES:
        yield f"it took {peak / 2**30:.1f} GiB, more than planned and the reserve"


def plans(place: Place) -> Iterator[Finding]:
    """Plans every row `1`, for those who compare with it; the order is that of their runs."""
    names = [recipe.name for recipe in recipes.load_all() if recipe.name not in place.recipes]
    for name in (*place.recipes, *names):
        run, _ = resolve(name, 1, [])
        made = plan.make_plan(run, place.gpu)
        write_json(plan_file(place, name), asdict(made))
        peak = made.bytes_per_device.peak / 2**30
        figure = f"bound {made.bound_step_s:.4f} s, {made.launches} launches, peak {peak:.1f} GiB"
        yield Finding(f"plan of {name}, row 1", MEASURED, figure, f"{made.compile_s:.0f} s")


def planned_row(place: Place, recipe: str) -> plan.Plan | None:
    """What `plans` has made of a row by now."""
    path = plan_file(place, recipe)
    return plan.read(path) if path.exists() else None


def plan_file(place: Place, recipe: str) -> Path:
    """Where the plan of a row `1` lies."""
    return place.folder / f"plan-{recipe}.json"
