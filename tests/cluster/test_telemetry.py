"""Telemetry of made GPUs: the file's size and content, the summary, and what is named."""

import csv
import gzip
import random

import pytest

from jaxbench.cluster.nvml import Gpu, Sample
from jaxbench.cluster.telemetry import Sampler
from jaxbench.run import ranks as processes
from jaxbench.run import sampling


class MadeGpu(Gpu):
    """A GPU that tells what a list says, or values that change as much as they can."""

    sm_max_mhz = 1980

    def __init__(self, index, samples=None):
        self.index, self.samples = index, samples and iter(samples)
        self.draw, self.counted = random.Random(index).randrange, [0] * 4

    def sample(self):
        if self.samples:
            return next(self.samples)
        self.counted = [n + self.draw(200_000) for n in self.counted]
        states = (
            self.draw(1200, 1980), self.draw(300, 700), self.draw(55, 75), self.draw(2) * 4,
            self.draw(70_000, 70_100), self.draw(60, 101),
        )  # fmt: skip
        return Sample._make((*states, *self.counted, 0, 0))


def sampled(gpus, seconds, path, said=None):
    """The summaries of GPUs that were sampled so often."""
    sampler = Sampler(gpus, path, (said if said is not None else []).append)
    for second in range(seconds):
        sampler.take(1.8e9 + second)
    sampler._stop.set()  # the thread takes no sample of its own
    with sampler:
        pass
    return sampler.summaries


def lines(path):
    with gzip.open(path, "rt") as file:
        return [*csv.DictReader(file)]


def test_an_hour_of_eight_gpus_is_less_than_a_megabyte(tmp_path):
    """A twelfth of it."""
    path = tmp_path / "node.csv.gz"
    sampled([MadeGpu(n) for n in range(8)], 300, path)
    assert 12 * path.stat().st_size < 1_000_000
    found = lines(path)
    assert [(line["time"], line["gpu"]) for line in found[-8:]] == [
        ("1800000299", str(n)) for n in range(8)
    ]
    assert len(found) == 8 * 300


def test_a_summary_is_of_samples_under_load(tmp_path):
    idle = Sample(210, 70, 40, 1, 0, 3, 0, 0, 0, 0, 2, 0)
    slow = Sample(1400, 700, 71, 4 | 32, 0, 100, 500, 0, 0, 0, 3, 1)
    fast = Sample(1600, 600, 69, 0, 0, 98, 700, 0, 0, 0, 5, 1)
    again = fast._replace(nvlink_sent_mib=9)  # its counter began again
    (summary,) = sampled([MadeGpu(3, [idle, slow, fast, again])], 4, path := tmp_path / "x")
    assert summary == {
        "gpu": 3, "sm_mhz": pytest.approx(4600 / 3), "sm_max_mhz": 1980,
        "clock_ratio": pytest.approx(4600 / 3 / 1980),
        "power_w": pytest.approx(1900 / 3), "max_temperature_c": 71,
        "throttled_s": {"power cap": 1.0, "software thermal slowdown": 1.0},
        "ecc_corrected": 3, "ecc_uncorrected": 1,
    }  # fmt: skip
    assert [line["nvlink_sent_mib"] for line in lines(path)] == ["0", "500", "200", ""]


def test_what_the_driver_does_not_tell_is_left_out(tmp_path):
    (summary,) = sampled([MadeGpu(0, [Sample(), Sample()])], 2, path := tmp_path / "x")
    assert summary == {"gpu": 0, "sm_max_mhz": 1980, "throttled_s": {}}
    assert lines(path)[1]["power_w"] == ""


def test_a_file_that_cannot_be_written_is_given_up_once(tmp_path):
    said = []
    sampled([MadeGpu(0)], 150, tmp_path / "none" / "x", said)
    assert said == [
        f"telemetry: {tmp_path / 'none' / 'x'} cannot be written: No such file or directory"
    ]


def test_a_slow_clock_and_errors_are_named():
    def gpu(n, mhz):
        return {
            "gpu": n,
            "sm_mhz": mhz,
            "throttled_s": {"power cap": 9.0},
            "ecc_uncorrected": n // 7,
        }

    ranks = [
        {
            "rank": r,
            "host": f"n{r // 8}",
            "gpus": [gpu(r % 8, 1500 + 5 * (r % 3) - 225 * (r == 11))],
        }
        for r in range(16)
    ]
    assert sampling.warnings(ranks) == [
        "ECC: GPU 7 of n0 (rank 7): 1 errors were not corrected",
        "slow clock: GPU 3 of n1 (rank 11): 1285 MHz under load, 15 % below the median of 16 "
        "(power cap 9 s)",
        "ECC: GPU 7 of n1 (rank 15): 1 errors were not corrected",
    ]
    assert sampling.watts(ranks, 16) is None


def test_slow_products_are_named():
    times = [[1.0, 1.01], [0.99, 1.2]]
    ranks = [{"rank": r, "host": f"n{r}", "products_s": times[r]} for r in (0, 1)]
    assert processes.slow_devices(ranks) == [
        "slow GPU: rank 1 on n1, its device 1: 1.19 times the median of 4 GPUs' times for the same "
        "matmuls"
    ]
    assert processes.slow_devices([{"rank": 0, "host": "n0"}]) == []
