"""The processes of one job: how they find each other, and how they agree.

They talk through JAX's coordination service, on the hosts' network: no device is involved, so
nothing here waits for a collective or disturbs a step. JAX has no public name for its client.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed

from jaxbench.cluster.causes import cause_of
from jaxbench.errors import RecipeError, RunFailed

TIMEOUT_MS = 300_000
"""How long a process waits for another one to say something."""


def join() -> None:
    """Connects this process to the others that a launcher started; does nothing for a single one.

    Launchers are Slurm's srun, and any that sets `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`
    and `JAX_PROCESS_ID`. Raises RecipeError when only some of these are set.
    """
    # It would answer SIGTERM from here on, by a note that nobody reads, until `Signals` does.
    jax.config.update("jax_enable_preemption_service", False)
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        try:
            names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
            count, index = (int(os.environ[name]) for name in names)
        except (KeyError, ValueError) as error:
            raise RecipeError(
                "with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID must be numbers"
            ) from error
        jax.distributed.initialize(address, count, index)
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        jax.distributed.initialize()


def client() -> Any:
    """The coordination service of a job of several processes; None without one."""
    return distributed.global_state.client


def from_first(name: str, make: Callable[[], str]) -> str:
    """The text that the first process makes, in every process. What it raises is told to all: a
    RecipeError as it is, all else as RunFailed of the same cause."""
    if jax.process_count() == 1:
        return make()
    key = f"jaxbench/{name}"
    if jax.process_index() == 0:
        try:
            text = make()
        except Exception as error:
            client().key_value_set(key, f"{cause_of(error)} {error or type(error).__name__}")
            raise
        client().key_value_set(key, f"value {text}")
    kind, _, text = client().blocking_key_value_get(key, TIMEOUT_MS).partition(" ")
    if kind == "mistake":
        raise RecipeError(text)
    if kind != "value":
        raise RunFailed(f"the first process failed: {text}", kind)
    return text


def gather(name: str, text: str) -> list[str]:
    """Every process's text in the order of the processes, in the first; elsewhere nothing."""
    count = jax.process_count()
    if count == 1:
        return [text]
    client().key_value_set(f"jaxbench/{name}/{jax.process_index()}", text)
    if jax.process_index() != 0:
        return []
    return [client().blocking_key_value_get(f"jaxbench/{name}/{i}", TIMEOUT_MS)
            for i in range(count)]  # fmt: skip


def all_agree(name: str, yes: bool) -> bool:
    """Whether every process says yes, in every process."""
    answers = gather(name, str(yes))
    return from_first(f"{name} agreed", lambda: str(set(answers) == {"True"})) == "True"


def all_arrive(name: str, seconds: float) -> bool:
    """Whether all processes come here within so many seconds; once for each name."""
    if client() is None:
        return True
    try:
        client().wait_at_barrier(f"jaxbench/{name}", round(1000 * seconds))
    except jax.errors.JaxRuntimeError:
        return False
    return True
