"""The robust outlier test."""

import random

import pytest

from jaxbench.base.outliers import GPU_SPREAD, outliers, repeated_spread


def test_what_is_slow_is_an_outlier_whatever_the_others():
    noise = random.Random(0)
    for count in (8, 64, 512):
        values = {n: noise.gauss(1.0, GPU_SPREAD) for n in range(count)}
        assert outliers(values, GPU_SPREAD) == outliers(values, GPU_SPREAD, low=True) == {}
        few = range(count // 4)
        assert [*outliers(values | dict.fromkeys(few, 1.15), GPU_SPREAD)] == [*few]
        assert [*outliers(values | dict.fromkeys(few, 0.85), GPU_SPREAD, low=True)] == [*few]


def test_values_that_vary_more_have_fewer_outliers():
    assert outliers({n: 1 + n % 5 / 20 for n in range(40)} | {40: 1.3}, GPU_SPREAD) == {}


@pytest.mark.parametrize("low", [False, True])
def test_few_are_compared_with_the_best(low):
    """The slow one of two or three is one by twice the distance; the factor is over the median."""
    factor = 0.8 if low else 1.2
    (value,) = outliers({"a": 1.0, "b": factor}, GPU_SPREAD, low=low).items()
    assert value == ("b", pytest.approx(factor / (1 + factor) * 2))
    assert outliers({"a": 1.0, "b": 1.0, "c": factor}, GPU_SPREAD, low=low) == {"c": factor}
    assert outliers({"a": 1.0, "b": (factor + 1) / 2}, GPU_SPREAD, low=low) == {}
    assert outliers({"a": 1.0}, GPU_SPREAD, low=low) == outliers({}, GPU_SPREAD, low=low) == {}


def test_zeros_have_none():
    assert outliers({"a": 0.0, "b": 0.0, "c": 1.0}, GPU_SPREAD, low=True) == {}


def test_alike_gpus_have_a_closer_limit_if_there_are_many():
    noise = random.Random(0)
    for count in (8, 16, 64, 1024):
        for _ in range(20):
            values = {n: noise.gauss(1.0, 0.003) for n in range(count)}
            spread = repeated_spread([*values.values()], [0.001])
            assert outliers(values, spread, low=True) == {}
        some = outliers(values | {3: 0.965}, spread, low=True)
        assert [*some] == ([3] if count >= 64 else [])
    assert repeated_spread([1.0] * 8, [0.001]) == GPU_SPREAD  # too few
    assert repeated_spread([1.0] * 64, [0.005]) == 0.005  # samples that say no more
    assert repeated_spread([1 + n % 5 / 20 for n in range(64)], [0.001]) == GPU_SPREAD
