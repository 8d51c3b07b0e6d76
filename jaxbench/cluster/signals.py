"""How the processes of a job stop together."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import jax

from jaxbench.cluster.job import client

LEAD = 3
"""Steps between a request to stop and the stop. A process that is about to queue step n has seen
step n - LEAD completed, hence every process has queued that step, and with it read what was posted
before."""

TIME_LIMIT = signal.SIGUSR1
"""What `launch/submit.py` lets Slurm send some time before the limit, to be told from all else."""

ANSWERED = (signal.SIGINT, signal.SIGTERM, TIME_LIMIT)


def reason(number: signal.Signals) -> str:
    """What a signal is called in a record."""
    return "time limit" if number == TIME_LIMIT else number.name


class Signals:
    """SIGINT, SIGTERM and the notice of a time limit to any process, answered by all of them.

    While steps run all processes stop before the same one: `agreed` is the signal at which the job
    stops, once it does. Before the first step there is nothing to save and no one to wait for:
    `abandon` is called at once, from another thread, since the main one may be in the compiler for
    minutes, where Python answers no signal. A second signal to the same process interrupts it.
    """

    def __init__(self, abandon: Callable[[signal.Signals], None]) -> None:
        self.agreed: signal.Signals | None = None
        self._received: list[int] = []
        self._stepping = False
        read, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        for number in ANSWERED:
            signal.signal(number, self._receive)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read, abandon), daemon=True).start()

    def close(self) -> None:
        """Watches no longer."""
        signal.set_wakeup_fd(-1)
        os.close(self._wake)

    def _watch(self, read: int, abandon: Callable[[signal.Signals], None]) -> None:
        with os.fdopen(read, "rb", buffering=0) as written:
            while number := written.read(1):
                if number[0] in ANSWERED and not self._stepping:
                    abandon(signal.Signals(number[0]))

    def _receive(self, number: int, frame: Any) -> None:
        self._received.append(number)
        if len(self._received) > 1:
            raise KeyboardInterrupt

    def stop(self, step: int) -> bool:
        """Whether the job stops before step `step`; to be asked before every step."""
        self._stepping = True
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
