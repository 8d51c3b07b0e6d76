"""Samples of a node's GPUs during training. A thread of one of the node's processes asks NVML once
a second, writes a compact file, and sums up the samples. Needs no JAX."""

import gzip
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxbench.base.files import open_unlinked
from jaxbench.cluster.nvml import HELD, Gpu, Sample, reasons

INTERVAL_S = 1.0

TOGETHER = 60
"""Samples of a GPU that are compressed together, and so the most that a killed process loses."""

LOAD = 50
"""A GPU is under load if kernels ran for at least this percent of the time before a sample.
Training pauses for saves, and these samples do not count."""

THROTTLES = 4 | HELD
"""Bits of the reasons that limit the clock: power, heat, and the power of the host."""

COUNTED = Sample._fields.index("nvlink_sent_mib")
"""The first field of a sample that counts since the driver was loaded. The file has the counts
since the sample before."""


class Totals:
    """Sums over the samples of a GPU. The means are over samples under load."""

    def __init__(self) -> None:
        self.first: Sample | None = None
        self.last: Sample | None = None
        self._sums: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._throttled: defaultdict[str, float] = defaultdict(float)
        self._hottest: int | None = None

    def add(self, sample: Sample, seconds: float) -> list[int | None]:
        """Adds a sample that stands for this many seconds. Returns what was counted since the last
        one."""
        self.first, last, self.last = self.first or sample, self.last or sample, sample
        if sample.busy_pct is None or sample.busy_pct >= LOAD:
            for name in ("sm_mhz", "power_w"):
                if (value := getattr(sample, name)) is not None:
                    self._sums[name] += value
                    self._counts[name] += 1
            for reason in reasons((sample.reasons or 0) & THROTTLES):
                self._throttled[reason] += seconds
        if sample.temperature_c is not None:
            self._hottest = max(self._hottest or 0, sample.temperature_c)
        return since(last, sample)

    def summary(self, max_mhz: int | None) -> dict[str, Any]:
        """The record's figures of this GPU, without what NVML does not report."""
        means = {name: self._sums[name] / count for name, count in self._counts.items()}
        errors = since(self.first or Sample(), self.last or Sample())[-2:]
        mhz = means.get("sm_mhz")
        figures = {
            "sm_mhz": mhz,
            "sm_max_mhz": max_mhz,
            "clock_ratio": mhz / max_mhz if mhz and max_mhz else None,
            "power_w": means.get("power_w"),
            "max_temperature_c": self._hottest,
            "throttled_s": {reason: round(s, 1) for reason, s in self._throttled.items()},
            "ecc_corrected": errors[0],
            "ecc_uncorrected": errors[1],
        }
        return {name: value for name, value in figures.items() if value is not None}


def since(before: Sample, now: Sample) -> list[int | None]:
    """Counts between two samples; None for a counter that began again."""
    pairs = zip(before[COUNTED:], now[COUNTED:], strict=True)
    return [None if a is None or b is None or b < a else b - a for a, b in pairs]


class Sampler:
    """A context in which GPUs are sampled every `interval` seconds, into a CSV file in gzip. Each
    part of the file can be read alone. If the file cannot be written, the sampler gives it up and
    says so with `say`. Afterwards `summaries` has the figures of each GPU; `gpu` is its number in
    NVML."""

    def __init__(
        self, gpus: Sequence[Gpu], path: Path, say: Callable[[str], None],
        interval: float = INTERVAL_S,
    ):  # fmt: skip
        self._gpus, self._path, self._say, self._interval = gpus, path, say, interval
        self.summaries: list[dict[str, Any]] = []
        self._totals = {gpu.index: Totals() for gpu in gpus}
        self._lines = [] if path.exists() else [",".join(("time", "gpu", *Sample._fields))]
        self._writes = True
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5 * self._interval)  # if a GPU is lost, NVML may never answer
        self._write()
        self.summaries = [
            {"gpu": gpu.index, **self._totals[gpu.index].summary(gpu.sm_max_mhz)}
            for gpu in self._gpus
        ]

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(due - time.monotonic()):
            self.take(time.time())
            due = max(due + self._interval, time.monotonic())

    def take(self, now: float) -> None:
        """Samples all GPUs. `now` is in seconds since 1970."""
        for gpu in self._gpus:
            sample = gpu.sample()
            counted = self._totals[gpu.index].add(sample, self._interval)
            values = (round(now), gpu.index, *sample[:COUNTED], *counted)
            self._lines.append(",".join("" if value is None else str(value) for value in values))
        if len(self._lines) >= TOGETHER * len(self._gpus):
            self._write()

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        if not lines or not self._writes:
            return
        try:
            with open(open_unlinked(self._path, os.O_APPEND), "ab") as file:
                file.write(gzip.compress("".join(f"{line}\n" for line in lines).encode()))
        except OSError as error:
            self._writes = False
            self._say(f"telemetry: {self._path} cannot be written: {error.strerror}")
