"""Finds the error of a step on a GPU while the main thread is blocked, and the number of that
GPU."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax

PATIENCE_S = 5.0
"""Seconds without a launch, after which we await the results of the last one on every GPU. Also the
seconds that the main thread has to handle an error itself before we call `fail`."""

NAMED_S = 1.0
"""Seconds that the error of a failed GPU may take to be raised again."""


class WatchedProgram:
    """The program of a step on the GPUs of one process, with its launches watched: if the main
    thread does not handle the error of a step, another thread calls `fail` with it.

    When one GPU of a process fails, collectives on the others wait for it forever. The main thread
    then blocks when it awaits a result of the others. It also blocks when it launches the next
    step, since XLA launches a program on all GPUs together. Awaiting the failed GPU's shard of the
    last results raises the error.
    """

    def __init__(self, program: Callable, fail: Callable[[Exception], None]):
        self._program, self._fail = program, fail
        self._launched: dict[str, jax.Array] = {}
        self._several = jax.local_device_count() > 1 and jax.default_backend() == "gpu"
        if self._several:
            threading.Thread(target=self._watch, daemon=True).start()

    def __call__(self, state: Any) -> Any:
        result = self._program(state)
        self._launched = result[1]
        return result

    def failed_gpus(self) -> str | None:
        """The numbers on this host of the GPUs that raise an error. None if the process has one
        GPU, or if all of its GPUs raise the error, or none of them does."""
        numbers: list[int] = []
        self._await_shards(lambda number, _: numbers.append(number))
        time.sleep(NAMED_S)
        if 0 < len(numbers) < jax.local_device_count():
            return f"GPU {', '.join(map(str, sorted(numbers)))}"
        return None

    def _await_shards(self, found: Callable[[int, Exception], None]) -> None:
        """Awaits the last results on every GPU, in one thread each. Calls `found` with the number
        of each GPU that fails and its error."""

        def wait(shard: Any) -> None:
            try:
                jax.block_until_ready(shard.data)
            except Exception as error:
                found(shard.device.local_hardware_id, error)

        figures = next(iter(self._launched.values()), None) if self._several else None
        for shard in [] if figures is None else figures.addressable_shards:
            threading.Thread(target=wait, args=(shard,), daemon=True).start()

    def _watch(self) -> None:
        def missed(_: int, error: Exception) -> None:
            time.sleep(PATIENCE_S)
            self._fail(error)

        seen = awaited = self._launched
        while True:
            time.sleep(PATIENCE_S)
            if self._launched is seen and self._launched is not awaited:
                awaited = self._launched
                self._await_shards(missed)
            seen = self._launched
