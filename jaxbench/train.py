"""`python -m jaxbench.train --config configs/llama2_70b_bf16.yaml`: one benchmark run, from recipe
to record.

Reads top to bottom: the state, the train step, its compiled program, the loop, the command.
"""

import argparse
import math
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxbench import (
    data,
    environment,
    flops,
    fp8,
    hlo,
    mesh,
    metrics,
    ops,
    published,
    recipes,
    xla_flags,
)
from jaxbench.config import RecipeError, Run, positive
from jaxbench.models.decoder import Decoder, stretches
from jaxbench.models.layers import Weight
from jaxbench.optimizer import make_optimizer, schedule
from jaxbench.routing import Figures
from jaxbench.systems import MEMORY_FRACTION

DTYPES = {"bf16": jnp.bfloat16, "fp8": jnp.bfloat16, "fp32": jnp.float32}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything that a step changes.

    `step`, an int32 scalar, is the number of the next step; data and schedule follow from it alone.
    `fp8` is the history of delayed scaling.
    """

    step: Any
    model: Decoder
    optimizer: optax.OptState
    fp8: Any


class RunFailed(RuntimeError):
    """The run cannot give a valid result. Its text is one line for run.json and the terminal."""


def init_state(run: Run) -> State:
    """The state before the first step, on the current mesh: fp32 weights and AdamW moments, sharded
    alike."""
    model = Decoder(run.model, key=jax.random.key(run.seed))
    optimizer = make_optimizer(run.optimizer, run.steps).init(model)
    return State(jnp.zeros((), jnp.int32), model, optimizer, fp8.init_state(model, run.precision))


def train_step(
    state: State, tokens: jax.Array, targets: jax.Array, run: Run
) -> tuple[State, dict[str, jax.Array]]:
    """One optimizer step over all microbatches (`"microbatch batch seq"`): the next state, and the
    step's figures."""
    (loss, routed), grads, scaling = gradients(state, tokens, targets, run)
    updates, optimizer = make_optimizer(run.optimizer, run.steps).update(
        grads, state.optimizer, state.model
    )
    figures = {
        "loss": loss,
        "grad_norm": optax.tree.norm(grads),
        "learning_rate": schedule(run.optimizer, run.steps)(state.step),
        **routed,
    }
    model = optax.apply_updates(state.model, updates)
    return State(state.step + 1, model, optimizer, scaling), figures


def gradients(
    state: State, tokens: jax.Array, targets: jax.Array, run: Run
) -> tuple[tuple[jax.Array, Figures], Decoder, fp8.State]:
    """(mean loss, figures of the routing) of the step; the loss's gradient in fp32, sharded like
    the weights; and the next state of delayed scaling.

    Weights are cast once for all microbatches. A microbatch's gradients are reduce-scattered within
    a replica of the model as they arise; across replicas they are summed once, here, at the end.
    """
    precision = replace(run.precision, implementation=ops.fp8_implementation(run.precision))
    weights = compute_weights(state.model, DTYPES[precision.dtype])
    constants = fp8.quantize_weights(weights, state.fp8, precision)

    def share_of_loss(weights, observed, *batch):
        model = fp8.attach(weights, constants, observed, precision)
        values = model.loss(*batch, run.execution, precision)
        return jax.tree.map(lambda value: value / run.accumulation, values)

    def one_pass(batch):
        values, (grads, observed) = jax.value_and_grad(share_of_loss, argnums=(0, 1), has_aux=True)(
            weights, fp8.unobserved(state.fp8), *batch
        )
        return (values, grads), observed

    def accumulate(total, batch):
        (total, seen), (new, observed) = total, one_pass(batch)
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, new)
        return (total, jax.tree.map(jnp.maximum, seen, observed)), None

    if run.accumulation == 1:
        total, observed = one_pass((tokens[0], targets[0]))
    else:
        dtype = DTYPES[precision.accumulate]
        (values, _), _ = jax.eval_shape(one_pass, (tokens[0], targets[0]))
        zeros = (
            jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), values),
            jax.tree.map(lambda w: mesh.zero_gradient(w, dtype), weights),
        )
        start = (zeros, fp8.unobserved(state.fp8))
        (total, observed), _ = jax.lax.scan(accumulate, start, (tokens, targets))
    values, grads = total
    grads = jax.tree.map(lambda g, w: mesh.sum_replicas(g, w).astype(w.dtype), grads, state.model)
    return values, grads, fp8.update(state.fp8, weights, observed)


