"""SVG charts as data for the page's templates, in the units of a viewBox that is 360 wide, so a
phone shows the charts as they are.

Series differ in shape and in the label next to them, never only in colour.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

WIDTH, HEIGHT = 360, 202
LEFT, TOP, BOTTOM = 46, 28, 42
"""Margins for the axes. The right margin depends on the labels."""

LINE_HEIGHT = 13
CHARACTER = 7
"""The width of an average character of a label. Digits in 11 px semibold take 6.1 to 7 in the
common system fonts, and a label may be all digits."""

MOST_POINTS = 300
"""The most points that we draw of a series. For a longer series we draw the least and the largest
point of each bucket."""

Point = tuple[float, float]
Ticks = list[tuple[float, str]]
Label = tuple[str, float, str]
"""The CSS class, y value and text of a label to the right of the plot."""

SHAPES = {
    "ours": (-4, 0, "a4,4 0 1,0 8,0a4,4 0 1,0 -8,0"), "published": (-3.5, -3.5, "h7v7h-7z"),
    "other": (-4.5, 4, "h9l-4.5,-8z"), "outlier": (-4.5, 4, "h9l-4.5,-8z"),
    "lost": (-4, -4, "l8,8m0,-8l-8,8"), "repeat": (-4, 0, "a4,4 0 1,0 8,0a4,4 0 1,0 -8,0"),
}  # fmt: skip
"""The marker of a series by its class (circles, square, triangles, cross): the offset at which
its SVG path starts, and the path."""


SECONDS = "{:.3f}".format
"""Formats the figure of a bar in seconds."""


def three_digits(value: float) -> str:
    """A positive figure with three digits: `5.64`, `11.5`, `191,000`."""
    if not value > 0:
        return f"{value:,.0f}"
    rounded = float(f"{value:.2e}")  # 0.9996 becomes 1.00
    digits = 2 - math.floor(math.log10(rounded))
    return f"{rounded:,.{max(digits, 0)}f}"


class Bar(NamedTuple):
    """A line of a table of bars: the CSS class, the name, the start and length in the unit of the
    table, and the figure next to it. A bar of several `pieces` shows these instead of itself, with
    their names and figures below. A `whisker` is the interval of a figure."""

    css: str
    name: str
    start: float
    length: float
    text: str
    pieces: Sequence["Bar"] = ()
    whisker: tuple[float, float] | None = None


WAITING = ("exposed", "waiting", "slowed")
"""The names of parts of a step in which kernels wait or are slower begin with one of these."""


def waterfall(parts: Mapping[str, float], text: Callable[[float], str]) -> list[Bar]:
    """The bars of the parts of a whole, one after the other."""
    start, bars = 0.0, []
    for name, length in parts.items():
        bars.append(
            Bar("other" if name.startswith(WAITING) else "part", name, start, length, text(length))
        )
        start += length
    return bars


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A map from data to coordinates along one axis."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The coordinate of a value. Values outside of the scale are put on its edge."""
        low, high, value = (math.log2(v) if self.log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + min(max(share, 0.0), 1.0) * (self.end - self.start), 1)


@dataclass(kw_only=True)
class Chart:
    """A chart with its axes, SVG paths by CSS class, and texts as (class, x, y, text, anchor).
    `description` is for readers who cannot see it. The picture marks a y axis that does not begin
    at zero."""

    title: str
    description: str
    x: Scale
    y: Scale
    unit: str
    x_title: str
    x_ticks: Ticks
    y_ticks: Ticks
    watermark: str = ""
    paths: list[tuple[str, str]] = field(default_factory=list)
    texts: list[tuple[str, float, float, str, str]] = field(default_factory=list)

    width = WIDTH
    height = HEIGHT

    def line(self, css: str, points: Sequence[Point]) -> None:
        """Draws a line through points."""
        places = (f"{self.x.at(x):g},{self.y.at(y):g}" for x, y in thin_out(points))
        self.paths.append((f"line {css}", "M" + "L".join(places)))

    def dots(self, css: str, points: Sequence[Point]) -> None:
        """Draws points as the markers of their class."""
        dx, dy, path = SHAPES[css]
        places = [(self.x.at(x) + dx, self.y.at(y) + dy) for x, y in thin_out(points)]
        self.paths.append((f"dot {css}", "".join(f"M{x:g},{y:g}{path}" for x, y in places)))

    def rule(self, css: str, value: float) -> None:
        """Draws a horizontal line."""
        y = self.y.at(value)
        self.paths.append((f"rule {css}", f"M{self.x.start},{y}H{self.x.end}"))

    def band(self, left: float, right: float) -> None:
        """Shades the range between two x values."""
        left, right = self.x.at(left), self.x.at(right)
        self.paths.append(("band", f"M{left},{self.y.end}H{right}V{self.y.start}H{left}z"))

    def marker(self, x: float, text: str) -> None:
        """Draws a vertical line with a text above it."""
        px = self.x.at(x)
        self.paths.append(("rule change", f"M{px},{self.y.end}V{self.y.start}"))
        self.texts.append(("change", px, self.y.end - 5, text, "middle"))

    def note(self, text: str) -> None:
        """Writes a text above the plot."""
        self.texts.append(("note", self.x.start, self.y.end - 5, text, "start"))


