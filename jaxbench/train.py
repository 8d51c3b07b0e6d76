"""`python -m jaxbench.train --config configs/llama2_70b_bf16.yaml`: one benchmark run, from recipe
to record.

Reads top to bottom: the state, the train step, its compiled program, the loop. The command line is
read in `command`, and `session` surrounds the loop with records, checkpoints and profiles.
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxbench import data, environment, fp8, hlo, mesh, metrics, ops, xla_flags
from jaxbench.config import Run, RunFailed
from jaxbench.models.decoder import Decoder, stretches
from jaxbench.models.layers import Weight
from jaxbench.optimizer import make_optimizer, schedule
from jaxbench.routing import Figures

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


def compile_program(
    run: Run, extra_options: dict[str, Any] | None = None
) -> tuple[Any, float, float]:
    """(executable, seconds to lower, seconds to compile) of a step on the current mesh.

    `extra_options` are compiler options beyond the recipe's. The devices of the mesh need not exist
    (`target.compile_only_devices`). Raises RunFailed for an option that the compiler does not know.
    """
    start = time.perf_counter()
    state = jax.eval_shape(partial(init_state, run))
    with ops.kernels_of_target():
        lowered = make_program(run).lower(state)
    lowered_at = time.perf_counter()
    options = xla_flags.options(run, mesh.platform()) | (extra_options or {})
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if unknown := re.search(r"No such compile option: '(\w+)'", str(error)):
            raise RunFailed(xla_flags.explain(unknown.group(1))) from error
        raise
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


@runtime_checkable
class Pause(Protocol):
    """Something that is done between steps while the device is idle, such as a save."""

    def due(self, step: int, ending: bool) -> bool:
        """Whether `act` is to be called after `step` steps of training."""

    def act(self, step: int, state: State, ending: bool) -> None:
        """Does it, with the state after `step` steps. Its time is in no step time."""


def run_steps(
    run: Run,
    program: Callable,
    stop: Callable[[int], bool] = lambda step: False,
    state: State | None = None,
    pauses: Sequence[Pause] = (),
) -> Iterator[dict[str, Any]]:
    """Trains from `state`, or the initial one, and yields the figures of each step once it is
    completed.

    A step is queued before the figures of the one before are awaited, so the device never waits for
    the host; step times are from completion to completion, and `wait_s` is the part for which the
    host waited. No step n is started after `stop(n)`.
    """
    if state is None:
        state = jax.block_until_ready(jax.jit(partial(init_state, run))())
    clock = metrics.StepClock()

    def completed(step: int, figures: dict[str, jax.Array]) -> dict[str, Any]:
        asked = time.perf_counter()
        values = {name: value.tolist() for name, value in jax.device_get(figures).items()}
        times = {"wait_s": time.perf_counter() - asked, "step_time_s": clock.tick()}
        return {"step": step, **values, **times, **environment.memory()}

    queued: list[tuple[int, dict[str, jax.Array]]] = []
    for step in range(int(jax.device_get(state.step)), run.steps + 1):
        ending = step == run.steps or stop(step)
        due = [pause for pause in pauses if pause.due(step, ending)]
        while queued and (due or ending or len(queued) > 1):
            yield completed(*queued.pop(0))
        for pause in due:
            pause.act(step, state, ending)
        if ending:
            return
        if due:
            clock.tick()
        state, figures = program(state)
        queued.append((step, figures))


def main(argv: list[str] | None = None) -> int:
    """The command, which `command.main` reads and `session.benchmark` runs."""
    from jaxbench import command

    return command.main(argv)


if __name__ == "__main__":
    sys.exit(main())