def compute_weights(model: Decoder, dtype) -> Decoder:
    """The model as a step uses it: matrices in the compute dtype, everything marked for local
    accumulation."""

    def prepare(variable):
        w = variable[...].astype(dtype) if isinstance(variable, Weight) else variable[...]
        return variable.replace(mesh.accumulating(w))

    return jax.tree.map(prepare, model, is_leaf=lambda v: isinstance(v, nnx.Variable))


def make_program(run: Run) -> Any:
    """The jitted step with its synthetic batch, state to (state, figures); the state is donated."""
    shape = (run.accumulation, run.microbatch * run.batch_ranks, run.batch.sequence_length)

    def step(state: State):
        batch = data.synthetic(run.seed, state.step, shape, run.model.vocabulary)
        return train_step(state, *batch, run)

    return jax.jit(step, donate_argnums=0)


def compile_program(run: Run, extra: dict[str, Any] | None = None) -> tuple[Any, float, float]:
    """(executable, seconds to lower, seconds to compile) of a step on the current mesh.

    The devices of the mesh need not exist (`target.compile_only_devices`). `extra` compiler options
    are added to those of the recipe.
    """
    start = time.perf_counter()
    state = jax.eval_shape(partial(init_state, run))
    with ops.kernels_of_target():
        lowered = make_program(run).lower(state)
    lowered_at = time.perf_counter()
    options = xla_flags.options(run, mesh.platform()) | (extra or {})
    compiled = lowered.compile(compiler_options=options)
    return compiled, lowered_at - start, time.perf_counter() - lowered_at


def check_program(compiled: Any, run: Run) -> None:
    """Raises RunFailed when the compiled program is not what was asked for; on the current mesh."""
    fused = ops.attention_implementation(run.execution, run.model.softcap) == "cudnn"
    in_fp8 = run.precision.dtype == "fp8" and mesh.platform() == "gpu"
    if not (fused or in_fp8):
        return
    program = hlo.Program.parse(compiled.as_text())
    if fused:
        calls = program.custom_calls()
        missing = [name for name in hlo.ATTENTION_CALLS if not calls[name]]
        if missing:
            raise RunFailed(f"fused attention was asked for, but not compiled: no {missing[0]}")
    if in_fp8:
        model = jax.eval_shape(partial(init_state, run)).model
        found = fp8.compiled_products(program)
        repeats = Counter[str]()
        for stack, span, _, in_bf16 in stretches(run.model, run.execution, run.precision):
            repeats[f"units.{stack}"] += 0 if in_bf16 else span.stop - span.start
        for name in fp8.products(model):
            expected = 3 * repeats[name.partition(".layers.")[0]] * run.accumulation
            runs, others = found[name, True], found[name, False]
            if runs < expected or others:
                raise RunFailed(
                    f"FP8 was asked for, but product {name} runs {runs} times in FP8 and "
                    f"{others} times otherwise; expected at least {expected} and 0"
                )


