"""Devices of the job, and the environment variables that matter to a run."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import jax

from jaxbench.base.errors import RecipeError, RunFailed, cause_of, counted, listed
from jaxbench.base.hardware import Gpu, is_null
from jaxbench.cluster import job, nvml
from jaxbench.jax_internals import taken_gpus

LISTED = 4
"""The most nodes that a message names."""


def select_platform(cpu_devices: int | None) -> None:
    """Selects `cpu_devices` virtual CPU devices. Without a number, selects the CPU on a machine
    without an NVIDIA GPU: the CUDA plugin may be installed there for planning, and would fail."""
    if cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if cpu_devices is not None or not (has_nvidia_gpu() or "JAX_PLATFORMS" in os.environ):
        jax.config.update("jax_platforms", "cpu")


def has_nvidia_gpu() -> bool:
    """Returns whether this machine has devices of an NVIDIA driver, whether JAX can use them or
    not."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def find() -> tuple[int, str]:
    """The number of devices of the job, and their platform. Raises RunFailed if JAX can use none,
    because of the driver or because other processes do not answer. Raises RecipeError if the
    devices differ."""
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that there is a platform
        if "known backend" in str(error):  # "is not in the list of", or "Unknown"
            raise RecipeError(
                f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}: {error}"
            ) from error
        check_visible(taken_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        cause = cause_of(error)
        reason = str(error) or f"none of {os.environ.get('JAX_PLATFORMS', 'its platforms')}"
        raise RunFailed(
            f"node {platform.node()}: JAX can use no device: {reason}",
            "gpu" if cause == "failed" else cause,
        ) from error
    if len(models := dict.fromkeys(device.device_kind for device in devices)) > 1:
        nodes = job.all_gather("node", platform.node())
        of = {m: [nodes[d.process_index] for d in devices if d.device_kind == m] for m in models}
        found = ", ".join(
            f"{len(names)} x {model} on {listed(dict.fromkeys(names), LISTED)}"
            for model, names in of.items()
        )
        raise RecipeError(f"the job's devices differ: {found}; choose nodes with the same GPUs")
    return len(devices), devices[0].platform


def check_visible(taken: str, visible: str | None) -> None:
    """Raises RecipeError if this process takes a GPU of its node by a number that its visible GPUs
    do not have. This happens if the site binds each task to a GPU."""
    if taken == "all" or visible is None:
        return
    count = len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    if max(map(int, taken.split(","))) >= count:
        raise RecipeError(
            f"node {platform.node()}, process {os.environ.get('SLURM_PROCID', '?')} sees "
            f"{counted(count)} (CUDA_VISIBLE_DEVICES={visible}), but should take number {taken} "
            "of its node: let each task see all GPUs of its node (srun without --gpus-per-task, "
            "--gpu-bind=none)"
        )


def hidden_by() -> str:
    """The variables that may hide devices from this process, in parentheses."""
    names = ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS")
    given = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    return f" ({', '.join(given)})" if given else ""


def check_local_devices(expected: int | None, cpu: bool) -> None:
    """Raises RecipeError, naming the node, if this process does not have `expected` devices, or if
    it has CPU devices and `cpu` is false. With None any devices will do."""
    if expected is None:
        return
    where = f"node {platform.node()}, process {jax.process_index()}"
    were = "was" if expected == 1 else "were"
    if jax.local_devices()[0].platform == "cpu" and not cpu:
        raise RecipeError(
            f"{where} sees 0 GPUs{hidden_by()}, but {expected} {were} expected: set "
            "SBATCH_GPUS_PER_NODE if the cluster gives out GPUs as a generic resource (gres), or "
            "check the driver (nvidia-smi)"
        )
    if (count := jax.local_device_count()) != expected:
        seen = counted(count, "device")
        raise RecipeError(f"{where} sees {seen}{hidden_by()}, but {expected} {were} expected")


def known_to_nvml() -> dict[jax.Device, nvml.Gpu]:
    """This process's GPUs as NVML knows them, in JAX's order. Empty for CPU devices. Raises
    RecipeError if NVML cannot be asked."""
    if jax.default_backend() != "gpu":
        return {}
    visible = nvml.gpus()
    numbers = {device: device.local_hardware_id or 0 for device in jax.local_devices()}
    return {device: visible[n] for device, n in numbers.items() if n < len(visible)}


def other_gpu(gpu: Gpu | None) -> str | None:
    """A line that says so if the launcher was told of another GPU than the job has; else None."""
    asked = os.environ.get("JAXBENCH_GPU")
    if gpu is None or asked in (None, gpu.name):
        return None
    return f"it was submitted for {asked}s (GPU_TYPE, default h100), but runs on {gpu.name}s"


def hardware() -> dict[str, Any]:
    """The record's `hardware`: the devices of the job, as the runtime names them."""
    device = jax.local_devices()[0]
    cpu = platform.processor() or platform.machine()
    return {
        "platform": device.platform,
        "device": device.device_kind if device.platform == "gpu" else cpu,
        "null": is_null(device.device_kind),
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
"""Names of variables that decide what runs and how fast. We record no other variable, since the
name of a private value does not always show that it is private."""

SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE|JWT", re.I)
"""Pattern of recorded names whose values are redacted."""


def variables() -> dict[str, str]:
    """The recorded environment variables without secrets. We redact the values of variables whose
    names look secret, and user and password in addresses."""
    return {
        name: "REDACTED" if SECRET.search(name) else re.sub(r"://[^/\s]*@", "://REDACTED@", value)
        for name, value in sorted(os.environ.items())
        if RECORDED.fullmatch(name)
    }
