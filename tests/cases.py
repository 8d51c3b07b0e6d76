"""Parameter matrices, of which a few cases run in every test run."""

import pytest


def tiered(quick, cases, slow=()):
    """`cases` as parameters: those in `quick` always run, those in `slow` with `--slow`, and the
    others, further ones of the same kinds, with `--all`."""
    cases = list(cases)
    assert {*quick, *slow} <= set(cases)
    marks = dict.fromkeys(quick, ()) | dict.fromkeys(slow, pytest.mark.slow)
    return [pytest.param(case, marks=marks.get(case, pytest.mark.nightly)) for case in cases]
