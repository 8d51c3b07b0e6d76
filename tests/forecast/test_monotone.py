"""A faster GPU never makes a bound or a forecast slower, and the parts of a step add up."""

from dataclasses import replace

import pytest
from compiled import Compiled, needs_compiler

from jaxbench.base.hardware import PLANNED, Gpu, placed
from jaxbench.forecast import tables
from jaxbench.forecast.costs import Measured
from jaxbench.forecast.forecast import forecast
from jaxbench.forecast.sensitivity import CHANGES, SLOWEST, sensitivities, slowest
from jaxbench.xla.custom_calls import RULES
from jaxbench.xla.hlo import Program
from jaxbench.xla.schedule import Roofline, Walk

LAYERS = """\
HloModule jit_step, is_scheduled=true, num_partitions=16

%write (stack: bf16[16,4096,8192], slice: bf16[4096,8192], n: s32[]) -> bf16[16,4096,8192] {
  %stack = bf16[16,4096,8192]{2,1,0:S(5)} parameter(0)
  %slice = bf16[4096,8192]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %one = bf16[1,4096,8192]{2,1,0} bitcast(%slice)
  ROOT %new = bf16[16,4096,8192]{2,1,0:S(5)} dynamic-update-slice(%stack, %one, %n, %n, %n)
}

%copied (p: bf16[4096,8192]) -> bf16[4096,8192] {
  %p = bf16[4096,8192]{1,0} parameter(0)
  ROOT %moved = bf16[4096,8192]{1,0} copy(%p)
}

%ordered (p: f32[65536]) -> (f32[65536], s32[65536]) {
  %p = f32[65536]{0} parameter(0)
  %i = s32[65536]{0} iota(), iota_dimension=0
  ROOT %s = (f32[65536]{0}, s32[65536]{0}) sort(%p, %i), dimensions={0}, to_apply=%less
}

%body (c: (s32[], bf16[4096,8192], bf16[16,4096,8192])) -> (s32[], bf16[4096,8192], \
bf16[16,4096,8192]) {
  %c = (s32[], bf16[4096,8192]{1,0}, bf16[16,4096,8192]{2,1,0:S(5)}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %x = bf16[4096,8192]{1,0} get-tuple-element(%c), index=1
  %kept = bf16[16,4096,8192]{2,1,0:S(5)} get-tuple-element(%c), index=2
  %shard = bf16[512,8192]{1,0} constant({...})
  %gather-start = ((bf16[512,8192]{1,0}), bf16[8192,8192]{1,0}) all-gather-start(%shard), \
channel_id=1, use_global_device_ids=true, replica_groups=[1,16]<=[16], dimensions={0}
  %write-start = ((bf16[16,4096,8192]{2,1,0:S(5)}, bf16[4096,8192]{1,0}, s32[]), \
bf16[16,4096,8192]{2,1,0:S(5)}, u32[]) fusion-start(%kept, %x, %n), kind=kLoop, calls=%write
  %copy-start = ((bf16[4096,8192]{1,0}), bf16[4096,8192]{1,0}, u32[]) fusion-start(%x), \
kind=kLoop, calls=%copied
  %near = bf16[8,4096,8192]{2,1,0} all-gather(%x), channel_id=2, use_global_device_ids=true, \
replica_groups=[2,8]<=[16], dimensions={0}
  %far = bf16[4096,8192]{1,0} all-to-all(%x), channel_id=3, replica_groups=[8,2]<=[2,8]T(1,0), \
dimensions={0}
  %next = bf16[4096,8192]{1,0} collective-permute(%x), channel_id=4, \
source_target_pairs={{0,8},{8,0}}
  %weight = bf16[8192,8192]{1,0} all-gather-done(%gather-start)
  %dot = bf16[4096,8192]{1,0} dot(%x, %weight), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %exact = f32[4096,8192]{1,0} convert(%x)
  %router = f32[8192,256]{1,0} constant({...})
  %scores = f32[4096,256]{1,0} dot(%exact, %router), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}, operand_precision={highest,highest}
  %last = f32[65536]{0} bitcast(%scores)
  %sorted = (f32[65536]{0}, s32[65536]{0}) fusion(%last), kind=kCustom, calls=%ordered
  %order = s32[65536]{0} get-tuple-element(%sorted), index=1
  %copy-done = bf16[4096,8192]{1,0} fusion-done(%copy-start)
  %write-done = bf16[16,4096,8192]{2,1,0:S(5)} fusion-done(%write-start)
  ROOT %out = (s32[], bf16[4096,8192]{1,0}, bf16[16,4096,8192]{2,1,0:S(5)}) tuple(%n, %dot, \
%write-done)
}

ENTRY %main (x: bf16[4096,8192]) -> bf16[4096,8192] {
  %x = bf16[4096,8192]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %empty = bf16[16,4096,8192]{2,1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %state = (s32[], bf16[4096,8192]{1,0}, bf16[16,4096,8192]{2,1,0:S(5)}) tuple(%zero, %x, %empty)
  %loop = (s32[], bf16[4096,8192]{1,0}, bf16[16,4096,8192]{2,1,0:S(5)}) while(%state), \
body=%body, backend_config={"known_trip_count":{"n":"16"}}
  ROOT %y = bf16[4096,8192]{1,0} get-tuple-element(%loop), index=1
}
"""
"""A layer of a model in a loop. It has collectives of all kinds in and between nodes, a copy next
to kernels, activations that go to the host, a sort, and matmuls in bf16 and fp32."""

RATES = ("nvlink", "nic", "host", "bandwidth", "fp32", "fp64", "int8")


def faster(gpu: Gpu, name: str, factor: float) -> Gpu:
    """The GPU with one of its links, its memory or a peak faster."""
    if name in gpu.tflops:
        return replace(gpu, tflops=gpu.tflops | {name: factor * gpu.tflops[name]})
    return replace(gpu, **{name: factor * getattr(gpu, name)})


def check_faster(program: Program, name: str) -> None:
    """Bound and forecast are no longer if one rate is higher."""
    gpu, loaded = placed(PLANNED[name], program.devices), tables.load(name)
    walk = Walk(program)

    def steps(gpu: Gpu) -> list[float]:
        costs = Roofline(gpu), Measured(gpu, loaded)
        return [walk.under(cost).step_s for cost in costs]

    at_first = steps(gpu)
    for rate in (*RATES, *gpu.tflops):
        before = at_first
        for factor in (1.3, 4, 64):
            after = steps(faster(gpu, rate, factor))
            slower = [a > b * (1 + 1e-9) for a, b in zip(after, before, strict=True)]
            assert not any(slower), (rate, factor)
            before = after


def check_sums(program: Program, name: str) -> None:
    """Parts add up to the step, in the bound and in the forecast; so does what a step rests on."""
    gpu = placed(PLANNED[name], program.devices)
    walk = Walk(program)
    bound = walk.under(Roofline(gpu))
    assert sum(bound.parts.values()) + bound.exposed_s == pytest.approx(bound.step_s)
    found = forecast(walk, gpu, tables.load(name), lambda c: str(c.group))
    assert sum(found.parts_s.values()) == pytest.approx(found.step_s)
    assert sum(found.rests_on.values()) == pytest.approx(found.step_s)
    assert bound.step_s <= found.step_s


@pytest.mark.parametrize("gpu", ["h100", "gb300"])
def test_a_faster_gpu_is_never_slower(gpu):
    program = Program.parse(LAYERS, RULES)
    check_faster(program, gpu)
    check_sums(program, gpu)


@needs_compiler
def test_a_faster_gpu_is_never_slower_on_a_row():
    program = Compiled("llama2_70b_bf16", 64, "model.layers=2").program
    check_faster(program, "h100")
    check_sums(program, "h100")


def test_what_moves_a_forecast():
    """The changes of a step that waits for its collectives, activations that go to the host and a
    matmul: each one makes it longer by what it changes."""
    program = Program.parse(LAYERS, RULES)
    gpu, loaded = placed(PLANNED["h100"], program.devices), tables.load("h100")
    walk = Walk(program)
    expected = forecast(walk, gpu, loaded, lambda c: str(c.group))
    found = sensitivities(walk, Measured(gpu, loaded), expected.step_s)
    assert [s.percent for s in found] == sorted((s.percent for s in found), reverse=True)
    assert {(s.what, s.change) for s in found} == {*CHANGES, SLOWEST}
    percent = {s.what: s.percent for s in found}
    assert percent["attention"] == percent["grouped matmuls"] == 0
    of_step = 100 / expected.step_s
    products_s = expected.parts_s["products"]
    assert 0 < percent["matmuls"] <= 0.05 * products_s * of_step * (1 + 1e-9)
    slow = 1 / slowest(program.devices) - 1
    assert 0 < percent["slowest GPU"] <= slow * expected.step_s * of_step * (1 + 1e-9)
    launches = walk.under(Roofline(gpu)).launches
    assert 0 < percent["launches"] <= launches * 2e-6 * of_step
    for links in ("collectives between NVLink domains", "collectives inside NVLink domains"):
        assert 0 < percent[links] < 25
    assert all(s.percent >= 0 for s in found)