def run_steps(run: Run, program: Callable, stop: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Trains from the initial state, and yields the figures of each step once it is completed.

    A step is queued before the figures of the one before are awaited, so the device never waits for
    the host; step times are from completion to completion. After `stop()` no step is started.
    """
    state = jax.block_until_ready(jax.jit(partial(init_state, run))())
    clock = metrics.StepClock()

    def completed(step: int, figures: dict[str, jax.Array]) -> dict[str, Any]:
        values = {name: value.tolist() for name, value in jax.device_get(figures).items()}
        return {"step": step, **values, "step_time_s": clock.tick(), **environment.memory()}

    queued: list[tuple[int, dict[str, jax.Array]]] = []
    for step in range(run.steps):
        if stop():
            break
        state, figures = program(state)
        queued.append((step, figures))
        if len(queued) > 1:
            yield completed(*queued.pop(0))
    for step, figures in queued:
        yield completed(step, figures)


def new_record(run: Run) -> dict[str, Any]:
    """run.json as it stands before the first step."""
    hardware = environment.hardware()
    reasons = published.differences(run, hardware["device"])
    row = published.lookup(run)
    return {
        "status": "running",
        "reason": None,
        "label": run.label,
        "comparable": not reasons,
        "not_comparable_because": reasons,
        "recipe": recipes.describe(run),
        "hardware": hardware,
        "versions": environment.versions(),
        "flags": {
            "compiler_options": xla_flags.options(run, hardware["platform"]),
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        },
        "parameters": flops.parameters(run.model)["total"],
        "published": row and asdict(row),
    }


def benchmark(run: Run, folder: Path) -> int:
    """Runs and records; returns the exit status. Only the first process of a job writes."""
    received = collect_signals()
    record = new_record(run)
    recorder = (
        metrics.Recorder(folder, run, record) if jax.process_index() == 0 else metrics.Silent()
    )
    status, reason = "failed", None
    try:
        with jax.set_mesh(mesh.make_mesh(run.mesh_shape)), jax.transfer_guard("disallow"):
            recorder.say(f"compiling {run.recipe}, row {run.row}, mesh {run.mesh_text()} ...")
            compiled, lower_s, compile_s = compile_program(run)
            record |= {"lower_s": lower_s, "compile_s": compile_s}
            recorder.say(f"lowered in {lower_s:.1f} s, compiled in {compile_s:.1f} s; training")
            check_program(compiled, run)
            record["kernels"] = ops.kernels(run.execution, run.precision, run.model.softcap)
            recorder.say(", ".join(f"{part}: {by}" for part, by in record["kernels"].items()))
            recorder.start_steps()
            for step in run_steps(run, compiled, stop=lambda: bool(received)):
                recorder.step(step)
                for name in ("loss", "grad_norm"):
                    if not math.isfinite(step[name]):
                        raise RunFailed(f"{name} is {step[name]} at step {step['step']}")
        status = "interrupted" if received else "completed"
        reason = signal.Signals(received[0]).name if received else None
    except RunFailed as error:
        reason = str(error)
    except KeyboardInterrupt:
        status, reason = "interrupted", "SIGINT"
    except Exception as error:
        reason = traceback.format_exception_only(error)[0].splitlines()[0]
        traceback.print_exc()
    peak = flops.peak_tflops(record["hardware"]["device"], run.precision.dtype)
    recorder.finish(status, reason, peak)
    return 128 + received[0] if status == "interrupted" else int(status == "failed")


def collect_signals() -> list[int]:
    """The list to which SIGINT and SIGTERM go from now on; a second one interrupts at once."""
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return received


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options of `python -m jaxbench.train`."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxbench.train", description="Runs one training benchmark."
    )
    parser.add_argument(
        "--config", required=True, help="recipe file, such as configs/llama2_70b_bf16.yaml"
    )
    parser.add_argument("--gpus", type=int, help="fail unless the job has exactly this many GPUs")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting of the row: parallelism.fsdp=4",
    )
    parser.add_argument(
        "--steps", type=int, default=50, help="optimizer steps (default 50, as published)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and tokens")
    parser.add_argument(
        "--output",
        type=Path,
        help="new folder for the records (default results/<recipe>/<row>/<time>)",
    )
    parser.add_argument(
        "--cpu-devices", type=int, metavar="N", help="use N virtual CPU devices, to try a mesh"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command; returns 0, 1 for a failed run, 2 for a user's mistake, or 128 + a signal."""
    args = parse_arguments(argv)
    try:
        recipe = recipes.load(args.config)
        overrides = recipes.parse_overrides(args.set)
        if args.cpu_devices is not None:
            positive("--cpu-devices", args.cpu_devices)
        xla_flags.check_environment(os.environ.get("XLA_FLAGS", ""))
        environment.select_platform(args.cpu_devices)
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))
        environment.join_job()
        devices, platform = jax.device_count(), jax.devices()[0].platform
        if platform == "cpu" and args.cpu_devices is None and environment.has_nvidia_gpu():
            print(
                "warning: JAX does not see this machine's GPU: pip install '.[gpu]'",
                file=sys.stderr,
            )
        row = recipes.choose_row(recipe, platform, devices, args.gpus)
        run = recipes.resolve(
            recipe, row, devices=devices, overrides=overrides, steps=args.steps, seed=args.seed
        )
        folder = args.output or Path("results", run.recipe, run.row, time.strftime("%Y%m%d-%H%M%S"))
        ops.fp8_implementation(run.precision)
        if (folder / "run.json").exists():
            raise RecipeError(f"--output {folder} already holds a run; name another folder")
        folder.mkdir(parents=True, exist_ok=True)
    except (RecipeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return benchmark(run, folder)


if __name__ == "__main__":
    sys.exit(main())
