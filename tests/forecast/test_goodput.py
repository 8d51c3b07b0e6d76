"""Goodput against a simulation, its limits, and the figures that were published."""

import math
import random
from statistics import mean, stdev

import pytest

from jaxbench.forecast.goodput import OBSERVED, Assumed, daly, goodput, job_goodput

HOUR = 3600.0


def simulated(interval_s, written_s, restart_s, mtbf_s, segments, draws):
    """The seconds that each segment of a job takes until its checkpoint is written. Failures arrive
    on the clock, without regard to what the job does at that time."""
    now, failure = 0.0, draws.expovariate(1 / mtbf_s)
    spent = []
    for _ in range(segments):
        began, left, restarting = now, interval_s + written_s, False
        while left > 0:
            if now + left <= failure:
                now += left
                left = interval_s + written_s if restarting else 0.0
                restarting = False
            else:
                now, left, restarting = failure, restart_s, True
                failure = now + draws.expovariate(1 / mtbf_s)
        spent.append(now - began)
    return spent


@pytest.mark.parametrize(
    ("interval_s", "written_s", "restart_s", "mtbf_s"),
    [
        (daly(300, 24 * HOUR), 300, 600, 24 * HOUR),
        (daly(300, 6 * HOUR), 300, 600, 6 * HOUR),
        (daly(300, 900), 300, 600, 900),  # the job fails while it restarts, too
        (2 * HOUR, 300, 600, 2 * HOUR),
    ],
)
def test_the_formula_is_what_a_simulation_finds(interval_s, written_s, restart_s, mtbf_s):
    segments = 20_000
    draws = random.Random(1)
    spent = simulated(interval_s, written_s, restart_s, mtbf_s, segments, draws)
    error = stdev(spent) / math.sqrt(segments) / mean(spent)
    share = goodput(interval_s, written_s, restart_s, mtbf_s)
    assert error < 0.02
    assert interval_s / mean(spent) == pytest.approx(share, rel=3 * error)
    # The sampling error is small enough to notice a checkpoint that takes twice as long.
    assert interval_s / mean(spent) != pytest.approx(
        goodput(interval_s, 2 * written_s, restart_s, mtbf_s), rel=3 * error
    )


@pytest.mark.parametrize(("mtbf_h", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_the_interval_is_the_one_in_dalys_figures(mtbf_h, minutes):
    """Daly 2006, figures 3 to 5: a checkpoint takes 5 minutes."""
    assert daly(300, mtbf_h * HOUR) / 60 == pytest.approx(minutes, rel=0.01)


@pytest.mark.parametrize("mtbf_s", [900.0, 6 * HOUR, 24 * HOUR])
def test_no_other_interval_is_better(mtbf_s):
    best = goodput(daly(300, mtbf_s), 300, 600, mtbf_s)
    others = (goodput(daly(300, mtbf_s) * k / 100, 300, 600, mtbf_s) for k in range(20, 500))
    assert max(others) < best * 1.001


def test_limits():
    # With hardly any failures only the checkpoints cost time.
    assert goodput(900, 100, 600, 1e12) == pytest.approx(0.9)
    # With rare failures, the loss is that of Young: half for checkpoints, half for lost work.
    assert 1 - goodput(math.sqrt(2 * 1e8), 1, 0, 1e8) == pytest.approx(math.sqrt(2 / 1e8), rel=0.01)
    # Free checkpoints leave only the restarts, and too many failures leave nothing.
    assert goodput(1e-6, 0, 600, HOUR) == pytest.approx(math.exp(-600 / HOUR))
    assert goodput(HOUR, 100, 600, 1.0) == 0.0
    # A checkpoint of more than twice the time between failures: Daly's other case.
    assert daly(300, 100) == 100
    shares = [job_goodput(2**n, 1e12, Assumed(storage_gb_s=100)).share for n in range(3, 18)]
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] < shares[0] < 1


def test_what_was_published():
    """Llama 3: an interruption every three hours, and more than 90 % effective training time."""
    llama3 = job_goodput(16384, 405e9 * 14, Assumed())
    assert llama3.mtbf_s / HOUR == pytest.approx(54 * 24 / 419)
    assert llama3.checkpoint_s == pytest.approx(2.835)
    assert 0.90 < llama3.share < 0.95
    # 1.8 hours are projected for 16,384 GPUs from the rate of RSC-1 (arXiv 2410.21680).
    (rsc1,) = (o for o in OBSERVED if o.failures == 6.5)
    job = job_goodput(16384, 405e9 * 14, Assumed(mtbf_gpu_hours=rsc1.mtbf_gpu_hours))
    assert job.mtbf_s / HOUR == pytest.approx(1.8, abs=0.05)
