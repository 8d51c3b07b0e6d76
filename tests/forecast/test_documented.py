"""Claims of documents about forecasts, against the tables that `plan --all` and
`benchmarks/forecast.py` wrote. Those about programs that others timed are in `test_interval.py`."""

import csv
import statistics

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


def test_the_document_has_every_published_figure(monkeypatch):
    """`python benchmarks/forecast.py` writes its tables, from the table of all plans."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import forecast

    forecasts = forecast.in_table()
    with (ROOT / "configs" / "published.csv").open() as file:
        assert len(forecasts) == len([*csv.DictReader(file)])
    assert None not in forecasts.values()
    text = (ROOT / "docs" / "forecast.md").read_text()
    assert "\n".join(forecast.tables(forecasts)) in text


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
