"""Reports errors of a step while the main thread is blocked."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax

PATIENCE_S = 5.0
"""Time without another launch after which the last one's results are awaited on every GPU, and time
in which the main thread may act on an error itself."""


def watched_launches(program: Callable, fail: Callable[[Exception], None]) -> Callable:
    """Returns the program of a step such that `fail` is called, in another thread, with the error
    of a step if the main thread does not act on it.

    When one GPU of a process fails, collectives on the others wait for it for ever. So does the
    main thread if it awaits a result of theirs, or launches the next step: XLA launches a program
    on all GPUs together. The error is in the failed GPU's shard of the last results.
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
