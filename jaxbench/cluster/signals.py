"""How the processes of a job stop together."""

import signal
from typing import Any

import jax

from jaxbench.cluster.job import client

LEAD = 3
"""Steps between a request to stop and the stop. A process that is about to queue step n has seen
step n - LEAD completed, hence every process has queued that step, and with it read what was posted
before."""


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
            client().key_value_set("jaxbench/signal", str(self._received[0]), allow_overwrite=True)
        agreed = _peek("jaxbench/stop")
        if agreed is None and jax.process_index() == 0 and (number := _peek("jaxbench/signal")):
            agreed = f"{step + LEAD} {number}"
            client().key_value_set("jaxbench/stop", agreed)
        stop_at, number = (agreed or "0 0").split()
        return int(stop_at), int(number)


def _peek(key: str) -> str | None:
    try:
        return client().key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise
