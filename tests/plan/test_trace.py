"""The trace of a planned step: it has every launch, and its streams are the plan's seconds."""

from collections import defaultdict

import pytest

from jaxbench.forecast.forecast import expected_schedule, forecast
from jaxbench.forecast.tables import load
from jaxbench.hardware import H100
from jaxbench.plan.trace import events
from jaxbench.xla.hlo import Program
from jaxbench.xla.schedule import Walk
from jaxbench.xla.timeline import EXPOSED, KERNELS

GATHER = """\
  %start{n} = ((bf16[1024,8192]{{1,0}}), bf16[{rows},8192]{{1,0}}) all-gather-start(%shard), \
replica_groups=[{groups}]<=[64], dimensions={{0}}
"""
DONE = "  %done{n} = bf16[{rows},8192]{{1,0}} all-gather-done(%start{n})\n"
DOT = """\
  %dot = bf16[8192,8192]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
"""
NEAR, FAR = (
    GATHER.format(n=1, rows=8192, groups="8,8"),
    GATHER.format(n=2, rows=262144, groups="1,64"),
)
PROGRAM = f"""\
HloModule toy, is_scheduled=true, num_partitions=64

%copied (p: bf16[8192,8192]) -> bf16[8192,8192] {{
  %p = bf16[8192,8192]{{1,0}} parameter(0)
  ROOT %moved = bf16[8192,8192]{{1,0}} copy(%p)
}}

%body (p: bf16[8192,8192]) -> bf16[8192,8192] {{
  %x = bf16[8192,8192]{{1,0}} parameter(0)
  %shard = bf16[1024,8192]{{1,0}} bitcast(%x)
{NEAR}{DONE.format(n=1, rows=8192)}{DOT}  ROOT %copy = bf16[8192,8192]{{1,0}} copy(%dot)
}}

ENTRY %main (x: bf16[8192,8192]) -> bf16[262144,8192] {{
  %x = bf16[8192,8192]{{1,0}} parameter(0)
  %shard = bf16[1024,8192]{{1,0}} bitcast(%x)
{FAR}  %loop = bf16[8192,8192]{{1,0}} while(%x), body=%body, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
  %aside = ((bf16[8192,8192]{{1,0}}), bf16[8192,8192]{{1,0}}, u32[]) fusion-start(%x), calls=%copied
  %also = ((bf16[8192,8192]{{1,0}}), bf16[8192,8192]{{1,0}}, u32[]) fusion-start(%x), calls=%copied
{DOT}  %first = bf16[8192,8192]{{1,0}} fusion-done(%aside)
  %second = bf16[8192,8192]{{1,0}} fusion-done(%also)
{DONE.format(n=2, rows=262144)}  ROOT %end = bf16[262144,8192]{{1,0}} copy(%done2)
}}
"""


@pytest.fixture(scope="module")
def traced():
    """(forecast, launches, events by lane in their order)."""
    walk, tables = Walk(Program.parse(PROGRAM)), load("h100")
    found = forecast(walk, H100, tables, lambda c: f"{c.group} GPUs")
    schedule = expected_schedule(walk, H100, tables)
    lanes = {}
    by_lane = defaultdict(list)
    for event in events("toy", schedule.slices, lambda c: f"{c.group} GPUs"):
        if event["name"] == "thread_name":
            lanes[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            by_lane[lanes[event["tid"]]].append(event)
    return found, schedule.kernels, by_lane


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
    """Loops unrolled: three products in the loop, and one."""
    _, launches, lanes = traced
    every = [event for lane in lanes.values() for event in lane]
    assert sum(event["args"]["launches"] for event in every) == launches == 3 * 3 + 5
    assert [event["args"]["hlo"] for event in lanes[KERNELS]].count("dot") == 4
    assert [event["name"] for event in lanes["NVLink"]] == ["all-gather over 8 GPUs"] * 3
    assert [event["name"] for event in lanes["network"]] == ["all-gather over 64 GPUs"]
    assert {event["args"]["hlo"] for event in lanes["copies beside kernels (2)"]} == {"also"}


def test_a_lane_does_one_thing_at_a_time(traced):
    for lane in traced[2].values():
        end = 0.0
        for event in lane:
            assert event["ts"] >= end - 1e-9
            end = event["ts"] + event["dur"]
