"""The devices of this process and of its job, and the environment they are used in."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import jax

from jaxbench.cluster.causes import cause_of
from jaxbench.errors import RecipeError, RunFailed


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


def find() -> tuple[int, str]:
    """(number of devices of the job, their platform). Raises RunFailed where JAX can use none: it
    lets the errors of a driver, and of peers that do not answer, look alike."""
    try:
        return jax.device_count(), jax.devices()[0].platform
    except (RuntimeError, AssertionError) as error:  # it asserts that there is a platform
        cause = cause_of(error)
        said = str(error) or f"none of {os.environ.get('JAX_PLATFORMS', 'its platforms')}"
        raise RunFailed(
            f"node {platform.node()}: JAX can use no device: {said}",
            "gpu" if cause == "failed" else cause,
        ) from error


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
        "runtime": "; ".join(device.client.platform_version.splitlines()),
        "device_memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
    }


RECORDED = re.compile(r"""
    (JAX|XLA|TF|NCCL|CUDA|CUDNN|CUBLAS|NVIDIA|NVTE|NVSHMEM|UCX|FI|MELLANOX|OMP|MALLOC)_\w+ |
    (JAXBENCH|RUN_CONF|ENABLE|PROFILE|LLMB|SBATCH)_\w+ |
    SLURM_(JOB|JOBID|STEP|STEPID|NNODES|NODEID|NODELIST|NTASKS|NPROCS|TASKS|CPUS|CPU|GPUS|GPU|MEM|
        RESTART|LOCALID|PROCID|CLUSTER|SUBMIT|TOPOLOGY|DISTRIBUTION|LAUNCH|SRUN)(_\w+)? |
    PATH | LD_LIBRARY_PATH | LD_PRELOAD | PYTHONPATH | VIRTUAL_ENV | HOSTNAME | STAGE_PATH |
    WORKLOAD | MODEL_SIZE | DTYPE | JOB_TOTAL_GPUS | GPUS_PER_NODE | GPU_TYPE | MAX_STEPS |
    TIME_LIMIT | LOAD_CHECKPOINT_PATH | DRY_RUN
""", re.X)  # fmt: skip
"""Names of variables that decide what runs and how fast. No other is recorded: what is nobody's
business cannot be told from its name."""

SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE|JWT", re.I)
"""Names among them whose values are not recorded all the same."""


def variables() -> dict[str, str]:
    """What of this process's environment decides what runs and how fast, without secrets: values of
    variables named like one, and user and password in addresses."""
    return {
        name: "REDACTED" if SECRET.search(name) else re.sub(r"://[^/\s]*@", "://REDACTED@", value)
        for name, value in sorted(os.environ.items())
        if RECORDED.fullmatch(name)
    }
