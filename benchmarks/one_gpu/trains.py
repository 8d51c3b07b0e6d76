"""Runs of the training command: tiny ones next to a CPU's losses, and real ones."""

import json
import subprocess
import sys
from collections.abc import Iterator

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
    """Trains every family's smoke row here and on the CPU, from the same seed."""
    steps = 6 if ctx.rehearsal else STEPS // 2

    def here(recipe: str) -> Trained:
        options = (*tiny(ctx, recipe), f"--steps={steps}")
        return train(recipe, ctx.folder / f"here-{recipe}", *options, **small_share(LANES))

    def on_cpu(recipe: str) -> Trained:
        smaller = TINIER if ctx.rehearsal else ()
        options = ("--cpu-devices=1", f"--steps={steps}", *smaller)
        return train(recipe, ctx.folder / f"cpu-{recipe}", *options, JAX_PLATFORMS="cpu")

    with ctx.lanes(LANES) as gpu, ctx.lanes(LANES) as cpu:
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


PAIRS = (
    ("llama31_8b_fp8", ()),
    ("llama31_8b_bf16", ("--check-repeatable",)),
    ("llama2_70b_bf16", ()),
    ("llama2_70b_bf16", ("--set=execution.offload=gate,up",)),
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
