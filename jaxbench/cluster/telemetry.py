"""Samples of a node's GPUs during training. A thread of one of the node's processes asks NVML once
a second and sums up the samples. Needs no JAX."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from jaxbench.cluster.nvml import HELD, Gpu, Sample, reasons

INTERVAL_S = 1.0

LOAD = 50
"""A GPU is under load if kernels ran for at least this percent of the time before a sample.
Training pauses for saves, and these samples do not count."""

THROTTLES = 4 | HELD
"""Bits of the reasons that limit the clock: power, heat, and the power of the host."""


class Totals:
    """Sums over the samples of a GPU. The means are over samples under load."""

    def __init__(self) -> None:
        self.first: Sample | None = None
        self.last: Sample | None = None
        self._sums: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._throttled: defaultdict[str, float] = defaultdict(float)
        self._hottest: int | None = None

    def add(self, sample: Sample, seconds: float) -> None:
        """Adds a sample that stands for this many seconds."""
        self.first, self.last = self.first or sample, sample
        if sample.busy_pct is None or sample.busy_pct >= LOAD:
            for name in ("sm_mhz", "power_w"):
                if (value := getattr(sample, name)) is not None:
                    self._sums[name] += value
                    self._counts[name] += 1
            for reason in reasons((sample.reasons or 0) & THROTTLES):
                self._throttled[reason] += seconds
        if sample.temperature_c is not None:
            self._hottest = max(self._hottest or 0, sample.temperature_c)

    def summary(self, max_mhz: int | None) -> dict[str, Any]:
        """The record's figures of this GPU, without what NVML does not report."""
        means = {name: self._sums[name] / count for name, count in self._counts.items()}
        first, last = self.first or Sample(), self.last or Sample()
        mhz = means.get("sm_mhz")
        figures = {
            "sm_mhz": mhz,
            "sm_max_mhz": max_mhz,
            "clock_ratio": mhz / max_mhz if mhz and max_mhz else None,
            "power_w": means.get("power_w"),
            "max_temperature_c": self._hottest,
            "throttled_s": {reason: round(s, 1) for reason, s in self._throttled.items()},
            "ecc_corrected": since(first.ecc_corrected, last.ecc_corrected),
            "ecc_uncorrected": since(first.ecc_uncorrected, last.ecc_uncorrected),
        }
        return {name: value for name, value in figures.items() if value is not None}


def since(before: int | None, now: int | None) -> int | None:
    """What was counted between two samples; None for a counter that began again."""
    return None if before is None or now is None or now < before else now - before


class Sampler:
    """A context in which GPUs are sampled every `interval` seconds. Afterwards `summaries` has the
    figures of each GPU; `gpu` is its number in NVML."""

    def __init__(self, gpus: Sequence[Gpu], interval: float = INTERVAL_S):
        self._gpus, self._interval = gpus, interval
        self.summaries: list[dict[str, Any]] = []
        self._totals = {gpu.index: Totals() for gpu in gpus}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5 * self._interval)  # if a GPU is lost, NVML may never answer
        self.summaries = [
            {"gpu": gpu.index, **self._totals[gpu.index].summary(gpu.sm_max_mhz)}
            for gpu in self._gpus
        ]

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(due - time.monotonic()):
            self.take()
            due = max(due + self._interval, time.monotonic())

    def take(self) -> None:
        """Samples all GPUs."""
        for gpu in self._gpus:
            self._totals[gpu.index].add(gpu.sample(), self._interval)
