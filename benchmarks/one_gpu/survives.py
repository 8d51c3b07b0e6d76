"""Does the rest live? Kill and resume, the profiler, PGLE, the compiler's options: each with a
tiny run of the command."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxbench.run import checkpoint
from one_gpu.place import (
    NOT_RUN,
    OK,
    ROOT,
    WRONG,
    Finding,
    Place,
    command,
    largest_difference,
    small_share,
    tiny,
    train,
)  # fmt: skip
from one_gpu.trains import LOSS

RECIPE = "llama31_8b_fp8"
LANES = 3
LONG, EVERY = 400, 25
"""Steps of the run that is killed, and those after which it saves."""


def check(place: Place) -> Iterator[Finding]:
    """All of them, some beside each other; those that read the GPU through CUPTI in turn."""
    lanes: list[list[Callable[[Place], Finding]]] = [
        [killed], [profiled, guided], [published_flags, default_flags],
    ]  # fmt: skip
    with place.lanes(LANES) as pool:
        for findings in pool.map(lambda lane: [one(place) for one in lane], lanes):
            yield from findings


def run(place: Place, name: str, *options: str, steps: int = 12):
    """The tiny run with some options."""
    arguments = (*tiny(place, RECIPE), f"--steps={steps}", *options)
    return train(RECIPE, place.folder / name, *arguments, **small_share(LANES))


def killed(place: Place) -> Finding:
    """A run that is killed while it trains, and resumed, ends as an undisturbed one."""
    what = "kill -9 and --resume"
    steps = LONG // 10 if place.rehearsal else LONG
    every = f"--checkpoint-every={EVERY // 5 if place.rehearsal else EVERY}"
    folder = place.folder / "killed"
    options = (*tiny(place, RECIPE), f"--steps={steps}", every, "--resume")
    process = subprocess.Popen(
        command(RECIPE, folder, *options), cwd=ROOT, stdout=subprocess.DEVNULL,
        env=os.environ | small_share(LANES),
    )  # fmt: skip
    while process.poll() is None and not checkpoint.steps(folder / checkpoint.FOLDER):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        return Finding(what, WRONG, "it ended before it was killed")
    resumed = run(place, "killed", every, "--resume", steps=steps)
    whole = run(place, "whole", steps=steps)
    if problem := resumed.problem or whole.problem:
        return Finding(what, WRONG, problem)
    at = resumed.record["resumed_at"]
    difference = largest_difference(resumed.losses, whole.losses)
    fine = at and difference <= LOSS
    figure = "bit for bit" if difference == 0 else f"losses differ by {difference:.1e}"
    return Finding(what, OK if fine else WRONG, figure, f"resumed at {at}, {steps} steps")


def profiled(place: Place) -> Finding:
    """The JAX profiler writes a trace in which the device's work stands."""
    what = "--profile jax"
    done = run(place, "profiled", "--profile=jax", "--profile-steps=6-9")
    if done.problem:
        return Finding(what, WRONG, done.problem)
    events = sum(1 for _ in operations(done.folder / "profile"))
    return Finding(what, OK if events else WRONG, f"{events} operations of 3 steps")


def operations(trace: Path) -> Iterator[tuple[str, int, int]]:
    """(name in the compiled program, start, duration in ns) of what the devices ran under a JAX
    profile."""
    for path in trace.glob("**/*.xplane.pb"):
        data = jax.profiler.ProfileData.from_file(str(path))
        planes = list(data.planes)
        devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
        for plane in devices or planes:
            for line in plane.lines:
                for event in line.events:
                    if (name := dict(event.stats).get("hlo_op")) is not None:
                        yield str(name), int(event.start_ns), int(event.duration_ns)


def guided(place: Place) -> Finding:
    """PGLE from its profile to the program that was compiled with it."""
    what = "--pgle"
    if place.rehearsal:
        return Finding(what, NOT_RUN, "a CPU has no latencies to hide")
    done = run(place, "pgle", "--pgle")
    if done.problem:
        return Finding(what, WRONG, done.problem)
    found = done.record["pgle"]
    after = done.record["summary"]["step_time_s"]["mean"]
    ratio = after / found["step_time_before_s"]
    return Finding(what, OK, f"names {found['coverage']:.0%} of the program", f"step {ratio:.2f}",
                   found)  # fmt: skip


def published_flags(place: Place) -> Finding:
    """The compiler takes the published options."""
    return flags(place, "published")


def default_flags(place: Place) -> Finding:
    """The compiler's own defaults train too."""
    return flags(place, "default")


def flags(place: Place, name: str) -> Finding:
    """The tiny run with a set of compiler options."""
    what = f"execution.xla_flags={name}"
    done = run(place, f"flags-{name}", f"--set={what}")
    if done.problem:
        return Finding(what, WRONG, done.problem)
    return Finding(what, OK, f"compiled in {done.record['compile_s']:.1f} s")
