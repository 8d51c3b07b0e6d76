"""Errors of a step on a GPU, reported while the main thread is blocked."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax

PATIENCE_S = 5.0
"""Seconds without a launch after which the results of the last one are awaited on every GPU; and
seconds that the main thread has to handle an error itself before `fail` is called."""


def watched_launches(program: Callable, fail: Callable[[Exception], None]) -> Callable:
    """The program of a step, whose launches are watched: if the main thread does not handle the
    error of a step, another thread calls `fail` with it.

    When one GPU of a process fails, collectives on the others wait for it forever. The main thread
    then blocks when it awaits a result of theirs, and when it launches the next step, since XLA
    launches a program on all GPUs together. Awaiting the failed GPU's shard of the last results
    raises the error.
    """
    if jax.local_device_count() == 1 or jax.default_backend() != "gpu":
        return program
    launched: dict[str, jax.Array] = {}

    def launch(state: Any) -> Any:
        nonlocal launched
        result = program(state)
        launched = result[1]
        return result

    def await_shard(shard: jax.Array) -> None:
        try:
            jax.block_until_ready(shard)
        except Exception as error:
            time.sleep(PATIENCE_S)
            fail(error)

    def watch() -> None:
        seen = awaited = launched
        while True:
            time.sleep(PATIENCE_S)
            if launched is seen and launched is not awaited:
                awaited = launched
                for shard in next(iter(launched.values())).addressable_shards:
                    threading.Thread(target=await_shard, args=(shard.data,), daemon=True).start()
            seen = launched

    threading.Thread(target=watch, daemon=True).start()
    return launch
