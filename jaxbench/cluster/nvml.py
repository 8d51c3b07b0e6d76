"""Facts and samples of each GPU of this host, from NVIDIA's management library (NVML). It needs no
root and makes no context on a GPU.

The library is `nvidia-ml-py` of the extra `gpu`. What a driver does not report is None.
"""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxbench.base.errors import RecipeError

CLOCK_REASONS = {
    1: "idle", 2: "application clocks", 4: "power cap", 8: "hardware slowdown", 16: "sync boost",
    32: "software thermal slowdown", 64: "hardware thermal slowdown", 128: "power brake",
    256: "display clock",
}  # fmt: skip
"""Bits of NVML's clock event reasons, which used to be called throttle reasons."""

HELD = 8 | 32 | 64 | 128
"""Reasons that a GPU under load should not have. The power cap is not among them, since it is
normal under load."""

LINKS = 91
"""The field that has the number of NVLinks."""


class Sample(NamedTuple):
    """The state of a GPU by NVML: MHz, W, Celsius, bits of the reasons for a lower clock, percent
    of the time with a kernel, and ECC errors since the driver was loaded. None for what NVML does
    not report."""

    sm_mhz: int | None = None
    power_w: int | None = None
    temperature_c: int | None = None
    reasons: int | None = None
    busy_pct: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None


ECC = (3, 4)
"""The fields that have the ECC errors that were corrected and those that were not."""


def reasons(bits: int) -> list[str]:
    """The names of reasons for a lower clock."""
    return [name for bit, name in CLOCK_REASONS.items() if bits & bit]


def _value(function: str, *arguments: Any) -> Any:
    """The result of a function of NVML. None if the library, the driver or the GPU does not
    answer."""
    import pynvml

    try:
        return getattr(pynvml, function)(*arguments)
    except (pynvml.NVMLError, AttributeError):
        return None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


class Gpu:
    """A GPU by its number in NVML, which `nvidia-smi` uses too."""

    def __init__(self, index: int):
        self.index = index
        self._handle = _value("nvmlDeviceGetHandleByIndex", index)
        self.uuid: str | None = self._ask("UUID")

    def _ask(self, what: str, *arguments: Any) -> Any:
        return _value(f"nvmlDeviceGet{what}", self._handle, *arguments)

    def _fields(self, *numbers: int) -> list[int | None]:
        values = self._ask("FieldValues", numbers) or []
        # The low bytes of the union hold an unsigned value of any width.
        told = [None if value.nvmlReturn else int(value.value.ullVal) for value in values]
        return told or [None] * len(numbers)

    @property
    def name(self) -> str | None:
        """The driver's name for it."""
        return self._ask("Name")

    @property
    def address(self) -> str:
        """The PCI address as the kernel's log has it, without the function."""
        pci = self._ask("PciInfo")
        return (pci.busId if pci else "").lower().removeprefix("0000").partition(".")[0]

    @property
    def sm_max_mhz(self) -> int | None:
        """The highest clock of the multiprocessors."""
        return self._ask("MaxClockInfo", 1)

    def facts(self) -> dict[str, Any]:
        """Model, firmware, modes and limits, in MHz, W and numbers of links. `ecc`, `mig` and
        `persistence` say whether these are on. The last entries are rows of memory that are
        remapped, and whether a remapping waits for a reset or failed."""
        mig, ecc, pci = (self._ask(name) for name in ("MigMode", "EccMode", "PciInfo"))
        persistence = self._ask("PersistenceMode")
        (count,) = self._fields(LINKS)
        states = [self._ask("NvLinkState", link) for link in range(count or 0)]
        rows = self._ask("RemappedRows") or (None,) * 4
        return {
            "name": self.name,
            "uuid": self.uuid,
            "serial": self._ask("Serial"),
            "pci": pci and pci.busId,
            "vbios": self._ask("VbiosVersion"),
            "mig": mig and bool(mig[0]),
            "ecc": ecc and bool(ecc[0]),
            "persistence": None if persistence is None else bool(persistence),
            "power_limit_w": _scaled(self._ask("EnforcedPowerLimit"), 1e-3),
            "power_default_w": _scaled(self._ask("PowerManagementDefaultLimit"), 1e-3),
            "sm_max_mhz": self.sm_max_mhz,
            "pcie_lanes": self._ask("CurrPcieLinkWidth"),
            "pcie_max_lanes": self._ask("MaxPcieLinkWidth"),
            "nvlinks": count,
            "nvlinks_up": sum(map(bool, states)) if count else None,
            "rows_remapped": None if rows[0] is None else rows[0] + rows[1],
            "remap_pending": rows[2],
            "remap_failed": rows[3],
        }

    def errors(self) -> dict[str, int | None]:
        """Counts since the driver was loaded: errors of memory and links, remapped rows, and the
        milliseconds in which heat held the clock down."""
        corrected, uncorrected, replays, count = self._fields(*ECC, 94, LINKS)
        hot, rows = self._ask("ViolationStatus", 1), self._ask("RemappedRows")
        # replays, recoveries, and transfers with a wrong checksum
        pairs = [(link, kind) for link in range(count or 0) for kind in range(3)]
        links = [n for pair in pairs if (n := self._ask("NvLinkErrorCounter", *pair)) is not None]
        return {
            "ecc_corrected": corrected,
            "ecc_uncorrected": uncorrected,
            "hot_ms": hot and hot.violationTime // 10**6,
            "pcie_replays": replays,
            "nvlink_errors": sum(links) if links else None,
            "rows_remapped": rows and rows[0] + rows[1],
        }

    def sample(self) -> Sample:
        """A sample, without the counters that take NVML 20 ms each."""
        watts, busy = self._ask("PowerUsage"), self._ask("UtilizationRates")
        return Sample(
            self._ask("ClockInfo", 1),
            watts and round(watts / 1000),
            self._ask("Temperature", 0),
            self._ask("CurrentClocksEventReasons"),
            busy and busy.gpu,
            *self._fields(*ECC),
        )

    def reaches(self, other: "Gpu") -> bool | None:
        """True if this GPU can read the other's memory over NVLink; None if the driver does not
        say."""
        status = self._ask("P2PStatus", other._handle, 2)
        return None if status is None else status == 0


def driver_version() -> str | None:
    """The driver's version, once `gpus` has been called."""
    return _value("nvmlSystemGetDriverVersion")


def gpus(*, visible: bool = True) -> list[Gpu]:
    """The GPUs of this host, in CUDA's order: the ones that CUDA_VISIBLE_DEVICES leaves to this
    process, or all. Raises RecipeError with the reason if NVML cannot be asked."""
    try:
        import pynvml
    except ImportError as error:
        raise RecipeError("NVML needs a package: pip install nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
        every = [Gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        raise RecipeError(f"NVML does not answer: {error}") from error
    names = os.environ.get("CUDA_VISIBLE_DEVICES") if visible else None
    return every if names is None else list(_named(every, names.split(",")))


def _named(every: list[Gpu], names: list[str]) -> Iterator[Gpu]:
    """GPUs by number or by the beginning of a UUID. As in CUDA, the first unknown name ends the
    list."""
    for name in map(str.strip, names):
        named = [gpu for gpu in every if name in (str(gpu.index), (gpu.uuid or "")[: len(name)])]
        if not (name and named):
            return
        yield named[0]
