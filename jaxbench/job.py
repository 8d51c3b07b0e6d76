"""The processes of one job: how they agree, tell each other, and stop together.

They talk through JAX's coordination service, on the hosts' network: no device is involved, so
nothing here waits for a collective or disturbs a step. JAX has no public name for its client.
"""

import signal
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed

from jaxbench.config import RecipeError

TIMEOUT_MS = 300_000
"""How long a process waits for another one to say something."""

LEAD = 3
"""Steps between a request to stop and the stop. A process that is about to queue step n has seen
step n - LEAD completed, hence every process has queued that step, and with it read what was posted
before."""


def _client() -> Any:
    return distributed.global_state.client


def from_first(name: str, make: Callable[[], str]) -> str:
    """The text that the first process makes, in every process; a RecipeError of its making is
    raised in every process too."""
    if jax.process_count() == 1:
        return make()
    key = f"jaxbench/{name}"
    if jax.process_index() == 0:
        try:
            text = make()
        except RecipeError as error:
            _client().key_value_set(key, f"error {error}")
            raise
        _client().key_value_set(key, f"value {text}")
    kind, _, text = _client().blocking_key_value_get(key, TIMEOUT_MS).partition(" ")
    if kind == "error":
        raise RecipeError(text)
    return text


def gather(name: str, text: str) -> list[str]:
    """Every process's text in the order of the processes, in the first; elsewhere nothing."""
    count = jax.process_count()
    if count == 1:
        return [text]
    _client().key_value_set(f"jaxbench/{name}/{jax.process_index()}", text)
    if jax.process_index() != 0:
        return []
    return [_client().blocking_key_value_get(f"jaxbench/{name}/{i}", TIMEOUT_MS)
            for i in range(count)]  # fmt: skip


def all_agree(name: str, yes: bool) -> bool:
    """Whether every process says yes, in every process."""
    answers = gather(name, str(yes))
    return from_first(f"{name} agreed", lambda: str(set(answers) == {"True"})) == "True"


class Signals:
    """SIGINT and SIGTERM to any process, answered by all of them at the same step.

    `agreed` is the signal at which the job stops, once it does. A second signal to the same process
    interrupts it at once.
    """

    def __init__(self) -> None:
        self.agreed: signal.Signals | None = None
        self._received: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self._received.append(number)
        if len(self._received) > 1:
            raise KeyboardInterrupt

    def stop(self, step: int) -> bool:
        """Whether the job stops before step `step`; to be asked before every step."""
        if jax.process_count() == 1:
            stop_at, number = step, self._received[0] if self._received else 0
        else:
            stop_at, number = self._agree(step)
        if number and step >= stop_at:
            self.agreed = signal.Signals(number)
        return self.agreed is not None

    def _agree(self, step: int) -> tuple[int, int]:
        if self._received:
            _client().key_value_set("jaxbench/signal", str(self._received[0]), allow_overwrite=True)
        plan = _peek("jaxbench/stop")
        if plan is None and jax.process_index() == 0 and (number := _peek("jaxbench/signal")):
            plan = f"{step + LEAD} {number}"
            _client().key_value_set("jaxbench/stop", plan)
        stop_at, number = (plan or "0 0").split()
        return int(stop_at), int(number)


def _peek(key: str) -> str | None:
    try:
        return _client().key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise
