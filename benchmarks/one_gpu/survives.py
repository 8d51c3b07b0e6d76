"""Kill and resume, profiler, PGLE and compiler options, each with a tiny run of the command."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from jaxbench.jax_internals import profile_events, profiled_instruction
from jaxbench.run import saved_checkpoints
from one_gpu.context import (
    NOT_RUN,
    OK,
    ROOT,
    WRONG,
    Context,
    Finding,
    command,
    largest_difference,
    small_share,
    tiny,
    train,
)  # fmt: skip
from one_gpu.trains import LOSS

RECIPE = "llama31_8b_fp8"
LANES = 3
LONG, EVERY = 200, 50
"""Steps of the run that is killed, and between its saves."""


def check(ctx: Context) -> Iterator[Finding]:
    """Runs all in concurrent lanes, and reports each as it ends; those that use CUPTI share one
    lane."""
    lanes = [[killed], [profiled, guided], [default_flags]]
    found: SimpleQueue[Finding] = SimpleQueue()

    def run_lane(lane: list[Callable[[Context], Finding]]) -> None:
        for one in lane:
            try:
                found.put(one(ctx))
            except Exception as error:
                found.put(Finding("survives", WRONG, f"{error}".splitlines()[0]))

    with ctx.lanes(LANES) as pool:
        for lane in lanes:
            pool.submit(run_lane, lane)
        for _ in range(sum(map(len, lanes))):
            yield found.get()


def run(ctx: Context, name: str, *options: str, steps: int = 12):
    """The tiny run with options."""
    arguments = (*tiny(ctx, RECIPE), f"--steps={steps}", *options)
    return train(RECIPE, ctx.folder / name, *arguments, **small_share(LANES))


def killed(ctx: Context) -> Finding:
    """Kills a run while it trains, resumes it, and compares it with an undisturbed one."""
    what = "kill -9 and --resume"
    steps = LONG // 10 if ctx.rehearsal else LONG
    every = f"--checkpoint-every={EVERY // 5 if ctx.rehearsal else EVERY}"
    folder = ctx.folder / "killed"
    options = (*tiny(ctx, RECIPE), f"--steps={steps}", every, "--resume")
    process = subprocess.Popen(
        command(RECIPE, folder, *options), cwd=ROOT, stdout=subprocess.DEVNULL,
        env=os.environ | small_share(LANES),
    )  # fmt: skip
    while process.poll() is None and not saved_checkpoints.steps(folder / saved_checkpoints.FOLDER):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        return Finding(what, WRONG, "it ended before it was killed")
    resumed = run(ctx, "killed", every, "--resume", steps=steps)
    whole = run(ctx, "whole", steps=steps)
    if problem := resumed.problem or whole.problem:
        return Finding(what, WRONG, problem)
    at = resumed.record["resumed_at"]
    difference = largest_difference(resumed.losses, whole.losses)
    fine = at and difference <= LOSS
    figure = "bit for bit" if difference == 0 else f"losses differ by {difference:.1e}"
    return Finding(what, OK if fine else WRONG, figure, f"resumed at {at}, {steps} steps")


def profiled(ctx: Context) -> Finding:
    """Checks that a JAX profile contains the device's operations."""
    what = "--profile jax"
    done = run(ctx, "profiled", "--profile=jax", "--profile-steps=6-9")
    if done.problem:
        return Finding(what, WRONG, done.problem)
    events = sum(bool(profiled_instruction(e)) for e in profile_events(done.folder / "profile"))
    return Finding(what, OK if events else WRONG, f"{events} operations of 3 steps")


def guided(ctx: Context) -> Finding:
    """Runs with --pgle, from the profile to the recompiled program."""
    what = "--pgle"
    if ctx.rehearsal:
        return Finding(what, NOT_RUN, "a CPU has no latencies to hide")
    done = run(ctx, "pgle", "--pgle")
    if done.problem:
        return Finding(what, WRONG, done.problem)
    pgle = done.record["pgle"]
    after = done.record["summary"]["step_time_s"]["mean"]
    ratio = after / pgle["step_time_before_s"]
    return Finding(what, OK, f"names {pgle['coverage']:.0%} of the program", f"step {ratio:.2f}",
                   pgle)  # fmt: skip


def default_flags(ctx: Context) -> Finding:
    """The tiny run with XLA's own options, in bf16: by default XLA may choose Triton's products,
    which are not known as FP8."""
    what = "execution.xla_flags=default"
    done = run(ctx, "flags-default", f"--set={what}", "--set=precision.dtype=bf16")
    if done.problem:
        return Finding(what, WRONG, done.problem)
    return Finding(what, OK, f"compiled in {done.record['compile_s']:.1f} s")
