"""The verdict on a result. Like the published scripts, it accepts 95 % of the published
throughput."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

PASS: Final = 0.95
"""The least share of the published throughput that passes."""

SMOKE: Final = (
    "SMOKE RUN: tiny dims on this machine's CPU. Not a benchmark result; compare it with nothing."
)
"""First line of the log of a smoke run."""

Name = Literal["pass", "slow", "failed", "interrupted", "incomplete", "not comparable"]


@dataclass(frozen=True)
class Verdict:
    """A verdict, its reason in a few words, and the measured throughput over the published one. The
    ratio is None if they must not be compared."""

    name: Name
    reason: str
    ratio: float | None = None

    @property
    def bad(self) -> bool:
        """True if `report` exits with status 1."""
        return self.name not in ("pass", "not comparable")

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def percent(ratio: float) -> str:
    """A ratio rounded down to a tenth of a percent, so that a slow result never reads as 95.0 %."""
    return f"{math.floor(1000 * ratio) / 10:.1f} %"


def judge(
    step_time_s: float | None,
    published_s: float | None,
    *,
    failed: str | None = None,
    interrupted: str | None = None,
    incomplete: Sequence[str] = (),
    not_comparable: Sequence[str] = (),
) -> Verdict:
    """The verdict on a mean step time. `failed` and `interrupted` say why. A failed, interrupted or
    incomplete run is not compared, and a run whose work differs from the published one never
    passes."""
    if failed:
        return Verdict("failed", failed)
    if interrupted:
        return Verdict("interrupted", interrupted)
    if incomplete:
        return Verdict("incomplete", "; ".join(incomplete))
    if step_time_s is None:
        return Verdict("incomplete", "no step has a time of its own")
    if not_comparable:
        return Verdict("not comparable", "; ".join(not_comparable))
    if published_s is None:
        return Verdict("not comparable", "nothing is published for this work")
    ratio = published_s / step_time_s
    reason = f"{percent(ratio)} of the published throughput"
    return Verdict("pass" if ratio >= PASS else "slow", reason, ratio)
