"""`python -m jaxbench.train --config configs/llama2_70b_bf16.yaml`: one benchmark run, from recipe
to record.

Reads top to bottom: the state, the train step, its compiled program, the loop. The command line is
read in `command`, and `session` surrounds the loop with records, checkpoints and profiles.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxbench import data, environment, hlo, mesh, metrics, ops, xla_flags
from jaxbench.config import Run, RunFailed
from jaxbench.models.decoder import Decoder
from jaxbench.models.layers import Weight
from jaxbench.optimizer import make_optimizer, schedule

DTYPES = {"bf16": jnp.bfloat16, "fp32": jnp.float32}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything that a step changes.

    `step`, an int32 scalar, is the number of the next step; data and schedule follow from it alone.
    """

    step: Any
    model: Decoder
    optimizer: optax.OptState


def init_state(run: Run) -> State:
    """The state before the first step, on the current mesh: fp32 weights and AdamW moments, sharded
    alike."""
    model = Decoder(run.model, key=jax.random.key(run.seed))
    return State(
        jnp.zeros((), jnp.int32), model, make_optimizer(run.optimizer, run.steps).init(model)
    )


def train_step(
    state: State, tokens: jax.Array, targets: jax.Array, run: Run
) -> tuple[State, dict[str, jax.Array]]:
    """One optimizer step over all microbatches (`"microbatch batch seq"`): the next state, and the
    step's figures."""
    loss, grads = gradients(state.model, tokens, targets, run)
    updates, optimizer = make_optimizer(run.optimizer, run.steps).update(
        grads, state.optimizer, state.model
    )
    figures = {
        "loss": loss,
        "grad_norm": optax.tree.norm(grads),
        "learning_rate": schedule(run.optimizer, run.steps)(state.step),
    }
    return State(state.step + 1, optax.apply_updates(state.model, updates), optimizer), figures


def gradients(
    model: Decoder, tokens: jax.Array, targets: jax.Array, run: Run
) -> tuple[jax.Array, Decoder]:
    """Mean loss of the step and its gradient in fp32, sharded like the weights.

    Weights are cast once for all microbatches. A microbatch's gradients are reduce-scattered within
    a replica of the model as they arise; across replicas they are summed once, here, at the end.
    """
    weights = compute_weights(model, DTYPES[run.precision.dtype])
    value_and_grad = jax.value_and_grad(lambda weights, *batch: weights.loss(*batch, run.execution))

    def accumulate(total, batch):
        return jax.tree.map(
            lambda t, g: t + g.astype(t.dtype), total, value_and_grad(weights, *batch)
        ), None

    if run.accumulation == 1:
        total = value_and_grad(weights, tokens[0], targets[0])
    else:
        dtype = DTYPES[run.precision.accumulate]
        zeros = (jnp.zeros(()), jax.tree.map(lambda w: mesh.zero_gradient(w, dtype), weights))
        total, _ = jax.lax.scan(accumulate, zeros, (tokens, targets))
    loss, grads = total
    grads = jax.tree.map(lambda g, w: mesh.sum_replicas(g, w).astype(w.dtype), grads, model)
    return jax.tree.map(lambda x: x / run.accumulation, (loss, grads))


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
    (`target.compile_only_devices`).
    """
    start = time.perf_counter()
    state = jax.eval_shape(partial(init_state, run))
    lowered = make_program(run).lower(state)
    lowered_at = time.perf_counter()
    options = xla_flags.options(run.execution.xla_flags, mesh.platform())
    compiled = lowered.compile(compiler_options=options | (extra_options or {}))
    return compiled, lowered_at - start, time.perf_counter() - lowered_at


def check_program(compiled: Any, run: Run) -> None:
    """Raises RunFailed when the compiled program is not what was asked for."""
    if ops.attention_implementation(run.execution) == "cudnn":
        calls = hlo.Program.parse(compiled.as_text()).custom_calls()
        missing = [name for name in hlo.ATTENTION_CALLS if not calls[name]]
        if missing:
            raise RunFailed(f"fused attention was asked for, but not compiled: no {missing[0]}")


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
        values = {name: float(value) for name, value in jax.device_get(figures).items()}
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
