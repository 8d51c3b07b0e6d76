"""The devices of this process and of its job, and the environment they are used in."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import jax

from jaxbench.errors import RecipeError


def select_platform(cpu_devices: int | None) -> None:
    """Takes `cpu_devices` virtual CPU devices, or the CPU on a machine without an NVIDIA GPU.

    The second spares a machine that has the CUDA plugin for planning its failure to find a GPU.
    """
    if cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if cpu_devices is not None or not (has_nvidia_gpu() or "JAX_PLATFORMS" in os.environ):
        jax.config.update("jax_platforms", "cpu")


def has_nvidia_gpu() -> bool:
    """Whether this machine has an NVIDIA driver's devices, whatever JAX can use."""
    return any(Path("/dev").glob("nvidia*")) or Path("/dev/dxg").exists()


def check_local_devices(expected: int, cpu: bool) -> None:
    """Raises RecipeError, naming the node, when this process sees another number of devices, or
    CPUs where none were asked for (`cpu`)."""
    where = f"node {platform.node()}, process {jax.process_index()}"
    found, kind = jax.local_device_count(), jax.local_devices()[0].platform
    if kind == "cpu" and not cpu:
        raise RecipeError(
            f"{where}: 0 GPUs, {expected} were expected: set SBATCH_GPUS_PER_NODE if the cluster "
            "gives out GPUs as a generic resource (gres), or check the driver (nvidia-smi)"
        )
    if found != expected:
        raise RecipeError(f"{where}: sees {found} devices, {expected} were expected")


def hardware() -> dict[str, Any]:
    """The devices of the whole job, as the runtime names them."""
    device = jax.local_devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind
        if device.platform == "gpu"
        else platform.processor() or platform.machine(),
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "host": platform.node(),
        "runtime": device.client.platform_version.splitlines()[0],
        "device_memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
    }


SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE", re.I)
"""Names of variables whose values are nobody's business."""


def variables() -> dict[str, str]:
    """The environment as this process sees it, with secrets redacted: variables named like one, and
    user and password in addresses."""
    return {
        name: "REDACTED" if SECRET.search(name) else re.sub(r"://[^/\s]*@", "://REDACTED@", value)
        for name, value in sorted(os.environ.items())
    }
