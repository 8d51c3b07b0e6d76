"""benchmarks/anchors.csv: every figure has a row of ours that does its work."""

import csv

import pytest
from commands import ROOT


@pytest.fixture
def script(benchmark_script):
    return benchmark_script("forecast")


@pytest.mark.slow
def test_rows_have_the_batch_of_their_figure(script):
    figures = script.later_figures()
    assert len(figures) >= 47
    for figure in figures:
        run = figure.run()
        assert run.gpus == figure.gpus
        assert figure.batch in (None, run.batch.global_batch), figure


def test_rates_follow_from_the_step_times():
    with (ROOT / "benchmarks" / "anchors.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["step_time_s"]]
    for line in lines:
        tokens = int(line["global_batch"]) * int(line["sequence"]) / int(line["gpus"])
        rate = float(line["tokens_per_s_per_gpu"])
        # Some sources print the rate with fewer digits than the step time.
        assert tokens / float(line["step_time_s"]) == pytest.approx(rate, rel=2e-3), line
