"""What a run ran on: devices, versions, memory, and the job's other processes."""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

import jaxbench
from jaxbench import job
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


@contextmanager
def program_cache(folder: Path | None, identity: dict[str, Any]) -> Iterator[bool]:
    """Keeps what is compiled inside in `folder`, if there is one, for later runs of this identity;
    yields whether it was there.

    Ranks that find a program and ranks that do not must not meet: while it autotunes, XLA waits for
    the results of every rank. So an identity's folder appears whole, when its first job has
    compiled, and a job uses it only if all of its processes see it.
    """
    if folder is None:
        yield False
        return
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    whole, fresh = folder / name, folder / f"{name}.{os.getpid()}-{time.time_ns()}"
    there = job.all_agree("compilation cache", whole.is_dir())
    chosen = Path(
        job.from_first("compilation cache folder", lambda: str(whole if there else fresh))
    )
    compilation_cache.reset_cache()  # JAX decides once whether it uses one
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    # XLA's own caches are written by every rank, and their paths would be part of the key.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    yield there
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    if jax.process_index() == 0 and not there and chosen.is_dir():
        try:
            chosen.rename(whole)
        except OSError:  # another job was faster
            shutil.rmtree(chosen)


SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE", re.I)
"""Names of variables whose values are nobody's business."""


def variables() -> dict[str, str]:
    """The environment as this process sees it, with secrets redacted: variables named like one, and
    user and password in addresses."""
    return {
        name: "REDACTED" if SECRET.search(name) else re.sub(r"://[^/\s]*@", "://REDACTED@", value)
        for name, value in sorted(os.environ.items())
    }


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
