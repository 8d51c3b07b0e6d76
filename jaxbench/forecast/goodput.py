"""Goodput: the share of a job's time in which it trains, when GPUs fail.

A job of N GPUs stops whenever one of its parts fails. It then restarts from its last checkpoint and
computes again what it had computed since. More frequent checkpoints lose less work but cost more
time. `docs/design/goodput.md` derives the formulas. All times are in seconds, unless a name says
otherwise.

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval, Comm. ACM 17
(1974); J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
Future Generation Computer Systems 22 (2006).
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Failures that somebody published: so many `failures` of jobs in so many GPU-hours."""

    name: str
    what: str
    gpu_hours: float
    failures: float
    source: str

    @property
    def mtbf_gpu_hours(self) -> float:
        """GPU-hours from one failure to the next."""
        return self.gpu_hours / self.failures


LLAMA3 = Observed(
    name="Llama 3",
    what="Llama 3 405B on 16,384 H100s: 419 unexpected interruptions in 54 days",
    gpu_hours=16384 * 54 * 24,
    failures=419,
    source="arXiv 2407.21783, section 3.3.4",
)
"""The default: the largest run whose interruptions are public."""

OBSERVED = (
    LLAMA3,
    Observed(
        name="RSC-1",
        what="Meta's research cluster RSC-1, A100s: 6.5 failures in 1,000 days of a node with 8",
        gpu_hours=1000 * 24 * 8,
        failures=6.5,
        source="arXiv 2410.21680",
    ),
    Observed(
        name="1,024-GPU jobs",
        what="Meta's research clusters, A100s: a mean of 7.9 hours to failure of jobs with 1,024",
        gpu_hours=7.9 * 1024,
        failures=1,
        source="arXiv 2410.21680",
    ),
)
"""Published failure rates. They differ by a factor of six, so a buyer should try several."""

RESTART_S = 600.0
"""Seconds from a failure until the job starts again: less than ten minutes on average to detect and
diagnose a failure of a job with more than 10,000 GPUs (MegaScale, arXiv 2402.15627)."""

STORAGE_GB_S_PER_GPU = 2000 / 16384
"""GB/s (1e9 bytes) to and from storage for each GPU of a job. Llama 3's storage sustained 2 TB/s
for 16,384 GPUs (arXiv 2407.21783, section 3.3.1)."""


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """What decides goodput. `storage_gb_s` is for a whole job; None takes `STORAGE_GB_S_PER_GPU`
    for each of its GPUs. `restart_s` is without loading the checkpoint."""

    mtbf_gpu_hours: float = LLAMA3.mtbf_gpu_hours
    storage_gb_s: float | None = None
    restart_s: float = RESTART_S


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The goodput of a job, a `share` of its time, and what it follows from: the mean time between
    failures, the times to write a checkpoint and to restart, and the interval of computing between
    two checkpoints."""

    share: float
    mtbf_s: float
    checkpoint_s: float
    restart_s: float
    interval_s: float


def job_goodput(gpus: int, state_bytes: float, assumed: Assumed) -> Goodput:
    """The goodput of a job whose train state has so many bytes, with checkpoints at the interval
    that `daly` finds best.

    Training waits while a checkpoint is written, and a checkpoint takes as long to load as to
    write.
    """
    mtbf_s = assumed.mtbf_gpu_hours * 3600 / gpus  # GPUs fail independently of each other
    storage_gb_s = assumed.storage_gb_s or gpus * STORAGE_GB_S_PER_GPU
    written_s = state_bytes / (storage_gb_s * 1e9)
    restart_s = assumed.restart_s + written_s
    interval_s = daly(written_s, mtbf_s)
    return Goodput(
        share=goodput(interval_s, written_s, restart_s, mtbf_s),
        mtbf_s=mtbf_s,
        checkpoint_s=written_s,
        restart_s=restart_s,
        interval_s=interval_s,
    )


def daly(written_s: float, mtbf_s: float) -> float:
    """The best seconds of computing between two checkpoints, to higher order (Daly 2006). The first
    order is the square root (Young 1974)."""
    if written_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = written_s / (2 * mtbf_s)
    young = math.sqrt(2 * written_s * mtbf_s)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - written_s


def goodput(interval_s: float, written_s: float, restart_s: float, mtbf_s: float) -> float:
    """The share of time in which a job makes progress, if the times between failures are
    exponential with mean `mtbf_s`.

    A checkpoint of `written_s` follows each `interval_s` of computing. A failure at any time, also
    while a checkpoint is written or the job restarts, costs `restart_s` and everything since the
    last checkpoint.
    """
    try:
        segment_s = mtbf_s * math.exp(restart_s / mtbf_s)
        segment_s *= math.expm1((interval_s + written_s) / mtbf_s)
    except OverflowError:
        return 0.0
    return interval_s / segment_s
