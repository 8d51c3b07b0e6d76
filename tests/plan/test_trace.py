"""The trace of a planned step: it has every launch, and its streams are the plan's seconds."""

from collections import defaultdict

import pytest
from made_plans import LOOPS

from jaxbench.base.hardware import H100
from jaxbench.forecast.forecast import expected_schedule, forecast
from jaxbench.forecast.tables import load
from jaxbench.plan.trace import events
from jaxbench.xla.hlo import Program
from jaxbench.xla.schedule import Walk
from jaxbench.xla.timeline import EXPOSED, KERNELS


@pytest.fixture(scope="module")
def traced():
    """(forecast, launches, events by lane in their order)."""
    walk, tables = Walk(Program.parse(LOOPS)), load("h100")
    found = forecast(walk, H100, tables, lambda c: f"{c.group} GPUs")
    schedule = expected_schedule(walk, H100, tables)
    lanes = {}
    by_lane = defaultdict(list)
    for event in events("toy", schedule.slices, lambda c: f"{c.group} GPUs"):
        if event["name"] == "thread_name":
            lanes[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            by_lane[lanes[event["tid"]]].append(event)
    return found, schedule.launches, by_lane


def test_kernels_and_waits_are_the_step(traced):
    """Without gaps and overlaps, each part as long as in the forecast; slowed ones with that."""
    found, _, lanes = traced
    both = sorted(lanes[KERNELS] + lanes[EXPOSED], key=lambda event: event["ts"])
    end = 0.0
    for event in both:
        assert event["ts"] == pytest.approx(end, abs=2e-3)
        end = event["ts"] + event["dur"]
    assert end / 1e6 == pytest.approx(found.step_s, abs=1e-9)
    parts = defaultdict(float)
    for event in both:
        parts[event["cat"]] += event["dur"] / 1e6
    exposed = [s for name, s in found.parts_s.items() if name.startswith("exposed")]
    assert parts[EXPOSED] == pytest.approx(sum(exposed), abs=1e-8)
    assert len(exposed) == 2
    assert found.parts_s["slowed"] > parts["slowed"] > 0  # that of the loop, as it is no kernel's
    alone = found.parts_s["products"], parts["products"], sum(found.parts_s.values())
    assert alone[0] < alone[1] < alone[2]
    assert sum(parts.values()) == pytest.approx(found.step_s, abs=1e-8)


def test_every_launch_has_a_slice(traced):
    """Loops unrolled: three matmuls in the loop, and one."""
    _, launches, lanes = traced
    every = [event for lane in lanes.values() for event in lane]
    assert sum(event["args"]["launches"] for event in every) == launches == 3 * 3 + 5
    names = [event["args"]["hlo"] for event in lanes[KERNELS]]
    assert (names.count("inner"), names.count("dot"), names.count("also")) == (3, 1, 1)
    assert [event["name"] for event in lanes["NVLink"]] == ["all-gather over 8 GPUs"] * 3
    assert [event["name"] for event in lanes["network"]] == ["all-gather over 64 GPUs"]


def test_a_lane_does_one_thing_at_a_time(traced):
    for lane in traced[2].values():
        end = 0.0
        for event in lane:
            assert event["ts"] >= end - 1e-9
            end = event["ts"] + event["dur"]
