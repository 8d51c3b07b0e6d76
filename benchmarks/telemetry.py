"""Measures what telemetry costs a step, on null GPUs.

    python benchmarks/telemetry.py [--rounds 20] [--seconds 4] [--gpus 8]

A tiny Llama trains on null GPUs (`tests/null_gpu`) whose kernels take some time, so that the host
waits for them as it does for real ones. In turn, for some seconds each, nothing samples the GPUs, a
thread of the process samples them, or another process does, 50 times as often as in a run. Prints
by which share of a step sampling once a second is slower (the ratio of the medians of neighbouring
parts, less one, divided by 50) with its standard error, and the processor time of a sample. The
null driver's NVML returns at once. A real driver takes longer, but it does not hold Python's lock.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "null_gpu"))

import null_gpus

KERNEL_US = 100
OFTEN_S = 0.02
"""Seconds between samples here, 50 times as often as in a run: the cost of one a second is far
below the variation of steps."""

CHILD = """
import sys
from jaxbench.cluster.nvml import gpus; from jaxbench.cluster.telemetry import Sampler
with Sampler(gpus(visible=False), float(sys.argv[1])): sys.stdin.read()
"""


@contextmanager
def nobody():
    """No telemetry."""
    yield


@contextmanager
def thread():
    """As in a run, but more often."""
    from jaxbench.cluster.nvml import gpus
    from jaxbench.cluster.telemetry import Sampler

    with Sampler(gpus(visible=False), OFTEN_S):
        yield


@contextmanager
def process():
    """The same in a process of its own, from when it has started."""
    command = [sys.executable, "-c", CHILD, str(OFTEN_S)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    time.sleep(2)
    yield
    child.stdin.close()
    child.wait()


def prepared(gpus):
    """The program of a tiny row and its first state."""
    import jax

    from jaxbench import mesh
    from jaxbench.recipe import recipes
    from jaxbench.train.program import compile_program
    from jaxbench.train.step import init_state

    texts = [f"parallelism.fsdp={gpus}", f"batch.global_batch={gpus}"]
    pairs = [text for text in null_gpus.TINY if not text.startswith(("parallel", "batch.global"))]
    overrides = recipes.parse_overrides([*pairs, *texts])
    recipe = recipes.load("llama31_8b_bf16")
    run = recipes.resolve(recipe, 8, devices=gpus, overrides=overrides)
    jax.set_mesh(mesh.make_mesh(run.mesh_shape))
    program = compile_program(run).program
    return program, jax.block_until_ready(jax.jit(lambda: init_state(run))())


def steps(program, state, seconds):
    """(the state after some seconds of training, seconds of each step)."""
    import jax

    times, end = [], time.perf_counter() + seconds
    state, figures = program(state)
    while (began := time.perf_counter()) < end:
        state, following = program(state)
        jax.device_get(figures)
        figures = following
        times.append(time.perf_counter() - began)
    return jax.block_until_ready(state), times


def inside(args):
    """What runs on the null GPUs."""
    from jaxbench.cluster.nvml import gpus

    program, state = prepared(args.gpus)
    state, _ = steps(program, state, 5)
    medians = {nobody: [], thread: [], process: []}
    for _ in range(args.rounds):
        for kind, found in medians.items():
            with kind():
                state, times = steps(program, state, args.seconds)
            found.append(statistics.median(times))
    print(f"{args.gpus} null GPUs, {1000 * statistics.median(medians[nobody]):.1f} ms per step")
    for kind in (thread, process):
        ratios = [a / b for a, b in zip(medians[kind], medians[nobody], strict=True)]
        percent = 100 * OFTEN_S * (statistics.fmean(ratios) - 1)
        error = 100 * OFTEN_S * statistics.stdev(ratios) / len(ratios) ** 0.5
        print(f"{kind.__name__}: {percent:+.3f} % of a step at one sample a second, "
              f"standard error {error:.3f} %, {len(ratios)} rounds")  # fmt: skip
    every, began = gpus(visible=False), time.thread_time()
    for _ in range(200):
        [gpu.sample() for gpu in every]
    cpu_ms = 1000 * (time.thread_time() - began) / 200
    print(f"processor time of a sample of all GPUs: {cpu_ms:.2f} ms, {cpu_ms / 10:.3f} % of 1 s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args)
        sys.stdout.flush()
        os._exit(0)  # an orderly end waits for null GPUs
    words = ("--inside", "--rounds", args.rounds, "--seconds", args.seconds, "--gpus", args.gpus)
    command = null_gpus.start(
        program=(__file__, *map(str, words)), folder=Path(),
        **null_gpus.environment(args.gpus, kernel_us=KERNEL_US),
    ).wait(3600)  # fmt: skip
    print(command.out if command.status == 0 else command.text)


if __name__ == "__main__":
    main()
