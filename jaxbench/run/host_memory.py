"""Memory of GPUs and of their host: XLA's share of it, what XLA pins for offloaded activations, and
what the job may use."""

import math
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from jaxbench.base.errors import RecipeError, RunFailed, counted
from jaxbench.base.hardware import HOST_FRACTION, MEMORY_FRACTION, Gpu, host_memory, identify
from jaxbench.cluster import job, nvml
from jaxbench.cluster.membership import membership, own_devices

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""XLA's variable: GiB of host memory that its allocator may pin for one device."""

UNSET_GIB = 64
"""The limit if the variable is not set. We go below it only if the host has less, since checkpoints
pass through memory with the same limit."""

SLACK_GIB = 2
"""GiB that may be pinned beyond the need, for the small arrays that come first."""


def expected_devices() -> tuple[int, Gpu | None]:
    """The number of devices of the job and their kind, as the launcher and the driver report them
    before JAX takes the devices. Raises RecipeError if they do not report them."""
    gpus, found = nvml.gpus(), membership(os.environ)
    if not gpus:
        raise RecipeError("NVML reports no GPU")
    here = len(own_devices(os.environ) or gpus)
    return here * (found.count if found else 1), identify(gpus[0].name or "")


def limit_memory(needed: float) -> None:
    """Sets the share of a GPU's memory for XLA's allocator, and limits the host memory that XLA
    pins for each GPU. Offloaded activations of `needed` bytes wait there. The allocator takes the
    next power of two of what it needs, up to the limit. XLA reads both settings once, when JAX
    takes the devices. Raises RecipeError for a variable that is no number."""
    os.environ.setdefault(FRACTION, str(MEMORY_FRACTION))
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if gpus and (total := host_memory("MemTotal")):
        share = int(total * HOST_FRACTION) // gpus >> 30
        os.environ.setdefault(HOST_LIMIT, str(limit_gib(needed, max(1, share))))
    for name, pattern, kind in (
        (FRACTION, r"[01]?\.\d+|1", "share, such as 0.92"),
        (HOST_LIMIT, r"[1-9]\d*", "number of GiB"),
    ):
        if not re.fullmatch(pattern, text := os.environ.get(name, "1")):
            raise RecipeError(f"{name}={text}: expected a {kind}")


def limit_gib(needed: float, share: int) -> int:
    """GiB that XLA may pin for one device. `needed` are the bytes that it needs, 0 if we do not
    know; `share` are the GiB of host memory that each device can have."""
    return min(share, max(UNSET_GIB, math.ceil(needed / 2**30) + SLACK_GIB)) if needed else share


def check_host_memory(needed: float, when: str) -> None:
    """Raises RunFailed if this host has too little memory for the offloaded activations of its
    devices (`needed` bytes for each), or if the job may use too little of it. All ranks must call
    it with the same arguments; each `when` serves once in a job."""
    if not needed:
        return
    limit = int(os.environ.get(HOST_LIMIT, UNSET_GIB)) << 30
    pinned = max(needed, min(1 << (int(needed) - 1).bit_length(), limit))
    nodes = job.all_gather(f"host memory {when}", platform.node())
    here = nodes.count(platform.node())
    count = here * jax.local_device_count()
    recompute = "use --set execution.offload=none to recompute instead"
    takes = f"node {platform.node()}: execution.offload takes {pinned / 2**30:.1f} GiB of memory"
    for available, said in _available():
        if pinned * count > available:
            raise RunFailed(
                f"{takes} for each of {counted(count, 'device')}, but "
                f"{said.format(f'{available / 2**30:.1f} GiB')}; {recompute}",
                "memory",
            )
    if needed > limit:
        raise RunFailed(
            f"{takes} for each device, but XLA may pin only {limit >> 30} GiB: set "
            f"{HOST_LIMIT}={limit_gib(needed, 2**30)}, or {recompute}",
            "memory",
        )


def _available() -> Iterator[tuple[int, str]]:
    """Upper limits on the host memory that the job can have, in bytes, each with words for it."""
    if free := host_memory("MemAvailable"):
        yield free, "only {} are available"
    if found := slurm_limit(os.environ):
        limit, name = found
        yield limit, f"Slurm gave the job only {{}} ({name}; sbatch --mem=0 asks for all)"
    if limit := cgroup_limit():
        yield limit, "the control group of the job has only {}"


UNITS = {"K": 2**10, "": 2**20, "M": 2**20, "G": 2**30, "T": 2**40}


def slurm_limit(variables: Mapping[str, str]) -> tuple[int, str] | None:
    """The bytes of this node's memory that Slurm gave to the job, and the variable that says so.
    None if the job asked for no memory, or for all of it."""
    for name, multiple in (
        ("SLURM_MEM_PER_NODE", ""),
        ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
        ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
    ):
        amount = re.fullmatch(r"(\d+)([KMGT]?)", variables.get(name, ""))
        times = variables.get(multiple, "") if multiple else "1"
        if amount and int(amount[1]) and times.isdecimal():
            return int(amount[1]) * UNITS[amount[2]] * int(times), name
    return None


LIMITS = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""The file that has a control group's limit, by the controllers of its hierarchy: "" for version 2,
"memory" for version 1."""


def cgroup_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that the control groups of this process may use, in version 1 or 2; 0 without a
    limit."""
    files: list[Path] = []
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if name := LIMITS.get(controllers):
            base = root / controllers
            group = base / path.strip("/")
            groups = [folder for folder in (group, *group.parents) if folder.is_relative_to(base)]
            files += [folder / name for folder in groups]
    texts = [file.read_text().strip() for file in files if file.is_file()]
    return min((int(text) for text in texts if text.isdecimal()), default=0)
