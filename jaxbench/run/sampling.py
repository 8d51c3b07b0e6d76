"""Telemetry of a run's GPUs: which process of a node samples them, and which GPUs belong to which
process."""

from collections.abc import Callable
from typing import Any

import jax

from jaxbench.base.errors import RecipeError
from jaxbench.base.outliers import GPU_SPREAD, outliers
from jaxbench.cluster import job, nvml
from jaxbench.cluster.telemetry import Sampler


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


def numbers() -> list[int]:
    """The NVML numbers of this process's devices, in JAX's order; empty without NVML."""
    if jax.default_backend() != "gpu":
        return []
    try:
        visible = nvml.gpus()
    except RecipeError:
        return []
    local = [device.local_hardware_id for device in jax.local_devices()]
    return [visible[n].index for n in local if n < len(visible)]


def warnings(ranks: list[dict[str, Any]]) -> list[str]:
    """A line for each GPU whose clock under load is slower than the others', and for each GPU with
    ECC errors that were not corrected."""
    every = [(entry, gpu) for entry in ranks for gpu in entry.get("gpus", ())]
    clocks = {n: gpu["sm_mhz"] for n, (_, gpu) in enumerate(every) if gpu.get("sm_mhz")}
    slow, lines = outliers(clocks, GPU_SPREAD, low=True), []
    for n, (entry, gpu) in enumerate(every):
        where = f"GPU {gpu['gpu']} of {entry['host']} (rank {entry['rank']})"
        if n in slow:
            reasons = ", ".join(f"{name} {s:g} s" for name, s in gpu["throttled_s"].items())
            lines.append(
                f"slow clock: {where}: {clocks[n]:.0f} MHz under load, {100 * (1 - slow[n]):.0f} % "
                f"below the median of {len(clocks)} ({reasons or 'for no known reason'})"
            )
        if gpu.get("ecc_uncorrected"):
            lines.append(f"ECC: {where}: {gpu['ecc_uncorrected']} errors were not corrected")
    return lines


def watts(ranks: list[dict[str, Any]], devices: int) -> float | None:
    """The power of all GPUs of a run under load in W. None unless NVML reported it for each of
    them."""
    powers = [
        gpu["power_w"] for entry in ranks for gpu in entry.get("gpus", ()) if "power_w" in gpu
    ]
    return sum(powers) if len(powers) == devices else None
