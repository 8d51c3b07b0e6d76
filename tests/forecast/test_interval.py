"""The interval of a forecast, and the errors that it rests on."""

import random
import re
import statistics
from math import exp, log, sqrt

import pytest
from commands import ROOT

from jaxbench.base.hardware import PLANNED, placed
from jaxbench.base.student import student
from jaxbench.forecast import tables
from jaxbench.forecast.costs import Measured
from jaxbench.forecast.interval import (
    ASSUMED,
    ERRORS,
    Timed,
    accuracy,
    every_program,
    interval,
    timed_programs,
)
from jaxbench.xla.hlo import Work


def timed(family: str, ratio: float, **more: object) -> Timed:
    """A program whose published step is so many times the forecast."""
    known = {"gpus": 8, "gpu": "h100", "dtype": "bf16", "experts": False, "weak": False}
    values = known | {"assumed": 0.0} | more
    return Timed(family=family, published_s=2 * ratio, forecast_s=2.0, **values)


def test_quantiles_of_students_distribution():
    """Of a printed table."""
    for freedom, t in ((1, 6.314), (5, 2.015), (7, 1.895), (10, 1.812), (30, 1.697)):
        assert student(0.95, freedom) == pytest.approx(t, abs=5e-4)


def test_an_interval_by_hand():
    """Two families, logarithms 0.1 and 0.3: the mean is 0.2, the standard deviation 0.1 x 2**0.5,
    and that of a further one 1.5**0.5 times as much."""
    found = interval(10.0, 0.5, ["matmuls"], [timed("a", exp(0.1)), timed("b", exp(0.3))])
    width = student(0.95, 1) * sqrt(2 * 0.1**2 * 1.5 + (0.5 * ASSUMED) ** 2)
    assert found.calibrated_s == pytest.approx(10 * exp(0.2))
    assert (found.low_s, found.high_s) == pytest.approx(
        (10 * exp(0.2 - width), 10 * exp(0.2 + width))
    )
    assert (found.programs, found.families, found.assumed_rates) == (2, 2, ["matmuls"])


def test_a_family_of_many_sizes_counts_once():
    few = [timed("a", 1.1), timed("b", 0.9), timed("c", 1.0)]
    many = [*few, *[timed("a", 1.1)] * 9]
    one, other = (interval(1.0, 0.0, [], programs) for programs in (few, many))
    assert (one.low_s, one.high_s) == pytest.approx((other.low_s, other.high_s))
    assert (one.programs, other.programs) == (3, 12)
    scattered = interval(1.0, 0.0, [], [*few, timed("a", 1.3), timed("a", 0.93)])
    assert scattered.high_s - scattered.low_s > one.high_s - one.low_s


def test_what_is_assumed_widens_an_interval():
    widths = [
        log(found.high_s / found.low_s)
        for share in (0.0, 0.1, 0.5, 1.0)
        for found in [interval(3.0, share, [], timed_programs())]
    ]
    assert widths == sorted(set(widths))


def test_nine_of_ten_draws_lie_in_an_interval():
    """Of families whose logarithms are normal, each with another number of programs."""
    draw, held, trials = random.Random(47), 0, 2000
    for _ in range(trials):
        families = {name: draw.gauss(0.08, 0.07) for name in "abcdefgh"}
        programs = [
            timed(name, exp(draw.gauss(error, 0.01)))
            for name, error in families.items()
            for _ in range(1 + ord(name) % 3)
        ]
        found = interval(1.0, 0.0, [], programs)
        held += found.low_s <= exp(draw.gauss(0.08, 0.07)) <= found.high_s
    assert held / trials == pytest.approx(0.9, abs=0.03)


def by_others(timed):
    """The interval of a program's forecast, by the errors on the programs of other families."""
    others = [other for other in timed_programs() if other.family != timed.family]
    return interval(timed.forecast_s, timed.assumed, [], others)


