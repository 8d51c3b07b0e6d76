"""Telemetry of made GPUs: the summary, and the power of a run."""

import pytest

from jaxbench.cluster.nvml import Gpu, Sample
from jaxbench.cluster.telemetry import Sampler
from jaxbench.run import sampling


class MadeGpu(Gpu):
    """A GPU that tells what a list says."""

    sm_max_mhz = 1980

    def __init__(self, index, samples):
        self.index, self.samples = index, iter(samples)

    def sample(self):
        return next(self.samples)


def sampled(index, *samples):
    """The summary of a GPU of these samples."""
    sampler = Sampler([MadeGpu(index, samples)])
    for _ in samples:
        sampler.take()
    sampler._stop.set()  # the thread takes no sample of its own
    with sampler:
        pass
    (summary,) = sampler.summaries
    return summary


def test_a_summary_is_of_samples_under_load():
    idle = Sample(210, 70, 40, 1, 3, 2, 0)
    slow = Sample(1400, 700, 71, 4 | 32, 100, 3, 1)
    fast = Sample(1600, 600, 69, 0, 98, 5, 1)
    assert sampled(3, idle, slow, fast, fast) == {
        "gpu": 3, "sm_mhz": pytest.approx(4600 / 3), "sm_max_mhz": 1980,
        "clock_ratio": pytest.approx(4600 / 3 / 1980),
        "power_w": pytest.approx(1900 / 3), "max_temperature_c": 71,
        "throttled_s": {"power cap": 1.0, "software thermal slowdown": 1.0},
        "ecc_corrected": 3, "ecc_uncorrected": 1,
    }  # fmt: skip


def test_a_counter_that_began_again_is_left_out():
    summary = sampled(
        0, Sample(ecc_corrected=9, ecc_uncorrected=1), Sample(ecc_corrected=1, ecc_uncorrected=1)
    )
    assert "ecc_corrected" not in summary
    assert summary["ecc_uncorrected"] == 0


def test_what_the_driver_does_not_tell_is_left_out():
    assert sampled(0, Sample(), Sample()) == {"gpu": 0, "sm_max_mhz": 1980, "throttled_s": {}}


def test_the_power_of_a_run_is_that_of_all_its_gpus():
    ranks = [{"rank": r, "host": "n0", "gpus": [{"gpu": r, "power_w": 600.0}]} for r in range(2)]
    assert sampling.watts(ranks, 2) == 1200.0
    assert sampling.watts([*ranks, {"rank": 2, "host": "n0"}], 3) is None
