"""The training loop, and actions between its steps."""

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax

from jaxbench.recipe.settings import Run
from jaxbench.train.step import State, init_state


@runtime_checkable  # tests check types at run time
class Pause(Protocol):
    """An action between two steps while the device is idle, such as a save."""

    def due(self, step: int, ending: bool) -> bool:
        """True if `act` is to be called after `step` steps of training."""

    def act(self, step: int, state: State, ending: bool) -> None:
        """Acts on the state after `step` steps. Step times exclude the duration."""


def run_steps(
    run: Run,
    program: Callable,
    stop: Callable[[int], bool] = lambda step: False,
    state: State | None = None,
    pauses: Sequence[Pause] = (),
) -> Iterator[dict[str, Any]]:
    """Trains from `state`, or from the initial one, and yields the figures of each completed step.

    A step is queued before the figures of the previous one are awaited, so the device never waits
    for the host. Step times are from completion to completion. `wait_s` is the part of the step
    time for which the host waited. `host_s` is the time from the completion of the previous step
    until the caller asked for the next figures; it lengthens a step only if it is longer than the
    step. No step n is started after `stop(n)`.
    """
    if state is None:
        state = new_state(run)
    last_completed, host_s = time.perf_counter(), 0.0

    def completed(step: int, figures: dict[str, jax.Array]) -> dict[str, Any]:
        nonlocal last_completed
        waiting_since = time.perf_counter()
        values = {name: value.tolist() for name, value in jax.device_get(figures).items()}
        end = time.perf_counter()
        step_time_s, last_completed = end - last_completed, end
        times = {"wait_s": end - waiting_since, "step_time_s": step_time_s, "host_s": host_s}
        return {"step": step, **values, **times, **memory()}

    queued: list[tuple[int, dict[str, jax.Array]]] = []
    for step in range(int(jax.device_get(state.step)), run.steps + 1):
        ending = step == run.steps or stop(step)
        due = [pause for pause in pauses if pause.due(step, ending)]
        while queued and (due or ending or len(queued) > 1):
            yield completed(*queued.pop(0))
            host_s = time.perf_counter() - last_completed
        if due:
            # Figures are of the first device alone. Waiting for all here makes a device that hangs
            # do so in the phase `training`.
            jax.block_until_ready(state)
        for pause in due:
            pause.act(step, state, ending)
        if ending:
            return
        if due:
            last_completed, host_s = time.perf_counter(), 0.0
        state, figures = program(state)
        queued.append((step, figures))


def new_state(run: Run) -> State:
    """The initial state on the current mesh."""
    return jax.block_until_ready(jax.jit(partial(init_state, run))())


def memory() -> dict[str, int]:
    """Bytes in use on the first local device, and their peak. On CPUs the peak resident size of the
    process stands in for both."""
    stats = jax.local_devices()[0].memory_stats()
    if stats is None:
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"memory_bytes": resident, "peak_memory_bytes": resident}
    return {"memory_bytes": stats["bytes_in_use"], "peak_memory_bytes": stats["peak_bytes_in_use"]}
