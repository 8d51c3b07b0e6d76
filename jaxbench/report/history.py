"""Step times over many dates: one series for each workload on each hardware, with its changes.

We compare the last runs with the median of the runs before them, back to the last change. This
finds a slow drift as well as a jump.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from jaxbench.base import files, hardware
from jaxbench.base.errors import counted, listed
from jaxbench.base.outliers import DEVIATIONS, robust_deviation
from jaxbench.pages.charts import Chart, Label, empty_chart
from jaxbench.report.compare import differences, short
from jaxbench.report.gpus import gpus, slow_nodes
from jaxbench.report.named import NO_RESULT
from jaxbench.report.runs import Result, RunData

WEEKS = 4
"""The weeks before the last run for which we list slow nodes."""

LISTED = 6
"""The number of differences that we list. We count the rest."""

SHOWN = 100
"""The number of runs of a row, and of changes, that we list, the last ones first. We count the
rest."""

TOGETHER = (1, 2, 4, 8, 16)
"""The numbers of last runs that we compare with the runs before. One run shows a jump. The median
of several shows a change that is smaller than the runs' own spread."""

FEWEST = 9
"""The least number of runs whose step times show their own spread. With fewer runs, only the
threshold counts."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run in its series.

    The first run of a change has `change`: its step time (or the median of this and the next ones)
    over the median since the last change, minus one. `differences` are the differences to the last
    complete run before it.
    """

    result: Result
    change: float | None = None
    differences: tuple[tuple[str, Any, Any], ...] = ()

    @property
    def started(self) -> datetime:
        """The time at which the run began."""
        return self.result.run.date

    @property
    def day(self) -> float:
        """Days since 1970."""
        return self.started.timestamp() / 86400

    @property
    def slow_nodes(self) -> dict[str, str]:
        """Reasons why nodes of this run are slow, by node."""
        return slow_nodes(gpus(self.result.run.record))

    @property
    def why(self) -> list[str]:
        """The recorded differences that came with a change."""
        if self.change is None:
            return []
        texts = [f"{name}: {short(a)} -> {short(b)}" for name, a, b in self.differences]
        more = [f"and {len(texts) - LISTED} more"] if len(texts) > LISTED else []
        return [*texts[:LISTED], *more] or ["neither the records nor the telemetry differ"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """The runs of one workload on one hardware, by date. `brief` is a shorter name."""

    name: str
    brief: str
    smoke: bool
    published_s: float | None
    points: list[Point]

    @property
    def changes(self) -> list[Point]:
        """Points at which the step time changed."""
        return [p for p in self.points if p.change is not None]

    @property
    def steps(self) -> list[tuple[Point, float]]:
        """The complete runs, with their step times."""
        return [(p, s) for p in self.points if (s := p.result.counted_s)]

    def says(self, threshold: float) -> str:
        """The last change, or that there is none."""
        if self.changes:
            last = self.changes[-1]
            since = f"{last.started.day} {last.started:%B %Y}"
            return f"{faster_or_slower(last.change)} since {since}"
        if len(self.steps) < 2:
            return "one run, nothing to compare" if self.steps else "no complete run"
        return f"no change above {100 * threshold:g} % in {len(self.steps)} runs"


def faster_or_slower(change: float | None) -> str:
    """A change of a step time in words."""
    percent = 100 * (change or 0.0)
    return f"{abs(percent):.1f} % {'slower' if percent > 0 else 'faster'}"


def headline(history: Sequence[Series], threshold: float) -> str:
    """What changed, of the first row that did."""
    changed = [series for series in history if series.changes]
    if changed:
        others = f"; {counted(len(changed) - 1, 'other row')} changed too" if changed[1:] else ""
        return f"{changed[0].brief}: {changed[0].says(threshold)}{others}."
    if compared := sum(len(series.steps) > 1 for series in history):
        return f"No change above {100 * threshold:g} % in {counted(compared, 'row')}."
    return "No row has two complete runs, so there is nothing to compare."


def history(results: Sequence[Result], threshold: float) -> list[Series]:
    """The series of all runs. First come those that changed, the largest slowdown first; then the
    others by name."""
    dated = sorted(results, key=lambda r: r.run.date)
    tflop = {_row(r.run): r.run.tflop for r in reversed(dated) if r.run.tflop}
    groups: dict[tuple, list[Result]] = defaultdict(list)
    for result in dated:
        row = _row(result.run)
        # A run without a step says nothing of its model. It goes to the first one of its row.
        groups[row, result.run.tflop or tflop.get(row)].append(result)
    series = [_series(group, row[0], threshold) for (row, _), group in groups.items()]
    alike = Counter(row.name for row in series)
    series = [_with_work(row) if alike[row.name] > 1 else row for row in series]

    def key(row: Series) -> tuple[bool, bool, float, str]:
        change = row.changes[-1].change if row.changes else None
        return change is None, row.smoke, -(change or 0.0), row.name

    return sorted(series, key=key)


def _row(run: RunData) -> tuple:
    """The device of a run, and what else runs of one series share besides the model."""
    device = str((run.record.get("hardware") or {}).get("device", "unknown hardware"))
    return device, run.recipe, run.dtype, run.gpus, run.tokens, run.label


def _series(group: Sequence[Result], device: str, threshold: float) -> Series:
    r = group[0].run
    dtype, label = r.suffixes
    recipe, _, row = r.recipe.partition(":")
    gpu = hardware.identify(device)
    on = f" on {r.gpus} x {device}" if r.gpus else f" on {device}"
    briefly = f" on {counted(r.gpus, gpu.name)}" if gpu else on
    return Series(
        name=r.recipe + dtype + on + label,
        brief=(recipe if row == str(r.gpus) else r.recipe) + dtype + briefly + label,
        smoke=r.label == "smoke",
        published_s=next((p["step_time_s"] for r in group if (p := r.run.published)), None),
        points=[*_points(group, threshold)],
    )


def _with_work(row: Series) -> Series:
    """A series whose name says how much work a step is, next to one of the same row with another
    model or batch."""
    runs = [point.result.run for point in row.points]
    work = max(runs, key=lambda run: run.tflop or 0.0).work  # not that of a run without a step
    return replace(row, name=f"{row.name}, {work}", brief=f"{row.brief}, {work}")


def _points(group: Sequence[Result], threshold: float) -> Iterator[Point]:
    changes = find_changes([s for r in group if (s := r.counted_s)], threshold)
    previous: Result | None = None
    number = 0
    for r in group:
        point = Point(result=r)
        if r.counted_s:
            if previous is not None and number in changes:
                different = (*differences([previous], [r]),)
                point = Point(result=r, change=changes[number], differences=different)
            number, previous = number + 1, r
        yield point


def find_changes(times: Sequence[float], threshold: float) -> dict[int, float]:
    """The changes of a series of step times, by the number of their first run. A change is larger
    than the threshold, and larger than `DEVIATIONS` standard deviations of a difference of medians.

    The standard deviation of a run is a robust one. It is taken from the differences between
    neighbours, which a few changes do not move. A median of n values has 1.57 / n of the variance
    of one value.
    """
    values = np.asarray(times)
    steps = np.diff(np.log(values)).tolist()
    spread = robust_deviation(steps) / 2**0.5 if len(times) >= FEWEST else 0.0
    changes: dict[int, float] = {}
    begin = 0
    for end in range(1, len(times) + 1):
        for count in TOGETHER:
            middle = end - count
            if middle - begin < count:
                break
            change = statistics.median(times[middle:end]) / np.median(values[begin:middle]) - 1
            variance = sum(min(1.0, 1.57 / n) for n in (count, middle - begin))
            if abs(change) > max(threshold, DEVIATIONS * spread * variance**0.5):
                begin = middle
                changes[begin] = float(change)
                break
    return changes


class SlowNode(NamedTuple):
    """A slow node: the number of runs in which it was slow, and of all runs on it; and when and why
    it was slow last."""

    name: str
    slow: int
    runs: int
    last: str


def worst_nodes(history: Sequence[Series]) -> list[SlowNode]:
    """The slow nodes of the last weeks, the worst first."""
    points = sorted((p for series in history for p in series.points), key=lambda p: p.started)
    recent = [p for p in points if (points[-1].started - p.started).days < 7 * WEEKS]
    ran = Counter(n for p in recent for n in {gpu.node for gpu in gpus(p.result.run.record)})
    slow: dict[str, list[str]] = defaultdict(list)
    for p in recent:
        for node, why in p.slow_nodes.items():
            slow[node].append(f"{p.started:%Y-%m-%d}: {why}")
    worst = sorted(slow, key=lambda node: -len(slow[node]) / ran[node])
    return [SlowNode(node, len(slow[node]), ran[node], slow[node][-1]) for node in worst]


def chart(series: Series, threshold: float) -> Chart | None:
    """Step times over dates, with numbered changes. None if there are fewer than two complete
    runs."""
    points = [(p.day, seconds) for p, seconds in series.steps]
    if len(points) < 2:
        return None
    days = [p.day for p in series.points]
    labels: list[Label] = [("ours", points[-1][1], f"last {points[-1][1]:.3f}")]
    if series.published_s:
        labels.append(("published", series.published_s, f"published {series.published_s:.3f}"))
    ends = sorted({days[0], days[-1]})
    date = "%Y-%m-%d" if ends[-1] - ends[0] > 1 else "%m-%d %H:%M"
    dated = (f"{p.started:%Y-%m-%d} {faster_or_slower(p.change)}" for p in reversed(series.changes))
    changes = listed(dated, SHOWN, "; ")
    drawing = empty_chart(
        series.name,
        f"step times of {len(points)} runs; changes above {100 * threshold:g} %: "
        f"{changes or 'none'}",
        days, [f * s for _, s in points for f in (1 - threshold, 1 + threshold)]
        + [value for _, value, _ in labels],
        unit="s per step", x_title="", labels=labels,
        x_ticks=[(day, f"{datetime.fromtimestamp(day * 86400, UTC):{date}}") for day in ends],
        watermark=NO_RESULT if series.smoke else "",
    )  # fmt: skip
    if series.published_s:
        drawing.rule("published", series.published_s)
    drawing.line("ours", points)
    drawing.dots("ours", points)
    failed = [(p.day, drawing.y.low) for p in series.points if not p.result.complete]
    drawing.dots("lost", failed)
    for number, p in enumerate(series.changes, 1):
        drawing.marker(p.day, str(number))
    return drawing


def text(history: Sequence[Series], threshold: float) -> str:
    """The history for a terminal: what changed, then the runs of each row."""
    lines = [headline(history, threshold), ""]
    for series in history:
        smoke = " (no benchmark result)" if series.smoke else ""
        lines.append(f"{series.name}{smoke}: {series.says(threshold)}")
        for p in series.points[: -SHOWN - 1 : -1]:
            result = p.result
            file_time = "*" if result.run.dated != "record" else " "
            seconds = f"{s:9.3f} s" if (s := result.counted_s) else f"{'-':>11}"
            verdict = result.verdict.name if result.complete else str(result.verdict)
            change = "" if p.change is None else f"  {faster_or_slower(p.change)}"
            lines.append(f"  {p.started:%Y-%m-%d %H:%M}{file_time} {seconds}  {verdict}{change}")
            lines += [f"      {text}" for text in p.why]
        if (earlier := len(series.points) - SHOWN) > 0:
            lines.append(f"  and {earlier} earlier runs: --format json has all of them")
        lines.append("")
    for node in worst_nodes(history):
        when = f"{node.slow} of {node.runs} runs of {WEEKS} weeks, last on {node.last}"
        lines.append(f"node {node.name} was slow in {when}")
    lines += [
        f"A change differs by more than {100 * threshold:g} % from the median since the change "
        "before, and by more than the runs' own spread.",
        "Times are in UTC. * marks a file's time, where the record has none.",
    ]
    return "\n".join(lines) + "\n"


def as_json(history: Sequence[Series]) -> str:
    """The history for scripts."""
    content = [
        {"row": series.name, "published_s": series.published_s, "runs": [
            {"started": p.started.isoformat(), "dated": p.result.run.dated,
             "step_time_s": p.result.counted_s,
             "verdict": p.result.verdict.name,
             "slow_nodes": p.slow_nodes, "change": p.change, "differences": p.differences,
             "path": str(p.result.run.path)}
            for p in series.points]}
        for series in history
    ]  # fmt: skip
    return files.as_json(content)
