"""What a run ran on: devices, versions, memory, and the job's other processes."""

import importlib.metadata
import os
import platform
import resource
import subprocess
from pathlib import Path
from typing import Any

import jax

import jaxbench
from jaxbench.config import RecipeError

PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "numpy",
    "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "nvidia-cublas",
)  # fmt: skip


def join_job() -> None:
    """Connects this process to the others that a launcher started; does nothing for a single one.

    Launchers are Slurm's srun, and any that sets `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`
    and `JAX_PROCESS_ID`. Raises RecipeError when only some of these are set.
    """
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        try:
            names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
            count, index = (int(os.environ[name]) for name in names)
        except (KeyError, ValueError) as error:
            raise RecipeError(
                "with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID must be numbers"
            ) from error
        jax.distributed.initialize(address, count, index)
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        jax.distributed.initialize()


def check_local_devices(expected: int) -> None:
    """Raises RecipeError, naming the node, when this process sees another number of devices."""
    found = jax.local_device_count()
    if found != expected:
        raise RecipeError(
            f"node {platform.node()}, process {jax.process_index()}: sees {found} devices, "
            f"{expected} were expected"
        )


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


def versions() -> dict[str, str | None]:
    """Versions of jaxbench, its commit, Python, and the packages that decide what is compiled."""
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return {
        "jaxbench": jaxbench.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        **{name: installed[name] for name in PACKAGES if name in installed},
    }


def commit() -> str | None:
    """Git commit of the source tree, with `+` when files differ from it; None outside a git
    checkout."""
    folder = Path(__file__).parents[1]
    if not (folder / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", folder, *arguments], capture_output=True, text=True, check=True
        ).stdout

    try:
        return git("rev-parse", "HEAD").strip() + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def memory() -> dict[str, int]:
    """Bytes in use on the first local device and their peak; on CPUs the peak resident size of the
    process stands in."""
    stats = jax.local_devices()[0].memory_stats()
    if stats is None:
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"memory_bytes": resident, "peak_memory_bytes": resident}
    return {"memory_bytes": stats["bytes_in_use"], "peak_memory_bytes": stats["peak_bytes_in_use"]}
