"""Asks the driver, the system and the file system of this host. Nothing here is measured on a
device."""

import errno
import fcntl
import os
import platform
import re
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxbench.base.files import open_unlinked
from jaxbench.base.versions import versions
from jaxbench.cluster import nvml

FILE_BYTES = 2**26
"""Size of the file that measures the file system's bandwidth."""

SAMPLE_S = 0.05
"""Seconds between two looks at the GPUs under load."""

SYSTEM = {
    "governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "transparent_hugepage": "/sys/kernel/mm/transparent_hugepage/enabled",
    "numa_balancing": "/proc/sys/kernel/numa_balancing",
    "numa_nodes": "/sys/devices/system/node/online",
    "huge_pages": "/proc/sys/vm/nr_hugepages",
}
"""Files of the kernel that hold a setting. If a file lists several words, the chosen word is in
brackets."""

ADAPTERS = Path("/sys/class/infiniband")
"""Network adapters, InfiniBand and RoCE, by name."""

OF_ADAPTER = {
    "model": "hca_type",
    "firmware": "fw_ver",
    "board": "board_id",
    "link layer": "ports/1/link_layer",
    "PCIe speed": "device/current_link_speed",
    "PCIe lanes": "device/current_link_width",
}
"""Files of an adapter (Linux, Documentation/ABI/stable/sysfs-class-infiniband; sysfs-bus-pci)."""

ERRORS = "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors"
"""Counters of a port (Linux, Documentation/ABI/stable/sysfs-class-infiniband)."""

DIAGNOSIS = "dcgmi", "diag", "--run", "1"
"""The quick checks of NVIDIA's DCGM. Longer ones need the GPUs' memory, which we hold."""

Counts = dict[str, dict[str, int]]
"""Counts by the name of a GPU or port and by kind."""


def settings(has_nvml: bool, adapters: Path = ADAPTERS) -> dict[str, Any]:
    """Versions and settings that should be the same on all hosts; None for what the system does not
    have."""
    known = versions()
    names = ("jaxbench", "commit", "python", "jaxlib", "driver", "nvidia-nccl-cu13")
    found: dict[str, Any] = {name: known.get(name) for name in names}
    if has_nvml:
        found["driver"] = nvml.driver_version()
    found |= {"kernel": platform.release(), "cpus": os.cpu_count()}
    for name, path in SYSTEM.items():
        text = content(Path(path))
        chosen = re.search(r"\[(\w+)\]", text or "")
        found[name] = chosen[1] if chosen else text
    for adapter in sorted(adapters.glob("*")):
        found |= {
            f"{adapter.name} {name}": content(adapter / at) for name, at in OF_ADAPTER.items()
        }
    return found


def ports(adapters: Path = ADAPTERS) -> dict[str, float]:
    """Link rate in Gb/s of each port of the network adapters; 0 if the port is not active."""
    found = {}
    for port in sorted(adapters.glob("*/ports/*")):
        active = (content(port / "state") or "").endswith(" ACTIVE")
        rate = re.match(r"[\d.]+", content(port / "rate") or "")
        name = f"{port.parents[1].name} port {port.name}"
        found[name] = float(rate[0]) if rate and active else 0.0
    return found


def counters(gpus: Mapping[str, nvml.Gpu], adapters: Path = ADAPTERS) -> Counts:
    """The errors that driver and adapters have counted, of the named GPUs and of all ports."""
    log, found = xids(), {}
    for name, gpu in gpus.items():
        known = gpu.errors() | {"xids": None if log is None else len(log.get(gpu.address, ()))}
        found[name] = {kind: count for kind, count in known.items() if count is not None}
    for port in sorted(adapters.glob("*/ports/*")):
        texts = {kind: content(port / "counters" / kind) for kind in ERRORS}
        name = f"{platform.node()} {port.parents[1].name} port {port.name}"
        # Some drivers have no counters: "N/A (no PMA)".
        found[name] = {kind: int(text) for kind, text in texts.items() if text and text.isdecimal()}
    return found


def grew(before: Counts, after: Counts) -> Counts:
    """By how much counters grew. Those that did not are left out."""
    found: Counts = defaultdict(dict)
    for name, counts in after.items():
        for kind, count in counts.items():
            if (more := count - before.get(name, {}).get(kind, count)) > 0:
                found[name][kind] = more
    return found


