"""Runs of the training command: tiny ones next to a CPU's losses, and real ones."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

from jaxbench.base.versions import versions
from one_gpu.context import (
    OK,
    ROOT,
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

LANES = 8
STEPS = 20

LOSS = 0.01
"""Largest relative difference of a loss from the CPU's. A product's result is rounded to bf16,
2^-9 of it, after sums in another order; meshes of a CPU, which differ by that alone, keep within
2e-3 over 50 steps (tests/train). Kernels that also round probabilities have five times as much."""


def small(ctx: Context) -> Iterator[Finding]:
    """Trains every family's smoke row here and on the CPU, from the same seed. The CPU's runs stay
    in the output folder: a later call with the same source does not repeat them, so that they can
    be made before there is a GPU (`references`)."""
    steps = 6 if ctx.rehearsal else STEPS // 2

    def here(recipe: str) -> Trained:
        options = (*tiny(ctx, recipe), f"--steps={steps}")
        return train(recipe, ctx.folder / f"here-{recipe}", *options, **small_share(LANES))

    on_cpu = partial(reference, ctx, steps)
    with ctx.lanes(LANES) as gpu, ctx.lanes(LANES) as cpu, ThreadPoolExecutor() as both:
        pairs = [(recipe, gpu.submit(here, recipe), cpu.submit(on_cpu, recipe))
                 for recipe in ctx.recipes]  # fmt: skip
        compared = [
            both.submit(lambda r, a, b: beside_cpu(r, a.result(), b.result()), *pair)
            for pair in pairs
        ]
        for finding in as_completed(compared):
            yield finding.result()


def reference(ctx: Context, steps: int, recipe: str) -> Trained:
    """A tiny run on the CPU, or that of an earlier call with the same source."""
    done = Trained(ctx.output / "cpu" / recipe, 0, "")
    if (done.folder / "run.json").exists():
        same = done.record["versions"]["source"] == versions()["source"]
        if same and done.record["status"] == "completed" and len(done.steps) == steps:
            return done
        shutil.rmtree(done.folder)
    smaller = TINIER if ctx.rehearsal else ()
    options = ("--cpu-devices=1", f"--steps={steps}", *smaller)
    return train(recipe, done.folder, *options, JAX_PLATFORMS="cpu")


def references(ctx: Context) -> Iterator[Finding]:
    """The CPU's tiny runs alone."""
    for recipe in ctx.recipes:
        run = reference(ctx, STEPS // 2, recipe)
        yield Finding(f"{recipe}, tiny, on the CPU", WRONG if run.problem else OK, run.problem)


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


PAIRS = (
    ("llama2_70b_bf16", ()),
    ("llama2_70b_bf16", ("--set=execution.offload=gate,up",)),
    ("llama31_8b_fp8", ("--check-repeatable",)),
    ("llama31_8b_bf16", ("--pgle",)),
)
"""Recipes whose row `1` runs by the command, and options; offloading must not change a loss."""


def commands(ctx: Context) -> Iterator[Finding]:
    """`jaxbench check`, and row `1` by the training command: complete, with the same losses each
    time."""
    yield checked(ctx)
    losses: dict[str, list[float]] = {}
    for number, (recipe, options) in enumerate(PAIRS):
        run = train(recipe, ctx.folder / f"row-{number}", f"--steps={STEPS}", *options)
        what = " ".join([recipe, *options])
        if run.problem:
            yield Finding(what, WRONG, run.problem)
            continue
        record, summary = run.record, run.record["summary"]
        step, mfu = summary["step_time_s"], summary["mfu"]["causal"]
        wrong = list(complaints(run, losses.setdefault(recipe, run.losses)))
        figure = f"{step['mean']:.4f} s +- {step['std']:.4f}, MFU {100 * mfu:.1f} %"
        beside = (
            *wrong,
            f"peak {summary['peak_memory_bytes'] / 2**30:.1f} GiB",
            f"compiled in {record['compile_s']:.0f} s",
            *(f"{part}: {by}" for part, by in record["kernels"].items()),
            *(f"{key}: {record[key]}" for key in ("repeatable", "pgle") if key in record),
        )
        data = {"summary": summary, "ranks": record.get("ranks"), "losses": run.losses}
        yield Finding(what, WRONG if wrong else OK, figure, "; ".join(beside), data)


def checked(ctx: Context) -> Finding:
    """`jaxbench check` of this GPU."""
    program = [sys.executable, "-m", "jaxbench.check", "--output", str(ctx.folder / "check")]
    done = subprocess.run(
        program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(f"$ jaxbench check\n{done.stdout}", flush=True)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    verdict = OK if done.returncode == 0 else WRONG
    rates = {}
    if (path := ctx.folder / "check" / "check.json").exists():
        rates = json.loads(path.read_text())
    return Finding("jaxbench check", verdict, last, data=rates)


def complaints(run: Trained, losses: list[float]) -> Iterator[str]:
    """Problems of a completed run; `losses` are those of the same recipe's first run."""
    if run.record["status"] != "completed" or len(run.steps) != STEPS:
        yield f"the record is {run.record['status']} with {len(run.steps)} steps"
    if (difference := largest_difference(run.losses, losses)) > LOSS:
        yield f"losses differ by {difference:.1e} from the first run's"
