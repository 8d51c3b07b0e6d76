"""Charts of the page, as data for its templates: axes, and marks in units of a picture that is 360
wide, so that a phone shows it as it is.

What tells two series apart is their shape and a label beside them, never colour alone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

WIDTH, HEIGHT = 360, 190
LEFT, TOP, BOTTOM = 46, 28, 30
"""Room for the axes; that on the right is for the labels of what is drawn."""

LINE_HEIGHT, CHARACTER = 13, 6.3
MOST_POINTS = 300
"""Of a series: of a longer one the least and the largest of each stretch are drawn."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From values to places in the picture."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The place of a value; what lies outside is put on the edge."""
        low, high, value = (math.log2(v) if self.log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + min(max(share, 0.0), 1.0) * (self.end - self.start), 1)


@dataclass(frozen=True)
class Mark:
    """Something drawn, by the class of its style: an SVG path."""

    css: str
    path: str


@dataclass(frozen=True)
class Text:
    """Something written, by the class of its style."""

    css: str
    x: float
    y: float
    text: str
    anchor: str = "start"


@dataclass(kw_only=True)
class Chart:
    """A picture with its axes; `description` says in words what is to be seen."""

    title: str
    description: str
    x: Scale
    y: Scale
    unit: str
    across: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    watermark: str = ""
    marks: list[Mark] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)

    width = WIDTH
    height = HEIGHT

    def places(self, points: Iterable[Point]) -> list[Point]:
        """Where points lie in the picture."""
        return [(self.x.at(x), self.y.at(y)) for x, y in points]

    def line(self, css: str, points: Sequence[Point]) -> None:
        """Draws a line through points."""
        places = (f"{x:g},{y:g}" for x, y in self.places(thinned(points)))
        self.marks.append(Mark(f"line {css}", "M" + "L".join(places)))

    def dots(self, css: str, points: Sequence[Point]) -> None:
        """Draws points in the shape of their class."""
        path = "".join(SHAPES[css](x, y) for x, y in self.places(thinned(points)))
        self.marks.append(Mark(f"dot {css}", path))

    def rule(self, css: str, value: float) -> None:
        """Draws a level line."""
        y = self.y.at(value)
        self.marks.append(Mark(f"rule {css}", f"M{self.x.start},{y}H{self.x.end}"))

    def band(self, left: float, right: float) -> None:
        """Shades the picture between two values."""
        left, right = self.x.at(left), self.x.at(right)
        self.marks.append(Mark("band", f"M{left},{self.y.end}H{right}V{self.y.start}H{left}z"))

    def marker(self, x: float, text: str) -> None:
        """Marks a value on the axis across with an upright line, and something above it."""
        px = self.x.at(x)
        self.marks.append(Mark("rule change", f"M{px},{self.y.end}V{self.y.start}"))
        self.texts.append(Text("change", px, self.y.end - 5, text, "middle"))

    def above(self, text: str) -> None:
        """Writes above the picture: what does not fit into it."""
        self.texts.append(Text("note", self.x.start, self.y.end - 5, text))

    def labels(self, wanted: Iterable[tuple[str, float, str]]) -> None:
        """Writes (class, value, text) to the right of the picture, none over another."""
        last = -math.inf
        for css, value, text in sorted(wanted, key=lambda each: -each[1]):
            last = max(self.y.at(value) + 4, last + LINE_HEIGHT)
            self.texts.append(Text(css, self.x.end + 8, last, text))


def _circle(x: float, y: float) -> str:
    return f"M{x - 4:g},{y:g}a4,4 0 1,0 8,0a4,4 0 1,0 -8,0"


def _triangle(x: float, y: float) -> str:
    return f"M{x - 4.5:g},{y + 4:g}h9l-4.5,-8z"


def _square(x: float, y: float) -> str:
    return f"M{x - 3.5:g},{y - 3.5:g}h7v7h-7z"


def _cross(x: float, y: float) -> str:
    return f"M{x - 4:g},{y - 4:g}l8,8m0,-8l-8,8"


SHAPES: dict[str, Callable[[float, float], str]] = {
    "ours": _circle, "published": _square, "other": _triangle, "outlier": _triangle,
    "rank": lambda x, y: f"M{x},{y}h0", "lost": _cross,
}  # fmt: skip
"""By the class of a series."""


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most about `MOST_POINTS` of a series, the least and largest of each stretch among them."""
    if len(points) <= MOST_POINTS:
        return points
    stretch = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values from low to high, at most so many."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= rough * 0.999)
    return [n * step for n in range(math.ceil(low / step - 1e-9), int(high / step + 1e-9) + 1)]


def written(values: Sequence[float]) -> list[tuple[float, str]]:
    """Ticks with as many decimals as tell them apart."""
    gaps = [b - a for a, b in pairwise(values) if b > a]
    gap = min(gaps, default=abs(values[0]) or 1.0)
    decimals = next((d for d in range(6) if math.isclose(round(gap, d), gap, rel_tol=1e-6)), 6)
    return [(value, f"{value:,.{decimals}f}") for value in values]


def frame(
    title: str, description: str, xs: Sequence[float], ys: Sequence[float], *,
    unit: str, across: str, labels: Iterable[str],
    x_ticks: list[tuple[float, str]] | None = None, log: bool = False, watermark: str = "",
) -> Chart:  # fmt: skip
    """An empty chart that holds these values, with a margin above and below, and with room for
    labels on the right. Ticks across are whole numbers, but for `x_ticks`."""
    margin = 0.12 * (max(ys) - min(ys)) or 1.0
    low, high = max(0.0, min(ys) - margin), max(ys) + margin
    right = WIDTH - 10 - CHARACTER * max(map(len, [across, *labels]))
    x = Scale(low=min(xs), high=max(xs), start=LEFT + 6, end=right, log=log)
    y = Scale(low=low, high=high, start=HEIGHT - BOTTOM, end=TOP)
    return Chart(
        title=title, description=description, x=x, y=y, unit=unit, across=across,
        watermark=watermark,
        x_ticks=x_ticks or written([v for v in ticks(x.low, x.high) if v == int(v)] or [x.low]),
        y_ticks=written(ticks(low, high, 4)),
    )  # fmt: skip
