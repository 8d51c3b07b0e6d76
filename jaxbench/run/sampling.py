"""What a run records of its processes and GPUs: step times and waits, telemetry, and the speed of
each GPU alone."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbench.base.errors import RecipeError
from jaxbench.cluster import job, nvml
from jaxbench.cluster.devices import known_to_nvml
from jaxbench.cluster.telemetry import Sampler
from jaxbench.cluster.timing import device_seconds
from jaxbench.results.window import spread

SIZE, MATMULS = 4096, 64
"""Matmuls that each GPU does alone after training: 9 TFLOP in each round."""


def sampler(say: Callable[[str], None]) -> Sampler | None:
    """A sampler of this node's GPUs, in one of the node's processes. None in the others, and
    without GPUs or NVML; without NVML it says so."""
    if jax.default_backend() != "gpu":
        return None
    try:
        every = nvml.gpus(visible=False)
    except RecipeError as error:
        say(f"no telemetry: {error}")
        return None
    if not job.one_of_node("telemetry"):
        return None
    say(f"telemetry: every second from {len(every)} GPUs of this node")
    return Sampler(every)


def gather_ranks(
    times: list[tuple[float, float]], probe: bool, sampled: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """An entry for each process; complete in rank 0.

    An entry has the step times (mean, deviation, median, p95) and the mean wait in s, without the
    first step. With `probe` it has the times that the process's GPUs take for the same matmuls. It
    also has the telemetry of its GPUs, which one process of each node has `sampled`.

    Collectives make all processes as slow as the slowest. A slow host shows by the smallest
    `wait_s`, the mean time for which a process waits for its device. A slow GPU shows by its time
    for the matmuls.
    """
    entry: dict[str, Any] = {"rank": jax.process_index(), "host": job.node()}
    if len(times) > 1:
        measured, waits = zip(*times[1:], strict=True)
        entry |= {"step_time_s": spread(list(measured)), "wait_s": sum(waits) / len(waits)}
    if probe and jax.default_backend() == "gpu":
        # The run is complete, so it does not fail if a GPU has no memory left for the matmuls.
        with suppress(jax.errors.JaxRuntimeError):
            entry["products_s"] = products_s()
    sent = {"entry": entry, "numbers": numbers(), "sampled": sampled}
    received = job.gather("stragglers", sent)
    telemetry = {(r["entry"]["host"], gpu["gpu"]): gpu for r in received for gpu in r["sampled"]}
    for r in received:
        places = [(r["entry"]["host"], number) for number in r["numbers"]]
        if gpus := [telemetry[place] for place in places if place in telemetry]:
            r["entry"]["gpus"] = gpus
    return [r["entry"] for r in received]


def numbers() -> list[int]:
    """The NVML numbers of this process's devices, in JAX's order; empty without NVML."""
    try:
        return [gpu.index for gpu in known_to_nvml().values()]
    except RecipeError:
        return []


def products_s() -> list[float]:
    """Seconds that each device of this process takes for the matmuls, the least of some rounds. All
    devices work at the same time."""
    devices = jax.local_devices()
    # Random, since zeros take less power; scaled, so that results do not grow.
    values = np.random.default_rng(0).standard_normal((SIZE, SIZE), np.float32) / SIZE**0.5
    every = np.broadcast_to(values.astype(jnp.bfloat16), (len(devices), SIZE, SIZE))
    local = jax.sharding.Mesh(np.array(devices), ("local",))

    def products(x: jax.Array) -> jax.Array:
        # Two per iteration: with one, XLA would copy the result to the place of the operand.
        return jax.lax.fori_loop(0, MATMULS // 2, lambda _, y: x @ (x @ y), x)

    with jax.set_mesh(local):
        x = jax.device_put(every, jax.NamedSharding(local, jax.P("local")))
        program = jax.jit(products).lower(x).compile({"xla_gpu_autotune_level": "0"})
        times = device_seconds(program, x)
    return [times[device] for device in devices]


def watts(ranks: list[dict[str, Any]], devices: int) -> float | None:
    """The power of all GPUs of a run under load in W. None unless NVML reported it for each of
    them."""
    powers = [
        gpu["power_w"] for entry in ranks for gpu in entry.get("gpus", ()) if "power_w" in gpu
    ]
    return sum(powers) if len(powers) == devices else None
