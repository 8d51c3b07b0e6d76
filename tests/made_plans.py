"""Plans of a small program, written out instead of compiled."""

from dataclasses import replace

from jaxbench.base.hardware import H100, Gpu, placed
from jaxbench.forecast.tables import load
from jaxbench.plan.plan import Memory, Plan, StateBytes, describe
from jaxbench.recipe import recipes
from jaxbench.xla import flags
from jaxbench.xla.hlo import Program
from jaxbench.xla.host_copies import HostTraffic
from jaxbench.xla.memory import Buffer

PROGRAM = """\
HloModule toy, is_scheduled=true

ENTRY %main (x: bf16[8192,8192]) -> bf16[8192,8192] {
  %x = bf16[8192,8192]{1,0} parameter(0)
  %shard = bf16[1024,8192]{1,0} bitcast(%x)
  %start = ((bf16[1024,8192]{1,0}), bf16[8192,8192]{1,0}) all-gather-start(%shard), \
replica_groups=[8,8]<=[64], dimensions={0}
  %dot = bf16[8192,8192]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %done = bf16[8192,8192]{1,0} all-gather-done(%start)
  %long = bf16[8192,131072]{1,0} parameter(1)
  %wide = bf16[8192,131072]{1,0} dot(%x, %long), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
  %again = bf16[8192,8192]{1,0} all-gather(%shard), replica_groups=[8,8]<=[64], dimensions={0}
  ROOT %copy = bf16[8192,131072]{1,0} copy(%wide)
}
"""

GATHER = """\
  %start{n} = ((bf16[1024,8192]{{1,0}}), bf16[{rows},8192]{{1,0}}) all-gather-start(%shard), \
replica_groups=[{groups}]<=[64], dimensions={{0}}
"""
DONE = "  %done{n} = bf16[{rows},8192]{{1,0}} all-gather-done(%start{n})\n"
DOT = """\
  %dot = bf16[8192,8192]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
"""
INNER = DOT.replace("%dot", "%inner")
NEAR, FAR = (
    GATHER.format(n=1, rows=8192, groups="8,8"),
    GATHER.format(n=2, rows=262144, groups="1,64"),
)
LOOPS = f"""\
HloModule toy, is_scheduled=true, num_partitions=64

%copied (p: bf16[8192,8192]) -> bf16[8192,8192] {{
  %p = bf16[8192,8192]{{1,0}} parameter(0)
  ROOT %moved = bf16[8192,8192]{{1,0}} copy(%p)
}}

%body (p: bf16[8192,8192]) -> bf16[8192,8192] {{
  %x = bf16[8192,8192]{{1,0}} parameter(0)
  %shard = bf16[1024,8192]{{1,0}} bitcast(%x)
{NEAR}{DONE.format(n=1, rows=8192)}{INNER}  ROOT %copy = bf16[8192,8192]{{1,0}} copy(%inner)
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
"""A matmul in a loop, two outside; collectives in a domain and beyond; asynchronous copies."""


def made(recipe: str = "llama31_8b_bf16", gpus: int = 64, gpu: Gpu = H100, **sizes: object) -> Plan:
    """A plan of a real row whose program is `PROGRAM`; `sizes` are fields of it."""
    run = recipes.resolve(recipes.load(recipe).on(gpu), gpus)
    held = Memory(
        arguments=12 * 2**30, temporaries=50 * 2**30, peak=62 * 2**30, limit=gpu.memory_limit,
        host=0, host_limit=gpu.host_limit, scheduled=57 * 2**30,
    )  # fmt: skip
    sizes = {
        "bytes_per_device": held,
        "state_bytes": StateBytes(parameters=4 * 2**30, optimizer=8 * 2**30, gradients=2**31),
        "largest_buffers": [Buffer(2**31, "bf16[4,2048,128256]", "forward <div>, 4 times")],
        "lower_s": 2.0,
        "compile_s": 30.0,
        "planned_flags": flags.PLANNED,
        "without_cudnn": None,
    } | sizes
    program = Program.parse(PROGRAM)
    return describe(run, placed(gpu, gpus), load(gpu.name.lower(), None), program, **sizes)


def awkward():
    """A plan that is too big, with a pipeline, activations on the host, and long names."""
    plan = made("nemotron4_340b_fp8", gpus=128)
    long = Buffer(2**31, "f32[96,1152,18432]", "state.optimizer[1][0].mu.stacks[0].layers" * 5)
    held = replace(plan.bytes_per_device, peak=2**37, host=2**38)
    return replace(
        plan, fits=False, bytes_per_device=held, largest_buffers=[long] * 12,
        host=HostTraffic(2**36, 2**35, 0.25), quantization_bytes=2**40,
        forecast=replace(plan.forecast, unknown={"their_kernel": 0.25}, assumed=["scan: bytes"]),
    )  # fmt: skip


def slower(plan, step_s, **changes):
    """A plan that waits longer."""
    f, rate = plan.forecast, plan.rates["forecast"]
    waiting = f.parts_s | {"exposed: data": step_s - f.step_s}
    rate = replace(rate, tokens_per_s_per_gpu=rate.tokens_per_s_per_gpu * f.step_s / step_s)
    return replace(
        plan, forecast_step_s=step_s, forecast=replace(f, step_s=step_s, parts_s=waiting),
        rates=plan.rates | {"forecast": rate}, **changes,
    )  # fmt: skip
