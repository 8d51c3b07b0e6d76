"""Parameter matrices, of which a few cases run without `--all`."""

import pytest


def slow_except(quick, cases):
    """`cases` as parameters; all but those in `quick` are slow."""
    cases = list(cases)
    assert set(quick) <= set(cases)
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
