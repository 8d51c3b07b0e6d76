"""Claims of documents about forecasts, against the tables that `plan --all` and
`benchmarks/forecast.py` wrote. Those about programs that others timed are in `test_interval.py`."""

import csv

from commands import ROOT


def test_the_document_has_every_published_figure(benchmark_script):
    """`python benchmarks/forecast.py` writes its tables, from the table of all plans."""
    forecast = benchmark_script("forecast")
    forecasts = forecast.in_table()
    with (ROOT / "configs" / "published.csv").open() as file:
        assert len(forecasts) == len([*csv.DictReader(file)])
    assert None not in forecasts.values()
    text = (ROOT / "docs" / "forecast.md").read_text()
    assert "\n".join(forecast.tables(forecasts)) in text


def test_the_picture_is_of_the_tables(benchmark_script):
    """`python benchmarks/forecast.py` draws them."""
    picture = benchmark_script("forecast_picture").picture
    drawn, table = (ROOT / "docs" / f"forecast.{end}" for end in ("svg", "md"))
    assert drawn.read_text() == picture(table.read_text().splitlines())


def test_documents_have_the_table_of_all_plans(benchmark_script):
    """`python benchmarks/tables.py` writes docs/plan.md and README's picture."""
    assert benchmark_script("tables").plans() in (ROOT / "docs/plan.md").read_text()
    assert (ROOT / "docs/gpus.svg").read_text() == benchmark_script("gpus_picture").picture()
