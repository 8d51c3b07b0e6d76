"""Runs of many dates: one row for each work on each hardware, and where its step time changed.

A run is set against the level before it: the median of the runs since the last change, so that a
slow drift is found as well as a jump.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jaxbench.report.charts import Chart, frame
from jaxbench.report.compare import differences
from jaxbench.report.found import Result
from jaxbench.report.sections import NO_RESULT

UNDATED = datetime.fromtimestamp(0, UTC)
NAMED = 6
"""Differences that are written out; the rest are counted."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run in its row. `change` is its step time over the level before, less one, where that is
    more than the threshold; `differences` are those to the last whole run before."""

    result: Result
    change: float | None = None
    differences: tuple[tuple[str, Any, Any], ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it has a step time that counts."""
        return self.result.verdict.name not in ("failed", "incomplete")

    @property
    def started(self) -> datetime:
        """When it began."""
        return self.result.found.started or UNDATED

    @property
    def why(self) -> str:
        """What a change came with."""
        if self.change is None:
            return ""
        said = [f"{name}: {a} -> {b}" for name, a, b in self.differences[:NAMED]]
        more = len(self.differences) - NAMED
        return "; ".join([*said, *([f"and {more} more"] if more > 0 else [])]) or (
            "nothing recorded differs"
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """The runs of one work on one hardware by date."""

    name: str
    smoke: bool
    published_s: float | None
    points: list[Point]

    @property
    def changes(self) -> list[Point]:
        """Those that are marked."""
        return [p for p in self.points if p.change is not None]


def history(results: Sequence[Result], threshold: float) -> list[Row]:
    """The rows of all runs, by name."""
    groups: dict[tuple, list[Result]] = {}
    for r in sorted(results, key=lambda r: r.found.started or UNDATED):
        f = r.found
        device = str((f.record.get("hardware") or {}).get("device", "hardware not said"))
        dtype = "" if (f.dtype or "") in f.recipe else f" {f.dtype}"
        name = f"{f.recipe.strip()}{dtype} on {f.gpus} x {device}"
        groups.setdefault((name, f.tokens, f.label), []).append(r)
    return [
        Row(
            name=name + (f" ({label})" if label not in ("full", "log", "") else ""),
            smoke=label == "smoke",
            published_s=next((p["step_time_s"] for r in group if (p := r.found.published)), None),
            points=[*_points(group, threshold)],
        )
        for (name, _, label), group in sorted(groups.items(), key=lambda each: each[0][0])
    ]  # fmt: skip


def _points(group: Sequence[Result], threshold: float) -> Iterator[Point]:
    level: list[float] = []
    before: Result | None = None
    for r in group:
        point = Point(result=r)
        if point.whole and r.mean_s is not None:
            change = r.mean_s / statistics.median(level) - 1 if level else 0.0
            if before is not None and abs(change) > threshold:
                point = Point(result=r, change=change, differences=(*differences(before, r),))
                level = []
            level.append(r.mean_s)
            before = r
        yield point


def chart(row: Row, threshold: float) -> Chart | None:
    """Step times over dates, changes numbered as in the list below; None without two runs."""
    days = [(p.started.timestamp() / 86400, p.result.mean_s) for p in row.points if p.whole]
    points = [(day, seconds) for day, seconds in days if seconds is not None]
    if len(points) < 2:
        return None
    all_days = [p.started.timestamp() / 86400 for p in row.points]
    levels = [("ours", points[-1][1], f"last {points[-1][1]:.4g}")]
    if row.published_s:
        levels.append(("published", row.published_s, f"published {row.published_s:g}"))
    ends = sorted({all_days[0], all_days[-1]})
    shown = "%Y-%m-%d" if ends[-1] - ends[0] > 1 else "%m-%d %H:%M"
    said = "; ".join(f"{p.started:%Y-%m-%d} {_percent(p.change)}" for p in row.changes)
    drawn = frame(
        row.name,
        f"step times of {len(points)} runs; changes above {100 * threshold:g} %: {said or 'none'}",
        all_days, [f * s for _, s in points for f in (1 - threshold, 1 + threshold)]
        + [level for _, level, _ in levels],
        unit="s per step", across="", labels=[label for _, _, label in levels],
        x_ticks=[(day, f"{datetime.fromtimestamp(day * 86400, UTC):{shown}}") for day in ends],
        watermark=NO_RESULT if row.smoke else "",
    )  # fmt: skip
    for css, level, _ in levels[1:]:
        drawn.rule(css, level)
    drawn.line("ours", points)
    drawn.dots("ours", points)
    lost = [(p.started.timestamp() / 86400, drawn.y.low) for p in row.points if not p.whole]
    drawn.dots("lost", lost)
    for number, p in enumerate(row.changes, 1):
        drawn.marker(p.started.timestamp() / 86400, str(number))
    drawn.labels(levels)
    return drawn


def _percent(change: float | None) -> str:
    return "" if change is None else f"{100 * change:+.1f} %"


def text(rows: Sequence[Row], threshold: float) -> str:
    """The history for people, in a terminal."""
    lines = []
    for row in rows:
        lines.append(f"{row.name}" + (": no benchmark result" if row.smoke else ""))
        for p in row.points:
            mean, dated = p.result.mean_s, "*" if p.result.found.dated != "record" else " "
            seconds = f"{mean:9.4g} s" if mean is not None and p.whole else f"{'-':>11}"
            mark = "" if p.change is None else f"  {_percent(p.change)}: {p.why}"
            said = p.result.verdict.name + (f": {p.result.verdict.reason}" if not p.whole else "")
            lines.append(f"  {p.started:%Y-%m-%d %H:%M}{dated} {seconds}  {said}{mark}")
        lines.append("")
    lines.append(f"changes above {100 * threshold:g} % of the median since the last one; UTC; "
                 "* the file's time, since the record has none")  # fmt: skip
    return "\n".join(lines) + "\n"


def as_json(rows: Sequence[Row]) -> str:
    """The same for scripts."""
    content = [
        {"row": row.name, "published_s": row.published_s, "runs": [
            {"started": p.started.isoformat(), "dated": p.result.found.dated,
             "step_time_s": p.result.mean_s, "verdict": p.result.verdict.name,
             "change": p.change, "differences": p.differences, "path": str(p.result.found.path)}
            for p in row.points]}
        for row in rows
    ]  # fmt: skip
    return json.dumps(content, indent=2) + "\n"
