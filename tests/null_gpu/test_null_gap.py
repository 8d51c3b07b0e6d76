"""Runs on null GPUs that are slow for planted reasons: the report divides the gap into them."""

import json

import null_gpus
import pytest

from jaxbench.base.versions import installed
from jaxbench.report import command
from jaxbench.report.gap import REMAINS, explain

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(null_gpus.missing() is not None, reason=str(null_gpus.missing())),
    pytest.mark.skipif(
        not installed("pynvml"), reason="needs nvidia-ml-py: pip install nvidia-ml-py"
    ),
]

MHZ, KERNEL_US = 1980, 10_000
STEPS, WINDOW = 16, "4:15"
"""A step is of 1.7 s, of which the driver's waits are late by 10 ms."""


def run(folder, clock=(1.0, 1.0)):
    """Trains two GPUs with these clocks, in their highest one; returns the settings."""
    lines = [
        f"{gpu} sm_mhz {round(MHZ * share)}\n{gpu} kernel_us {round(KERNEL_US / share)}\n"
        for gpu, share in enumerate(clock)
    ]
    folder.mkdir()
    (folder / "state").write_text("".join(lines) + "* power_w 600\n")
    done = null_gpus.start(
        *null_gpus.tiny("llama31_8b_bf16", steps=STEPS), folder=folder,
        **null_gpus.environment(state=folder / "state"),
    ).wait()  # fmt: skip
    assert done.status == 0, done.text
    return done.record["recipe"]


def result(folder):
    (found,) = command.report([folder], WINDOW)
    return found


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """Seconds of a step of GPUs without a fault."""
    folder = tmp_path_factory.mktemp("healthy") / "run"
    run(folder)
    return result(folder).mean_s


@pytest.mark.parametrize(
    ("clock", "planted"),
    [
        ((0.85, 0.85), {"clocks": 1 / 0.85 - 1}),
        ((1.0, 0.8), {"clocks": 0.125, "slow ranks": 0.125}),
        ((0.9, 0.75), {"clocks": 2 / 9, "slow ranks": 1 / 9}),
    ],
    ids=str,
)
def test_the_gap_is_divided_into_what_is_planted(clock, planted, healthy, tmp_path):
    """Within two points of the gap. The reference is the healthy run, all of whose step is kernels;
    the typical time of two GPUs is between theirs."""
    plan = {
        "gpus": 2, "target": "h100", "settings": run(tmp_path / "run", clock),
        "forecast": {"step_s": healthy, "parts_s": {"products": healthy}},
    }  # fmt: skip
    (tmp_path / "run" / "plan.json").write_text(json.dumps(plan))
    gap = explain(result(tmp_path / "run"))
    assert gap.kind == "forecast"
    parts = {part.name: part.seconds for part in gap.parts}
    assert gap.seconds == pytest.approx(sum(planted.values()) * healthy, rel=0.05)
    for name, seconds in parts.items():
        share = planted.get(name, 0.0) * healthy
        assert abs(seconds - share) < 0.02 * gap.seconds, (name, parts, healthy)
    assert REMAINS in parts
