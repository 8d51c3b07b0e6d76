"""benchmarks/like_for_like.py, without MaxText."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return importlib.import_module("like_for_like")


def test_a_summary_has_the_median_the_ninth_of_ten_and_the_worst(script):
    errors = [-0.1, 0.02, -0.03, 0.01, 0.0, 0.04, 0.05, 0.06, -0.07, 0.08, -0.2]
    assert script.summary(errors) == (
        "11 rows: median +1.0 %, nine of ten within 10.0 %, worst -20.0 %."
    )
