"""The picture of docs/forecast.md: published over forecast rates, from the lines of its table.
`forecast.py` draws it."""

import re
from collections import defaultdict
from collections.abc import Iterable

from jaxbench.pages.charts import Scale

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 560, 72, 560, 24, 500
LOW, HIGH = 180, 50_000
TICKS = (200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
NEAR = 0.1
"""Half the width of the band, as a share of the forecast."""

FAMILIES = {
    "llama": ("Llama", "#1a5fb4", "#78aef5", "m-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0"),
    "nemotron": ("Nemotron", "#1b6e3c", "#6fcf97", "m-3.5,-3.5h7v7h-7z"),
    "grok": ("Grok-1", "#b3261e", "#ff8a80", "m0,-5l5,8.5h-10z"),
    "qwen": ("Qwen3", "#8a4b08", "#e0a458", "m0,5l5,-8.5h-10z"),
    "deepseek": ("DeepSeek-V3", "#6d3fb5", "#b79cf0", "m0,-5.5l5,5.5l-5,5.5l-5,-5.5z"),
    "kimi": ("Kimi K2", "#0b7285", "#66d9e8", "m-4,-2.5h8v5h-8z"),
    "gpt3": ("GPT-3", "#a61e4d", "#faa2c1", "m-2.5,-4h5v8h-5z"),
    "gpt_oss": (
        "GPT-OSS",
        "#16191f",
        "#e8eaee",
        "m-5,-1h4v-4h2v4h4v2h-4v4h-2v-4h-4z",
    ),
}
"""Name, colours on light and dark paper, and marker by the beginning of a recipe's name."""

LINE = re.compile(r"^\| (\w+) \| \w+ \| \d+ \| [^|]+ \| (\d+) \| (\d+) \|", re.MULTILINE)


def picture(lines: Iterable[str]) -> str:
    """An SVG of the figures in a table's lines: published tokens/s per GPU over those of the
    forecast, with the diagonal and its band."""
    x = Scale(low=LOW, high=HIGH, start=LEFT, end=RIGHT, log=True)
    y = Scale(low=LOW, high=HIGH, start=BOTTOM, end=TOP, log=True)
    points: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for recipe, published, forecast in LINE.findall("\n".join(lines)):
        family = next(name for name in FAMILIES if recipe.startswith(name))
        points[family].append((int(forecast), int(published)))
    every = [point for group in points.values() for point in group]
    near = sum(abs(p / f - 1) <= NEAR for f, p in every)
    ends = (LOW, HIGH)
    less, more = 1 - NEAR, 1 + NEAR
    band = [(LOW, LOW), (LOW / less, LOW), (HIGH, HIGH * less), (HIGH, HIGH), (HIGH / more, HIGH),
            (LOW, LOW * more)]  # fmt: skip
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'aria-labelledby="t d" font-family="system-ui, sans-serif" font-size="13">',
            f'<title id="t">Published over forecast rates of {len(every)} figures</title>',
            f'<desc id="d">Tokens per second and GPU. {near} are within 10 % of the diagonal; '
            "those above it are faster than the forecast.</desc>",
            *_style(points),
            f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
            f'<path class="band" d="{_path(x, y, band)}z"/>',
            *(f'<path class="grid" d="M{LEFT},{y.at(v)}H{RIGHT}M{x.at(v)},{TOP}V{BOTTOM}"/>'
              f'<text x="{LEFT - 8}" y="{y.at(v) + 4}" text-anchor="end">{v:,}</text>'
              f'<text x="{x.at(v)}" y="{BOTTOM + 18}" text-anchor="middle">{v:,}</text>'
              for v in TICKS),
            f'<path class="even" d="{_path(x, y, [(v, v) for v in ends])}"/>',
            f'<text x="{LEFT}" y="{TOP - 9}">published, tokens/s/GPU</text>',
            f'<text x="{RIGHT}" y="{BOTTOM + 40}" text-anchor="end">forecast, tokens/s/GPU</text>',
            f'<text x="{RIGHT + 14}" y="{TOP + 12}">shaded: ± 10 %,</text>',
            f'<text x="{RIGHT + 14}" y="{TOP + 30}">{near} of {len(every)} figures</text>',
            *(_series(name, group, x, y, row) for row, (name, group) in enumerate(points.items())),
            "</svg>\n",
        ]
    )  # fmt: skip


def _style(families: Iterable[str]) -> list[str]:
    """Colours on light and dark paper."""
    light = "".join(f".{name}{{fill:{FAMILIES[name][1]}}}" for name in families)
    dark = "".join(f".{name}{{fill:{FAMILIES[name][2]}}}" for name in families)
    return [
        "<style>text{fill:#59616e}.paper{fill:#fff}.grid{stroke:#dfe2e7}.band{fill:#cfe0f7}"
        f".even{{stroke:#59616e}}{light}.mark{{stroke:#fff;stroke-width:.75;fill-opacity:.85}}",
        "@media (prefers-color-scheme: dark){text{fill:#a3abb8}.paper{fill:#14171c}"
        f".grid{{stroke:#333943}}.band{{fill:#2a476b}}.even{{stroke:#a3abb8}}{dark}"
        ".mark{stroke:#14171c}}</style>",
    ]


def _path(x: Scale, y: Scale, points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x.at(a):g},{y.at(b):g}" for a, b in points)


def _series(name: str, group: list[tuple[int, int]], x: Scale, y: Scale, row: int) -> str:
    """The markers of a family, and its line in the legend."""
    title, _, _, marker = FAMILIES[name]
    places = [(x.at(f), y.at(p)) for f, p in group] + [(RIGHT + 22, TOP + 64 + 24 * row)]
    marks = "".join(f"M{px:g},{py:g}{marker}" for px, py in places)
    text = f'<text x="{RIGHT + 36}" y="{TOP + 68 + 24 * row}">{title}, {len(group)}</text>'
    return f'<path class="mark {name}" d="{marks}"/>{text}'
