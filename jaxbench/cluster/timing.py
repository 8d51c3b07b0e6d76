"""Kernels that are timed again and again, on one GPU, on all of them, and between them."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax

ROUNDS = 4
"""The number of rounds; the fastest round counts."""


def collective_kinds(n: int) -> dict[str, tuple[Callable[[jax.Array], jax.Array], int]]:
    """Collectives among n GPUs along an axis `gpus`, as functions of the part that each GPU has;
    and the size of the operands of all GPUs in buffers."""
    kinds: dict[str, tuple[Callable[..., jax.Array], int]] = {
        "all-gather": (partial(jax.lax.all_gather, tiled=True), 1),
        "all-reduce": (jax.lax.psum, n),
        "reduce-scatter": (partial(jax.lax.psum_scatter, tiled=True), n),
        "all-to-all": (_exchange, n),
    }
    return {name: (partial(call, axis_name="gpus"), times) for name, (call, times) in kinds.items()}


def _exchange(x: jax.Array, axis_name: str) -> jax.Array:
    parts = x.reshape(jax.lax.axis_size(axis_name), -1)
    return jax.lax.all_to_all(parts, axis_name, 0, 0, tiled=True).reshape(-1)


def repeated(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    """A function that runs another one `times` in a loop, where each run waits for the one before:
    in a straight program the compiler computes equal products once, barriers or not."""

    def run(first: jax.Array, *others: jax.Array) -> Any:
        def again(_: jax.Array, result: Any) -> Any:
            after, _ = jax.lax.optimization_barrier((first, result))
            return function(after, *others)

        return jax.lax.fori_loop(1, times, again, function(first, *others))

    return run


def device_seconds(program: Callable[..., jax.Array], *arguments: Any) -> dict[jax.Device, float]:
    """Seconds in which each device of this process runs a program, the least of some rounds, after
    one that loads the kernels."""
    least: dict[jax.Device, float] = {}
    with ThreadPoolExecutor(jax.local_device_count()) as threads:
        for number in range(ROUNDS + 1):
            began = time.perf_counter()

            def wait(shard: Any, began: float = began) -> tuple[jax.Device, float]:
                jax.block_until_ready(shard.data)
                return shard.device, time.perf_counter() - began

            for device, seconds in threads.map(wait, program(*arguments).addressable_shards):
                if number:
                    least[device] = min(seconds, least.get(device, seconds))
    return least