def test_most_published_steps_lie_in_the_interval_of_the_other_families():
    """Eight of ten or more; Mixtral, the only program with experts, does not."""
    held = {
        t: found.low_s <= t.published_s <= found.high_s
        for t in timed_programs()
        for found in [by_others(t)]
    }
    assert sum(held.values()) >= 0.8 * len(held)
    assert {t.experts for t, inside in held.items() if not inside} <= {True}


def test_errors_are_said_by_precision():
    programs = [timed("a", 1.25), timed("b", 0.8), timed("c", 1.0), timed("d", 2.0, dtype="fp8")]
    assert accuracy(programs) == (
        "20.0 % at the median and 25.0 % at worst in bf16 (3 programs), "
        "50.0 % at the median and 50.0 % at worst in FP8 (1 program)"
    )


def test_weak_programs_do_not_count():
    every = every_program()
    assert {t.family for t in every if t.weak} == {
        "llama31_70b_bf16_h200_first", "llama31_405b_fp8_h200", "llama2_7b_bf16_a3mega",
    }  # fmt: skip
    assert timed_programs() == [t for t in every if not t.weak]
    assert not [t for t in every if t.family.startswith("llama3_70b_bf16")]  # kept for a test


def lines() -> list[dict[str, str]]:
    """The package's errors as written."""
    heading, *values = ERRORS.read_text().splitlines()
    return [dict(zip(heading.split(","), v.split(","), strict=True)) for v in values]


def test_errors_are_of_the_tables_of_today():
    """The matmul and the attention that take longest in each program take as long now as when it
    was forecast. If not, `benchmarks/like_for_like.py --output docs/like_for_like.md` forecasts all
    programs again."""
    for line in lines():
        gpu = placed(PLANNED[line["GPU"]], int(line["GPUs"]))
        costs = Measured(gpu, tables.load(line["GPU"]))
        for kind in ("matmul", "attention"):
            first, _, text = line[kind].partition(" ")
            sizes = tuple(map(int, text.split("x")))
            work = (
                Work("attention", "bf16", 0, sizes, backward=first == "backward")
                if kind == "attention"
                else Work("product", first, 2 * sizes[0] * sizes[1] * sizes[2] * sizes[3], sizes)
            )
            seconds = 1e-3 * float(line[f"{kind} ms"])
            assert costs.work(work) == pytest.approx(seconds, rel=0.01), line[kind]


def test_the_document_and_the_errors_are_of_one_run():
    """One command writes both: every program with its steps and the interval by other families."""
    text = (ROOT / "docs" / "like_for_like.md").read_text()
    shown = re.findall(
        r"^\| (\w+)(?: \(weak\))? \| (\d+) (\w+) \| [^|]+ \| ([\d.]+) \| ([\d.]+) \| [-+][\d.]+ "
        r"\| ([\d.]+) to ([\d.]+) \| (yes|no) \|",
        text,
        re.MULTILINE,
    )
    written = every_program()
    assert len(shown) == len(written)
    for (family, gpus, gpu, published, step, low, high, inside), t in zip(
        shown, written, strict=True
    ):
        assert (family, int(gpus), gpu.lower()) == (t.family, t.gpus, t.gpu)
        assert float(published) == t.published_s
        assert float(step) == pytest.approx(t.forecast_s, abs=6e-4)
        found = by_others(t)
        assert (float(low), float(high)) == pytest.approx((found.low_s, found.high_s), rel=2e-3)
        assert (inside == "yes") == (found.low_s <= t.published_s <= found.high_s)


@pytest.mark.parametrize("name", ["README.md", "docs/forecast.md", "docs/like_for_like.md"])
def test_documents_state_the_errors_of_today(name):
    text = " ".join((ROOT / name).read_text().split())
    assert accuracy(timed_programs()) in text


def test_a_guide_has_the_errors_in_round_figures():
    text = (ROOT / "docs/guide/how_long.md").read_text()
    median, worst = re.search(r"about (\d+) % at the median and (\d+) % at worst", text).groups()
    sizes = [100 * abs(timed.error) for timed in timed_programs()]
    assert (int(median), int(worst)) == (round(statistics.median(sizes)), round(max(sizes)))
