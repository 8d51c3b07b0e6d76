"""The picture at the top of README, docs/gpus.svg: the same model on several GPUs, by the table of
all plans and the published figures. `tables.py` draws it."""

from jaxbench.pages.charts import Scale
from jaxbench.recipe import listing
from jaxbench.recipe.names import precision_name

MODEL, TITLE, GPUS, SHOWN = "llama31_8b_", "Llama 3.1 8B", 8, 60_000
PRECISIONS = ("bf16", "fp8", "mxfp8", "nvfp4")
WIDTH, LEFT, RIGHT, TOP, LINE, BAR = 720, 118, 620, 62, 30, 20

STYLE = """<style>text{fill:#16191f}.faint{fill:#59616e}.paper{fill:#fff}.grid{stroke:#dfe2e7}
.bar{fill:#1a5fb4}.mark{fill:#16191f;stroke:#fff}.interval{stroke:#e0a458;stroke-width:2;fill:none}
@media (prefers-color-scheme: dark){text{fill:#e8eaee}.faint{fill:#a3abb8}.paper{fill:#14171c}
.grid{stroke:#333943}.bar{fill:#3f7fd1}.mark{fill:#fff;stroke:#14171c}}</style>"""


def rows() -> list[listing.Row]:
    """The rows of the model for this number of GPUs, the slowest GPU first."""
    found = [r for r in listing.rows() if r.recipe.startswith(MODEL) and r.gpus == GPUS]
    return sorted(found, key=lambda r: (PRECISIONS.index(precision(r)), r.forecast))


def precision(row: listing.Row) -> str:
    """The precision in the name of a row's recipe."""
    return row.recipe.removeprefix(MODEL)


def picture() -> str:
    """An SVG with a bar for each row, its 90 % interval, and a mark at the published figure."""
    every = rows()
    reference = next(r.forecast for r in every if precision(r) == "fp8")
    scale = Scale(low=0, high=SHOWN, start=LEFT, end=RIGHT)
    end = TOP + LINE * len(every)
    description = "; ".join(
        f"{r.gpu.name} {precision_name(precision(r))} {r.forecast:,.0f}"
        + (f", published {r.published.rate:,.0f}" if r.ratio else "")
        for r in every
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {end + 30}" role="img" '
            'aria-labelledby="t d" font-family="system-ui, sans-serif" font-size="13">',
            f'<title id="t">{TITLE} on {GPUS} GPUs: tokens per second per GPU</title>',
            f'<desc id="d">Forecasts: {description}.</desc>',
            STYLE,
            f'<rect class="paper" width="{WIDTH}" height="{end + 30}"/>',
            f'<text x="10" y="22" font-size="16" font-weight="600">{TITLE} on {GPUS} GPUs: '
            "tokens per second per GPU</text>",
            '<text class="faint" x="10" y="44">bar: forecast with its 90 % interval; black mark: '
            "published, another program; ×: relative to H100 in FP8</text>",
            *(
                f'<path class="grid" d="M{scale.at(v)},{TOP - 6}V{end}"/><text class="faint" '
                f'x="{scale.at(v)}" y="{end + 18}" text-anchor="middle">{v // 1000}k</text>'
                for v in range(0, SHOWN + 1, 10_000)
            ),
            *(line(r, TOP + LINE * n, scale, reference) for n, r in enumerate(every)),
            "</svg>\n",
        ]
    )


def line(row: listing.Row, y: float, scale: Scale, reference: float) -> str:
    """The bar of a row with what is written next to it."""
    right, middle = scale.at(row.forecast), y + BAR / 2
    ends = [scale.at(row.forecast * row.step_s / step_s) for step_s in row.interval[::-1]]
    at = scale.at(row.published.rate) if row.ratio else None
    return "".join(
        [
            f'<text x="{LEFT - 8}" y="{middle + 5}" text-anchor="end"><tspan font-weight="600">'
            f"{row.gpu.name}</tspan> {precision_name(precision(row))}</text>",
            f'<rect class="bar" x="{LEFT}" y="{y}" width="{right - LEFT:.1f}" height="{BAR}"/>',
            f'<path class="interval" d="M{ends[0]},{middle}H{ends[1]}'
            + "".join(f"M{x},{middle - 4}v8" for x in ends)
            + '"/>',
            f'<rect class="mark" x="{at - 2:.1f}" y="{y - 3}" width="4" height="{BAR + 6}"/>'
            if at
            else "",
            f'<text x="{max(right, ends[1]) + 8:.1f}" y="{middle + 5}"><tspan font-weight="600">'
            f'{round(row.forecast, -2):,.0f}</tspan> <tspan class="faint">'
            f"{row.forecast / reference:.1f} ×</tspan></text>",
        ]
    )