def diagnosis() -> list[str] | None:
    """The lines of `dcgmi diag` that say that something failed; None if there is no DCGM here or
    it does not answer. We read its table, since its JSON has no stable schema (NVIDIA's
    documentation of DCGM, Diagnostic Errors)."""
    try:
        done = subprocess.run(DIAGNOSIS, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = [" ".join(re.sub(r"[|+]|--+", " ", line).split()) for line in done.stdout.splitlines()]
    failed = [line for line in lines if re.search(r"\bfail\b", line, re.IGNORECASE)]
    return failed if failed or done.returncode == 0 else None


def content(path: Path) -> str | None:
    """The content of a file of the kernel; None if the file is missing or empty."""
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def facts(gpus: Collection[nvml.Gpu]) -> list[dict[str, Any]]:
    """The state of idle GPUs according to the driver: its facts, `unreached` (the other GPUs of the
    host that a GPU does not reach), and `xids` from the kernel's log, which are None if the log
    cannot be read."""
    log, every = xids(), nvml.gpus(visible=False) if gpus else []
    found = []
    for gpu in gpus:
        others = [other for other in every if other.index != gpu.index]
        found.append(gpu.facts() | {
            "unreached": [other.index for other in others if gpu.reaches(other) is False],
            "xids": None if log is None else log.get(gpu.address, []),
        })  # fmt: skip
    return found


@contextmanager
def under_load(gpus: Collection[nvml.Gpu], facts: Collection[dict[str, Any]]) -> Iterator[None]:
    """Samples GPUs as long as the context lasts. Then adds one sample to the facts of each GPU,
    with `reasons` by name: the one at the greatest power, of those whose clock heat or the power
    supply held down if there are any. A GPU takes less power once heat slows it down."""
    greatest: dict[int, nvml.Sample] = {}
    ended = threading.Event()

    def weight(sample: nvml.Sample) -> tuple[bool, float]:
        return bool((sample.reasons or 0) & nvml.HELD), sample.power_w or 0.0

    def watch() -> None:
        while not ended.wait(SAMPLE_S):
            for gpu in gpus:
                now, before = gpu.sample(), greatest.get(gpu.index)
                if before is None or weight(now) >= weight(before):
                    greatest[gpu.index] = now

    with ThreadPoolExecutor(1) as thread:
        watched = thread.submit(watch)
        try:
            yield
        finally:
            ended.set()
    watched.result()
    for gpu, known in zip(gpus, facts, strict=True):
        if sample := greatest.get(gpu.index):
            bits = sample.reasons
            reasons = None if bits is None else nvml.reasons(bits)
            known |= sample._asdict() | {"reasons": reasons}


def xids() -> dict[str, list[int]] | None:
    """The driver's errors (XIDs) in the kernel's log, by PCI address without its function; None if
    this user may not read the log."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found: dict[str, list[int]] = defaultdict(list)
    for address, number in re.findall(r"Xid \(PCI:([\da-fA-F:]+)\): (\d+)", log.stdout):
        found[address.lower()].append(int(number))
    return found


def _has_locks(descriptor: int) -> bool:
    """True if the file system of an open file has locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def files(folder: Path) -> dict[str, Any]:
    """Seconds until a small file is on disk, GB/s of a large file, and whether the file system has
    locks. If the folder cannot be written, the only entry is `problem`."""
    path = folder / f".check-{platform.node()}-{os.getpid()}"
    found: dict[str, Any] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(open_unlinked(path, os.O_EXCL), "wb", buffering=0) as file:
            try:
                for name, size in (("latency_s", 1), ("seconds", FILE_BYTES)):
                    zeros, began = bytes(size), time.perf_counter()
                    if file.write(zeros) < size:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(file.fileno())
                    found[name] = time.perf_counter() - began
                found["write_gb_s"] = FILE_BYTES / 1e9 / found.pop("seconds")
                found["lock"] = _has_locks(file.fileno())
            finally:
                path.unlink(missing_ok=True)
    except OSError as error:
        return {"problem": f"{folder} cannot be written: {error.strerror}"}
    return found
