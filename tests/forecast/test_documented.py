"""Claims of documents about forecasts, against the tables that `plan --all` and
`benchmarks/forecast.py` wrote. Those about programs that others timed are in `test_interval.py`."""

import csv
import re
import statistics

import pytest
from commands import ROOT

from jaxbench.recipe import planned

ALIKE = ("llama2_70b", "llama31_8b", "llama31_70b")
"""Models whose published programs shard as ours do, or do nearly the same work per GPU."""


def ratios() -> dict[str, float]:
    """Forecast over published seconds of each published row of H100s that recomputes as the
    published programs do, instead of offloading."""
    rows = [row for row in planned.read()[1] if row["published s"]]
    return {
        f"{row['recipe']}:{row['GPUs']}": float(row["forecast s"]) / float(row["published s"])
        for row in rows
        if row["GPU"] == "h100" and float(row["host GiB"]) == 0
    }


def test_llama_rows_are_within_15_percent():
    """Each of those that shard alike but four, of Llama 2 in FP8, than which the program here has
    become faster; nothing in a forecast is fitted to them. Rows of 70B in bf16 offload."""
    alike = {row: ratio for row, ratio in ratios().items() if row.startswith(ALIKE)}
    assert len(alike) == 34 - 12
    outside = {row: ratio for row, ratio in alike.items() if not 0.85 <= ratio <= 1.15}
    assert outside.keys() == {f"llama2_70b_fp8:{gpus}" for gpus in (256, 512, 1024, 2048)}
    assert min(outside.values()) > 0.78
    assert 0.9 <= statistics.median(alike.values()) <= 1.1


def test_the_document_claims_what_all_published_figures_show():
    """All in bf16 and FP8, those that are far off too: none may be left out of the claim. Those of
    block-scaled formats have a table of their own."""
    text = (ROOT / "docs" / "forecast.md").read_text()
    head, _, tables = text.partition("<!-- table -->")
    figures = re.findall(
        r"^\| \w+ \| \w+ \| \d+ \| [^|]+ \| (\d+) \| (\d+) \| [\d.]+ \|",
        tables.partition("### Published tables in MXFP8 and NVFP4")[0],
        re.MULTILINE,
    )
    with (ROOT / "configs" / "published.csv").open() as file:
        compared = [row for row in csv.DictReader(file) if row["dtype"] in ("bf16", "fp8")]
    assert "Nineteen rows that were added since" in head
    assert len(figures) == len(compared) - 19 == 114
    ratios = [int(published) / int(forecast) for published, forecast in figures]
    near = sum(abs(ratio - 1) <= 0.15 for ratio in ratios)
    summary = re.search(
        r"median of forecast over published is ([\d.]+); (\d+) are within 10 %, (\d+) within 15 %",
        tables,
    )
    median, within_10, within_15 = summary.groups()
    assert float(median) == pytest.approx(statistics.median(ratios), abs=0.006)  # of whole tokens
    head = " ".join(head.split())
    assert int(within_15) == near
    assert f"{near} are within 15 % of the forecast and {within_10} within 10 %" in head
    assert f"the median of forecast over published is {median}" in head
    assert f"extremes are {min(ratios):.2f} and {max(ratios):.2f}" in head
    goal, above = re.search(
        r"(\d+) are at most 0.95, \d+ at most 0.9, (\d+) above 1", tables
    ).groups()
    assert f"{goal} are at most 0.95, {above} above 1." in head
    # Of whole tokens: a ratio of 1.001 may be 1 here.
    assert abs(sum(ratio > 1 for ratio in ratios) - int(above)) <= 1


@pytest.mark.parametrize(
    ("title", "goal"),
    [("tables", 0.95), ("tables in MXFP8 and NVFP4", 0.9), ("since", 0.95)],
)
def test_every_figure_above_its_goal_is_listed_by_part(title, goal):
    """Parts are shares of the published step, which add up to the ratio."""
    text = (ROOT / "docs" / "forecast.md").read_text()
    section = text.partition(f"### Published {title}\n")[2].partition("\n### ")[0]
    figures = re.findall(
        r"^\| (\w+) \| (\w+) \| (\d+) \|[^|]*\| (\d+) \| (\d+) \|", section, re.MULTILINE
    )
    by_part = re.findall(r"^\| (\w+:\d+ \w+) \| ([\d. |]+) \|$", section, re.MULTILINE)
    listed = {row: [float(cell) for cell in cells.split(" | ")] for row, cells in by_part}
    above = {
        f"{recipe}:{gpus} {gpu}": int(published) / int(forecast)
        for recipe, gpu, gpus, published, forecast in figures
        if int(published) / int(forecast) > goal
    }
    assert above.keys() == listed.keys()
    for row, (percent, *parts, _) in listed.items():
        assert percent == pytest.approx(100 * above[row], abs=0.4)  # of whole tokens
        assert sum(parts) == pytest.approx(percent, abs=0.6)  # eleven roundings


def test_the_picture_is_of_the_tables(monkeypatch):
    """`python benchmarks/forecast_picture.py` draws those that are there."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from forecast_picture import picture

    drawn, table = (ROOT / "docs" / f"forecast.{end}" for end in ("svg", "md"))
    assert drawn.read_text() == picture(table.read_text().splitlines())


def test_documents_have_the_table_of_all_plans(monkeypatch):
    """`python benchmarks/tables.py` writes docs/plan.md and README's picture."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpus_picture
    import tables

    assert tables.plans() in (ROOT / "docs/plan.md").read_text()
    assert (ROOT / "docs/gpus.svg").read_text() == gpus_picture.picture()
