"""Signals, after which all processes of a job stop before the same step."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import jax

from jaxbench.jax_internals import coordination_client

LEAD = 3
"""Steps from the agreement to the stop. Rank 0 posts the agreement before it queues step n. Every
process that is about to queue step n + LEAD has seen step n completed. Rank 0 takes part in step n,
so the process reads the agreement in time."""

TIME_LIMIT = signal.SIGUSR1
"""Slurm's notice of the time limit, as `launch/submit.py` requests it."""

HANDLED = (signal.SIGINT, signal.SIGTERM, TIME_LIMIT)


def name_of(number: signal.Signals) -> str:
    """The name of a signal in a record."""
    return "time limit" if number == TIME_LIMIT else number.name


class Signals:
    """Handlers of SIGINT, SIGTERM and the notice of a time limit, sent to any process of a job.

    While steps run, all processes stop before the same step, and `agreed` is then the signal.
    Before the first step, a thread calls `abandon` at once: the main thread may be in the compiler
    for minutes, and Python handles no signal meanwhile. A second Ctrl-C raises KeyboardInterrupt.
    Other signals do not: Slurm sends a second one while a job may still save, after its notice of
    the time limit and at the end of a grace time.
    """

    def __init__(self, abandon: Callable[[signal.Signals], None]) -> None:
        self.agreed: signal.Signals | None = None
        self._received: list[int] = []
        self._stepping = False
        read, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        for number in HANDLED:
            signal.signal(number, self._receive)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read, abandon), daemon=True).start()

    @property
    def received(self) -> signal.Signals | None:
        """The first signal to this process; None if there was none."""
        return signal.Signals(self._received[0]) if self._received else None

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self._wake)

    def _watch(self, read: int, abandon: Callable[[signal.Signals], None]) -> None:
        with os.fdopen(read, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] in HANDLED and not self._stepping:
                    abandon(signal.Signals(number[0]))

    def _receive(self, number: int, frame: Any) -> None:
        self._received.append(number)
        if len(self._received) > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt

    def stop(self, step: int) -> bool:
        """Returns whether the job stops before `step`. Call it before every step."""
        self._stepping = True
        if jax.process_count() == 1:
            stop_at, number = step, self._received[0] if self._received else 0
        else:
            stop_at, number = self._agree(step)
        if number and step >= stop_at:
            self.agreed = signal.Signals(number)
        return self.agreed is not None

    def _agree(self, step: int) -> tuple[int, int]:
        """The step before which to stop, and the signal; (0, 0) if no process received one."""
        if self._received:
            coordination_client().key_value_set(
                "jaxbench/signal", str(self._received[0]), allow_overwrite=True
            )
        agreed = _try_get("jaxbench/stop")
        if agreed is None and jax.process_index() == 0 and (number := _try_get("jaxbench/signal")):
            agreed = f"{step + LEAD} {number}"
            coordination_client().key_value_set("jaxbench/stop", agreed)
        stop_at, number = (agreed or "0 0").split()
        return int(stop_at), int(number)


def _try_get(key: str) -> str | None:
    try:
        return coordination_client().key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise
