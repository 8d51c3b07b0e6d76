"""`jaxbench report --history` of thousands of runs."""

from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
from made_runs import day, times, write_record

from jaxbench.report import command, history, page


def test_the_limit_of_a_history_comes_from_the_runs_own_spread():
    """2,000 healthy runs have no change at any noise; a change below the noise of one run shows in
    several."""
    random = np.random.default_rng(1)
    for noise in (0.002, 0.01, 0.03):
        assert history.find_changes([*(7 * random.lognormal(0, noise, 2000))], 0.02) == {}
    level = np.where(np.arange(200) < 100, 7.0, 7.0 * 1.03)
    times = [*(level * random.lognormal(0, 0.01, 200))]
    ((number, change),) = history.find_changes(times, 0.02).items()
    assert abs(number - 100) <= 4
    assert change == pytest.approx(0.03, abs=0.015)
    level = np.where(np.arange(40) == 20, 7.7, 7.0)
    assert [*history.find_changes([*level], 0.02)] == [20, 21]
    assert [*history.find_changes([7.0, 7.0, 7.3], 0.02)] == [2]


@pytest.mark.nightly
def test_pages_of_many_runs_stay_small(tmp_path):
    """And have the last runs first."""
    write_record(tmp_path, "first", times(7.0), started=day(0), note="x" * 10_000)
    (run,) = command.report([tmp_path], None)
    results = [
        replace(
            run, run=replace(run.run, started=day(0) + timedelta(hours=n)), mean_s=float(seconds)
        )
        for n, seconds in enumerate(np.random.default_rng(1).normal(7.0, 0.07, 2000))
    ]
    text = page.history_page(history.history(results, 0.02), 0.02)
    assert len(text) < 100_000
    assert "No change above" in text
    assert "and 1900 earlier runs" in text
    assert text.index(f"{results[-1].run.started:%Y-%m-%d %H:%M}") < text.index(
        f"{results[-2].run.started:%Y-%m-%d %H:%M}"
    )
    text = page.page(results, "published")
    assert len(text) < 4_000_000
    assert "the last 100 of 2000 runs" in text