def thin_out(points: Sequence[Point]) -> Sequence[Point]:
    """At most about `MOST_POINTS` points of a series: the least and the largest of each bucket."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / MOST_POINTS)
    thin: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        thin += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return thin


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most `most` round values between low and high."""
    if not high > low:
        return [low]
    step = round_step((high - low) / most)
    return [n * step for n in range(math.ceil(low / step - 1e-9), int(high / step + 1e-9) + 1)]


def round_step(rough: float) -> float:
    """A round step between ticks, at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= rough * 0.999)


def ends(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    """The ends of an axis for these values, both at ticks. The axis begins at zero, unless zero may
    be cut off and more than half of the axis would be empty."""
    margin = 0.12 * (max(values) - min(values)) or 0.12 * abs(max(values)) or 1.0
    low, high = min(values) - margin, max(values) + (0.0 if from_zero else margin)
    if from_zero or low < high / 2:
        low = 0.0
    step = round_step((high - low) / 4)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def tick_labels(values: Sequence[float]) -> Ticks:
    """Ticks with as many decimals as are needed to distinguish them."""
    gap = min((b - a for a, b in pairwise(values) if b > a), default=abs(values[0]) or 1.0)
    decimals = next((d for d in range(6) if math.isclose(round(gap, d), gap, rel_tol=1e-6)), 6)
    return [(value, f"{value:,.{decimals}f}") for value in values]


def empty_chart(
    title: str, description: str, xs: Sequence[float], ys: Sequence[float], *,
    unit: str, x_title: str, labels: Sequence[Label],
    x_ticks: Ticks | None = None, log: bool = False, watermark: str = "",
    from_zero: bool = False,
) -> Chart:  # fmt: skip
    """A chart without marks, with labels on the right. Its axes hold these values; the y axis may
    be cut (`ends`). Ticks on the x axis are whole numbers, or `x_ticks`."""
    low, high = ends(ys, from_zero)
    widest = max((len(text) for _, _, text in labels), default=0)
    right = WIDTH - 10 - CHARACTER * widest
    x = Scale(low=min(xs), high=max(xs), start=LEFT + 6, end=right, log=log)
    y = Scale(low=low, high=high, start=HEIGHT - BOTTOM, end=TOP)
    whole = [v for v in ticks(x.low, x.high) if v == int(v)] or [x.low]
    chart = Chart(
        title=title, description=description, x=x, y=y, unit=unit, x_title=x_title,
        x_ticks=x_ticks or tick_labels(whole), y_ticks=tick_labels(ticks(low, high, 4)),
        watermark=watermark,
    )  # fmt: skip
    last = -math.inf
    for css, value, text in sorted(labels, key=lambda label: -label[1]):
        last = max(y.at(value) + 4, last + LINE_HEIGHT)  # without overlap
        chart.texts.append((css, right + 8, last, text, "start"))
    return chart


def chart_over_gpus(
    title: str, description: str, unit: str, series: Mapping[str, Mapping[int, float]],
    values: Sequence[float], labels: Sequence[Label],
) -> Chart:  # fmt: skip
    """A chart of series by CSS class over numbers of GPUs. Its y axis holds `values`."""
    gpus = sorted({n for points in series.values() for n in points})
    chart = empty_chart(
        title, description, gpus, values, unit=unit, x_title="GPUs", labels=labels, log=True,
        x_ticks=[(n, str(n)) for n in gpus], from_zero=True,
    )  # fmt: skip
    for css, points in series.items():
        chart.line(css, [*points.items()])
        chart.dots(css, [*points.items()])
    return chart
