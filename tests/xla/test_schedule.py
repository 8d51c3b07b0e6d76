"""The roofline walk on programs whose times are known by hand."""

from dataclasses import replace

import pytest
from compiled import collectives_of

from jaxbench.base.errors import RunFailed
from jaxbench.base.hardware import H100, PLANNED
from jaxbench.forecast.costs import Measured
from jaxbench.forecast.tables import load
from jaxbench.plan import compiled_step
from jaxbench.xla import hlo, host_copies, kernels, schedule
from jaxbench.xla.collectives import Collective

# 1 GB/s in memory and over NVLink, half of it between nodes.
GPU = replace(H100, bandwidth=1.0, nvlink=1.0, nic=0.5, domain=4)
SYSTEM = schedule.Roofline(GPU)
PRODUCT_S = 2 * 128 * 1e-9
"""One operand and the result, bf16 arrays of 8 x 8, at 1 GB/s: longer than 1024 FLOP at the H100's
peak."""


def program(body: str, extra: str = "") -> hlo.Program:
    return hlo.Program.parse(f"""\
HloModule toy, is_scheduled=true

{extra}
ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {{
  %x = bf16[8,8]{{1,0}} parameter(0)
  %shard = bf16[2,8]{{1,0}} bitcast(%x)
{body}
}}
""")


GATHER = """\
  %start = ((bf16[2,8]{1,0}), bf16[8,8]{1,0}) all-gather-start(%shard), \
replica_groups=[1,4]<=[4], dimensions={0}
"""
DOT = """\
  %dot = bf16[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
"""
DONE = "  %done = bf16[8,8]{1,0} all-gather-done(%start)\n"
GATHER_S = 96e-9
"""128 bytes, three quarters of them from others, at 1 GB/s."""


def test_a_product_hides_a_gather():
    found = schedule.Walk(program(GATHER + DOT + DONE)).under(SYSTEM)
    assert found.parts["compute"] == pytest.approx(PRODUCT_S)
    assert (found.exposed_s, found.uncovered_bytes, found.launches) == (0, 0, 2)


def test_kernels_one_by_one_are_what_the_walk_sums_up():
    """In a loop of three, and next to it; the gather is none."""
    loop = f"""
%body (p: bf16[8,8]) -> bf16[8,8] {{
  %x = bf16[8,8]{{1,0}} parameter(0)
{DOT}  ROOT %copy = bf16[8,8]{{1,0}} copy(%dot)
}}
"""
    repeated = (
        "  %loop = bf16[8,8]{1,0} while(%x), body=%body, "
        'backend_config={"known_trip_count":{"n":"3"}}\n'
    )
    whole = program(GATHER + DOT + DONE + repeated, loop)
    found = list(schedule.Walk(whole).kernels())
    assert [(name, kernel.part, runs) for name, kernel, runs in found] == [
        ("dot", "products", 1), ("dot", "products", 3), ("copy", "other kernels", 3),
    ]  # fmt: skip
    seconds = [sum(SYSTEM.kernel(kernel).values()) * runs for _, kernel, runs in found]
    summed = schedule.Walk(whole).under(SYSTEM)
    assert (
        sum(seconds[:2]) == pytest.approx(summed.parts["compute"]) == pytest.approx(4 * PRODUCT_S)
    )
    assert seconds[2] == pytest.approx(summed.parts["memory"])


def test_a_workspace_is_no_traffic():
    body = """\
  ROOT %gemm = (bf16[8,8]{1,0}, s8[33554432]{0}) custom-call(%x, %x), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
"""
    ((_, kernel, _),) = schedule.Walk(program(body)).kernels()
    assert kernel.bytes == 2 * 128


GEMM = (
    'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
    '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"]}}}'
)


def test_an_asynchronous_matmul_counts_as_any_other():
    """Its shape begins with its operands, as XLA writes it with
    xla_gpu_multi_streamed_windowed_einsum."""
    whole = program(f"""\
  %wide = bf16[8,32]{{1,0}} broadcast(%shard), dimensions={{}}
  %start = ((bf16[2,8]{{1,0}}, bf16[8,32]{{1,0}}), (bf16[2,32]{{1,0}}, s8[33554432]{{0}}), u32[]) \
custom-call-start(%shard, %wide), {GEMM}
  %end = (bf16[2,32]{{1,0}}, s8[33554432]{{0}}) custom-call-done(%start)
""")
    ((work, runs, _),) = whole.works()
    assert (work.sizes, work.flops, runs) == ((1, 2, 32, 8), 2 * 2 * 32 * 8, 1)
    kernels = {name: kernel for name, kernel, _ in schedule.Walk(whole).kernels()}
    assert kernels["start"].bytes == 2 * (2 * 8 + 8 * 32 + 2 * 32)
    assert "end" not in kernels


def test_the_workspace_of_a_matmul_in_a_fusion_is_no_traffic():
    """XLA writes such a fusion where a matmul updates a slice of a stack."""
    fused = f"""\
%fused (p: bf16[8,8], s: bf16[4,8,8], n: s32[]) -> (bf16[4,8,8], s8[33554432]) {{
  %p = bf16[8,8]{{1,0}} parameter(0)
  %s = bf16[4,8,8]{{2,1,0}} parameter(1)
  %n = s32[] parameter(2)
  %gemm = (bf16[8,8]{{1,0}}, s8[33554432]{{0}}) custom-call(%p, %p), {GEMM}
  %result = bf16[8,8]{{1,0}} get-tuple-element(%gemm), index=0
  %one = bf16[1,8,8]{{2,1,0}} bitcast(%result)
  %stack = bf16[4,8,8]{{2,1,0}} dynamic-update-slice(%s, %one, %n, %n, %n)
  %workspace = s8[33554432]{{0}} get-tuple-element(%gemm), index=1
  ROOT %both = (bf16[4,8,8]{{2,1,0}}, s8[33554432]{{0}}) tuple(%stack, %workspace)
}}
"""
    body = """\
  %stack = bf16[4,8,8]{2,1,0} broadcast(%shard), dimensions={}
  %n = s32[] constant(1)
  %f = (bf16[4,8,8]{2,1,0}, s8[33554432]{0}) fusion(%x, %stack, %n), kind=kCustom, calls=%fused
"""
    kernels = {name: kernel for name, kernel, _ in schedule.Walk(program(body, fused)).kernels()}
    assert kernels["f"].bytes == 2 * 128 + 4


@pytest.mark.parametrize(
    ("computed", "moved"),
    [("%p", 2 * 16), ("bf16[8,8]{1,0} negate(%p)", 2 * 16 + 2 * 128 - 16)],
)
def test_an_array_that_a_kernel_computes_is_not_updated_in_place(computed, moved):
    """The kernel writes the whole array, and reads all of what it computes it from."""
    array = f"  %a = {computed}\n  %b = bf16[8,8]{{1,0}} bitcast(%a)\n"
    fused = f"""\
%fused (p: bf16[8,8], u: bf16[1,8], n: s32[]) -> bf16[8,8] {{
  %p = bf16[8,8]{{1,0}} parameter(0)
  %u = bf16[1,8]{{1,0}} parameter(1)
  %n = s32[] parameter(2)
{array if computed != "%p" else ""}\
  ROOT %d = bf16[8,8]{{1,0}} dynamic-update-slice(%{"p" if computed == "%p" else "b"}, %u, %n, %n)
}}
"""
    body = """\
  %u = bf16[1,8]{1,0} bitcast(%x)
  %n = s32[] constant(1)
  %f = bf16[8,8]{1,0} fusion(%x, %u, %n), kind=kLoop, calls=%fused
"""
    kernels = {name: kernel for name, kernel, _ in schedule.Walk(program(body, fused)).kernels()}
    assert kernels["f"].bytes == moved + 4


def test_an_asynchronous_call_runs_its_computation():
    """JAX's `compute_on` makes such a call for another stream of the GPU."""
    called = f"""\
%called (x: bf16[8,8]) -> bf16[8,8] {{
  %x = bf16[8,8]{{1,0}} parameter(0)
{DOT.replace("%dot", "ROOT %dot")}}}
"""
    body = """\
  %start = ((bf16[8,8]{1,0}), bf16[8,8]{1,0}) call-start(%x), to_apply=%called
  %end = bf16[8,8]{1,0} call-done(%start)
"""
    found = schedule.Walk(program(body, called)).under(SYSTEM)
    assert found.parts == {"compute": pytest.approx(PRODUCT_S)}
    assert found.launches == 1


def test_nothing_between_start_and_done_exposes_it():
    found = schedule.Walk(program(GATHER + DONE + DOT)).under(SYSTEM)
    assert found.exposed_s == pytest.approx(GATHER_S)
    assert found.uncovered_bytes == 96
    assert found.step_s == pytest.approx(PRODUCT_S + GATHER_S)


def test_a_synchronous_collective_is_exposed():
    body = "  %all = bf16[8,8]{1,0} all-gather(%shard), replica_groups=[1,4]<=[4]\n"
    found = schedule.Walk(program(body)).under(SYSTEM)
    assert found.exposed_s == pytest.approx(GATHER_S)


def test_a_kernel_hides_as_long_as_it_runs():
    """Copying 16 bytes takes 32 ns of the gather's 96."""
    copy = "  %copy = bf16[1,8]{1,0} copy(%row)\n"
    row = "  %row = bf16[1,8]{1,0} bitcast(%x)\n"
    found = schedule.Walk(program(row + GATHER + copy + DONE)).under(SYSTEM)
    assert found.parts["memory"] == pytest.approx(32e-9)
    assert found.exposed_s == pytest.approx(GATHER_S - 32e-9)
    assert found.uncovered_bytes == 96


def test_collectives_run_one_after_another():
    """The second of two gathers waits for the first; the product hides one of them and a part. One
    between nodes, which takes twice as long, waits too, unless both have streams of their own."""
    second = GATHER.replace("%start", "%start2"), DONE.replace("start", "start2")
    short = schedule.Roofline(replace(GPU, bandwidth=2.0))
    both = GATHER + second[0] + DOT + DONE + second[1].replace("%done", "%done2")
    found = schedule.Walk(program(both)).under(short)
    assert found.parts["compute"] == pytest.approx(PRODUCT_S / 2)
    assert found.exposed_s == pytest.approx(2 * GATHER_S - PRODUCT_S / 2)
    assert found.uncovered_bytes == 0
    far = second[0].replace("[1,4]<=[4]", "[4,4]<=[4,4]T(1,0)")
    near_and_far = program(both.replace(second[0], far))
    found = schedule.Walk(near_and_far).under(SYSTEM)
    assert found.exposed_s == pytest.approx(3 * GATHER_S - PRODUCT_S)
    near_and_far.concurrent = "all"
    assert schedule.Walk(near_and_far).under(SYSTEM).exposed_s == 0


def test_a_synchronous_collective_waits_for_others_unless_communicators_are_apart():
    """A gather inside a node after one between nodes, which takes twice as long."""
    far = GATHER.replace("[1,4]<=[4]", "[4,4]<=[4,4]T(1,0)")
    near = GATHER.replace("%start", "%near").replace("all-gather-start", "all-gather")
    near = near.replace("((bf16[2,8]{1,0}), bf16[8,8]{1,0})", "bf16[8,8]{1,0}")
    both = program(far + near + DOT + DONE)
    assert schedule.Walk(both).under(SYSTEM).exposed_s == pytest.approx(3 * GATHER_S)
    both.concurrent = "synchronous"
    found = schedule.Walk(both).under(SYSTEM)
    assert found.exposed_s == pytest.approx(GATHER_S)
    assert found.spans[0].start_s == found.spans[1].start_s


def test_collectives_on_other_links_have_a_line_of_their_own():
    far = GATHER.replace("[1,4]<=[4]", "[4,4]<=[4,4]T(1,0)").replace("%start", "%far")
    body = GATHER + far + DOT + DONE + DONE.replace("%done", "%other").replace("%start", "%far")
    found = schedule.Walk(program(body)).under(SYSTEM)
    lines = compiled_step.traffic_by_axes(found, GPU, lambda _: "fsdp")
    assert [(line.axes, line.across_domains, line.count) for line in lines] == [
        ("fsdp", False, 1), ("fsdp", True, 1),
    ]  # fmt: skip


COPIED = """
%copied (p: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  ROOT %moved = bf16[8,8]{1,0} copy(%p)
}
"""
COPY = """\
  %copy-start = ((bf16[8,8]{1,0}), bf16[8,8]{1,0}, u32[]) fusion-start(%x), calls=%copied
"""
COPY_DONE = "  %copy-done = bf16[8,8]{1,0} fusion-done(%copy-start)\n"
COPY_S = 256e-9
COMPUTING = schedule.Roofline(replace(GPU, tflops={"bf16": 1e-3}))
"""The product takes 1024 ns, in 256 of which it needs the memory."""


def copies(start: str, number: int) -> str:
    return "".join(start.replace("copy-", f"copy{n}-") for n in range(number))


@pytest.mark.parametrize(("number", "left"), [(1, 0), (3, 0), (4, 1), (6, 3)])
def test_asynchronous_copies_have_the_bandwidth_that_a_product_leaves(number, left):
    body = copies(COPY, number) + DOT + copies(COPY_DONE, number)
    found = schedule.Walk(program(body, COPIED)).under(COMPUTING)
    assert found.parts["compute"] == pytest.approx(1024e-9)
    assert found.parts["memory"] == pytest.approx(left * COPY_S)
    assert found.launches == number + 1


def test_an_asynchronous_copy_beside_kernels_that_need_all_bandwidth_is_added():
    found = schedule.Walk(program(COPY + DOT + COPY_DONE, COPIED)).under(SYSTEM)
    assert found.step_s == pytest.approx(PRODUCT_S + COPY_S)


def test_an_asynchronous_copy_runs_while_kernels_wait_for_a_collective():
    found = schedule.Walk(program(COPY + GATHER + DONE + COPY_DONE, COPIED)).under(SYSTEM)
    assert found.exposed_s == pytest.approx(GATHER_S)
    assert found.step_s == pytest.approx(COPY_S)


def test_an_asynchronous_copy_in_a_loop_leaves_less_to_one_around_it():
    """The product leaves 768 ns in each of two passes, of which the copy inside takes 256."""
    loop = f"""
%body (p: bf16[8,8]) -> bf16[8,8] {{
  %x = bf16[8,8]{{1,0}} parameter(0)
{COPY}{DOT}  ROOT %end = bf16[8,8]{{1,0}} fusion-done(%copy-start)
}}
"""
    twice = (
        "  %loop = bf16[8,8]{1,0} while(%x), body=%body, "
        'backend_config={"known_trip_count":{"n":"2"}}\n'
    )
    body = copies(COPY, 5) + twice + copies(COPY_DONE, 5)
    found = schedule.Walk(program(body, COPIED + loop)).under(COMPUTING)
    assert found.parts["compute"] == pytest.approx(2 * 1024e-9)
    assert found.parts["memory"] == pytest.approx(COPY_S)


def test_an_asynchronous_product_is_counted_in_line():
    product = COPIED.replace("copy(%p)", DOT.partition(" = bf16[8,8]{1,0} ")[2].strip())
    body = COPY + DOT + COPY_DONE
    found = schedule.Walk(program(body, product.replace("%x", "%p"))).under(COMPUTING)
    assert found.parts["compute"] == pytest.approx(2 * 1024e-9)


def test_loops_multiply():
    loop = (
        """\
%body (state: bf16[8,8]) -> bf16[8,8] {
  %x = bf16[8,8]{1,0} parameter(0)
  %shard = bf16[2,8]{1,0} bitcast(%x)
"""
        + GATHER
        + DONE
        + DOT.replace("  %dot", "  ROOT %dot")
        + "}\n"
    )
    outer = """\
%outer (state: bf16[8,8]) -> bf16[8,8] {
  %o = bf16[8,8]{1,0} parameter(0)
  ROOT %inner = bf16[8,8]{1,0} while(%o), body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
}
"""
    body = """\
  ROOT %w = bf16[8,8]{1,0} while(%x), body=%outer, backend_config={"known_trip_count":{"n":"3"}}
"""
    found = schedule.Walk(program(body, loop + outer)).under(SYSTEM)
    assert found.parts["compute"] == pytest.approx(15 * PRODUCT_S)
    assert found.exposed_s == pytest.approx(15 * GATHER_S)
    (gather,) = found.transfers
    assert (gather.collective.count, gather.collective.wire_bytes) == (15, 15 * 96)
    assert found.launches == 30


@pytest.mark.parametrize(
    ("dtype", "shape", "along", "read", "launches", "moved"),
    [
        ("s32", "32768", 0, "0", 13, 32768 * 4 * (1 + 2 * 4)),
        ("s32", "32768", 0, "1", 13, 32768 * 4 * (1 + 2 * 4 * 2)),
        ("s16", "32768", 0, "0", 9, 32768 * 2 * (1 + 2 * 2)),
        ("s64", "32768", 0, "0", 21, 32768 * 8 * (1 + 2 * 8)),
        ("s32", "16384", 0, "0", 7, 16384 * 8 * 2 * 7),
        ("s32", "128,4096", 1, "0", 2, 128 * 4096 * 8 * 2 * 2),
        ("s32", "16,65536", 1, "0", 16, 16 * 65536 * 8 * 2 * 16),
        ("s32", "65536,16", 0, "0", 16, 16 * 65536 * 8 * 2 * 16),
    ],
)
def test_a_sort_takes_several_kernels_and_passes(dtype, shape, along, read, launches, moved):
    """As null GPUs count them, where XLA sorts long arrays by CUB (`benchmarks/host_time.py`). CUB
    sorts the numbers along only if they are read."""
    pair = f"({dtype}[{shape}], s32[{shape}])"
    fused = f"""\
%fused (p: {dtype}[{shape}]) -> {pair} {{
  %p = {dtype}[{shape}] parameter(0)
  %n = s32[{shape}] iota(), iota_dimension=0
  ROOT %s = {pair} sort(%p, %n), dimensions={{{along}}}, to_apply=%less
}}
"""
    body = f"""\
  %f = {pair} fusion(%x), kind=kCustom, calls=%fused
  ROOT %read = {dtype if read == "0" else "s32"}[{shape}] get-tuple-element(%f), index={read}
"""
    walk = schedule.Walk(program(body, fused))
    found = walk.under(SYSTEM)
    assert found.launches == launches
    assert found.parts["memory"] == pytest.approx(moved / 1e9)


def test_a_call_of_cub_sorts_in_passes():
    body = """\
  %s = (f32[65536]{0}, s32[65536]{0}, u8[1024]{0}) custom-call(%x, %x), \
custom_call_target="__cub$DeviceRadixSort"
"""
    found = schedule.Walk(program(body)).under(SYSTEM)
    assert found.parts["memory"] == pytest.approx(65536 * 4 * (1 + 2 * 4 * 2) / 1e9)
    assert found.launches == 13


def test_a_product_of_blocks_with_scales_is_compute():
    fused = """\
%fused (p: f8e4m3fn[64,64], s: f8e8m0fnu[64,2]) -> bf16[64,64] {
  %p = f8e4m3fn[64,64]{1,0} parameter(0)
  %s = f8e8m0fnu[64,2]{1,0} parameter(1)
  ROOT %d = bf16[64,64]{1,0} scaled-dot(%p, %p, %s, %s), lhs_contracting_dims={1}, \
rhs_contracting_dims={1}
}
"""
    body = "  %f = bf16[64,64]{1,0} fusion(%x, %x), kind=kCustom, calls=%fused\n"
    found = program(body, fused)
    ((work, runs, _),) = found.works()
    assert (work.format, work.flops, runs) == ("mxfp8", 2 * 64**3, 1)


def test_a_product_inside_a_fusion_is_compute():
    fused = """\
%fused (p: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  ROOT %d = bf16[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    body = "  %f = bf16[8,8]{1,0} fusion(%x), kind=kCustom, calls=%fused\n"
    found = schedule.Walk(program(GATHER + body + DONE, fused)).under(SYSTEM)
    assert found.parts["compute"] == pytest.approx(PRODUCT_S)
    assert found.parts["memory"] == 0
    assert found.uncovered_bytes == 0


def test_a_quantization_does_not_cover_a_gather():
    """Only a matmul or attention does."""
    cast = (
        '  %q = bf16[8,8]{1,0} custom-call(%x), custom_call_target="te_dbias_quantize_ffi", '
        "api_version=API_VERSION_TYPED_FFI\n"
    )
    found = schedule.Walk(program(GATHER + cast + DONE)).under(SYSTEM)
    assert found.uncovered_bytes == 96


def test_memory_that_nothing_is_written_to_costs_nothing():
    allocated = '  %e = f32[8,8]{1,0} custom-call(), custom_call_target="AllocateBuffer"\n'
    found = schedule.Walk(program(GATHER + allocated + DONE)).under(SYSTEM)
    assert found.kernel_s == 0
    assert found.launches == schedule.Walk(program(GATHER + DONE)).under(SYSTEM).launches


UPDATE = """\
%update (stack: f32[10,8], row: f32[1,8], i: s32[]) -> f32[10,8] {
  %stack = f32[10,8]{1,0} parameter(0)
  %row = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[10,8]{1,0} dynamic-update-slice(%stack, %row, %i, %zero)
}
%slice (stack: f32[10,8], i: s32[]) -> f32[1,8] {
  %stack = f32[10,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = f32[1,8]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,8}
}
%cast (stack: f32[10,8], i: s32[]) -> bf16[1,8] {
  %stack = f32[10,8]{1,0} parameter(0)
  %low = bf16[10,8]{1,0} convert(%stack)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = bf16[1,8]{1,0} dynamic-slice(%low, %i, %zero), dynamic_slice_sizes={1,8}
}
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fusion(%s, %r, %n), kind=kLoop, calls=%update", 32 + 4 + 32),
        ("fusion(%s, %n), kind=kLoop, calls=%slice", 32 + 4 + 32),
        ("dynamic-slice(%s, %n, %n), dynamic_slice_sizes={1,8}", 32 + 4 + 32),
        # Only the slice of a cast array is read.
        ("fusion(%s, %n), kind=kLoop, calls=%cast", 32 + 4 + 16),
        # The shape of a start has its operands and a context too.
        ("dynamic-slice-start(%s, %n, %n), dynamic_slice_sizes={1,8}", 32 + 4 + 32),
        ("async-start(%s, %n), calls=%slice", 32 + 4 + 32),
        ("copy-start(%s)", 320 + 320),
    ],
)
def test_traffic_of_slices_and_updates_in_place(line, expected):
    shape = "f32[10,8]{1,0}" if "update" in line else "f32[1,8]{1,0}"
    shape = "bf16[1,8]{1,0}" if "cast" in line else shape
    if "-start" in line:
        shape = f"((f32[10,8]{{1,0}}, s32[]), {shape}, u32[])"
    if "copy" in line:
        shape = "(f32[10,8]{1,0}, f32[10,8]{1,0}, u32[])"
    text = f"""\
  %s = f32[10,8]{{1,0}} parameter(1)
  %r = f32[1,8]{{1,0}} parameter(2)
  %n = s32[] parameter(3)
  ROOT %k = {shape} {line}
"""
    found = program(text, UPDATE)
    scope = found.computations[found.entry]
    assert kernels.moved_bytes(found, scope["k"], scope) == expected


def test_links_between_domains_are_shared_by_their_members():
    """Ring: NIC times members of a domain; all-to-all: what leaves it, over one NIC."""

    def seconds(kind: str, devices: tuple[int, ...]) -> float:
        return Collective(kind, 800, (devices,)).seconds(GPU)

    assert seconds("all-gather", (0, 1, 2, 3)) == pytest.approx(600e-9)
    assert seconds("all-gather", (0, 4)) == pytest.approx(400e-9 / 0.5)
    assert seconds("all-gather", (0, 2, 4, 6)) == pytest.approx(600e-9 / 1.0)
    assert seconds("all-to-all", (0, 2, 4, 6)) == pytest.approx(400e-9 / 0.5)


def test_a_collective_slows_what_runs_beside_it():
    """At a slowdown of 2 the product is half done when the gather ends, and goes on at full
    speed; of a product that ends before the gather, all is slow."""
    found = schedule.Walk(program(GATHER + DOT + DONE)).under(schedule.Roofline(GPU, 2.0))
    assert found.slowed_s == pytest.approx(GATHER_S / 2)
    assert found.exposed_s == 0
    fast = replace(GPU, bandwidth=8.0)
    found = schedule.Walk(program(GATHER + DOT + DONE)).under(schedule.Roofline(fast, 2.0))
    assert found.slowed_s == pytest.approx(PRODUCT_S / 8)
    assert found.exposed_s == pytest.approx(GATHER_S - 2 * PRODUCT_S / 8)


def test_a_product_has_its_sizes():
    """A batch of 3 products [4, 2] x [2, 5], the contracted dimension first in both."""
    body = """\
  %a = bf16[3,2,4]{2,1,0} parameter(1)
  %b = bf16[3,2,5]{2,1,0} parameter(2)
  %p = f32[3,4,5]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={1}, \
rhs_batch_dims={0}, rhs_contracting_dims={1}
"""
    ((work, _, _),) = program(body).works()
    assert (work.sizes, work.flops) == ((3, 4, 5, 2), 2 * 3 * 4 * 5 * 2)


def test_the_slowest_of_the_groups_decides():
    """A group that is split 3 to 1 sends through one NIC, whatever the first group does."""
    found = Collective("all-gather", 800, ((0, 1, 2, 3), (4, 5, 6, 8)))
    assert found.crosses_domains(GPU)
    assert found.seconds(GPU) == pytest.approx(600e-9 / 0.5)


def test_a_dtype_has_its_own_peak_or_none():
    with_nvfp4 = replace(GPU, tflops=GPU.tflops | {"nvfp4": 4000.0})
    assert schedule.peak(with_nvfp4, "f4e2m1fn") == 4000
    assert schedule.peak(GPU, "f8e4m3fn") == 1979
    with pytest.raises(RunFailed, match="no bound for matmuls in f4e2m1fn"):
        schedule.peak(GPU, "f4e2m1fn")


@pytest.mark.parametrize("gpu", PLANNED.values(), ids=lambda gpu: gpu.name)
def test_matmuls_that_are_not_for_training_have_peaks_too(gpu):
    """One of them must not make a whole plan fail. Blackwell Ultra has hardly any fp64 and int8."""
    found = {dtype: schedule.peak(gpu, dtype) for dtype in ("tf32", "f32", "f64", "s8", "u4")}
    assert found["tf32"] == gpu.tflops["bf16"] / 2
    assert 60 < found["f32"] < 90
    assert found["s8"] == found["u4"]
    ultra = gpu.name in ("B300", "GB300")
    assert (found["f64"] < 2, found["s8"] < 200) == (ultra, ultra)
    for dtype in ("f32", "s32", "u16", "pred", "f16"):
        assert schedule.peak(gpu, dtype) > 0


HOST = """
%write (stack: bf16[4,8,8], slice: bf16[8,8], n: s32[]) -> bf16[4,8,8] {
  %stack = bf16[4,8,8]{2,1,0:S(5)} parameter(0)
  %slice = bf16[8,8]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %one = bf16[1,8,8]{2,1,0} bitcast(%slice)
  ROOT %written = bf16[4,8,8]{2,1,0:S(5)} dynamic-update-slice(%stack, %one, %n, %n, %n)
}

%read (stack: bf16[4,8,8], n: s32[]) -> bf16[1,8,8] {
  %stack = bf16[4,8,8]{2,1,0:S(5)} parameter(0)
  %n = s32[] parameter(1)
  ROOT %entry = bf16[1,8,8]{2,1,0} dynamic-slice(%stack, %n, %n, %n), dynamic_slice_sizes={1,8,8}
}
"""
EMPTY = """\
  %n = s32[] constant(1)
  %empty = bf16[4,8,8]{2,1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
"""
WRITE = """\
  %write-start = ((bf16[4,8,8]{2,1,0:S(5)}, bf16[8,8]{1,0}, s32[]), bf16[4,8,8]{2,1,0:S(5)}, \
u32[]) fusion-start(%empty, %x, %n), kind=kLoop, calls=%write
"""
WRITTEN = "  %write-done = bf16[4,8,8]{2,1,0:S(5)} fusion-done(%write-start)\n"
READ = """\
  %read-start = ((bf16[4,8,8]{2,1,0:S(5)}, s32[]), bf16[1,8,8]{2,1,0}, u32[]) \
fusion-start(%empty, %n), kind=kLoop, calls=%read
"""
READ_DONE = "  %read-done = bf16[1,8,8]{2,1,0} fusion-done(%read-start)\n"
ENTRY_S = 128e-9
"""An entry of 128 bytes at 1 GB/s."""


def test_copies_to_and_from_the_host_run_beside_kernels():
    """Each direction has a link of its own, and a copy moves its entry alone."""
    costs = schedule.Roofline(replace(GPU, host=1.0))
    hidden = program(EMPTY + WRITE + READ + DOT + WRITTEN + READ_DONE, HOST)
    found = schedule.Walk(hidden).under(costs)
    assert found.parts == {"compute": pytest.approx(PRODUCT_S)}
    assert (found.host.to_host, found.host.from_host, found.exposed_s) == (128, 128, 0)
    alone = schedule.Walk(program(EMPTY + WRITE + READ + WRITTEN + READ_DONE, HOST)).under(costs)
    assert alone.host.exposed_s == alone.exposed_s == pytest.approx(ENTRY_S)
    again = READ.replace("read-start", "next-start")
    two = EMPTY + READ + again + READ_DONE + READ_DONE.replace("read-", "next-")
    assert schedule.Walk(program(two, HOST)).under(costs).exposed_s == pytest.approx(2 * ENTRY_S)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16[4,8,8]{2,1,0:S(5)} dynamic-update-slice(%empty, %one, %n, %n, %n)", "to host"),
        ("bf16[1,8,8]{2,1,0} dynamic-slice(%empty, %n, %n, %n)", "from host"),
        ("((bf16[4,8,8]{2,1,0:S(5)}, s32[]), bf16[1,8,8]{2,1,0}, u32[]) "
         "dynamic-slice-start(%empty, %n)", "from host"),
        ("((bf16[4,8,8]{2,1,0:S(5)}, bf16[1,8,8]{2,1,0}), bf16[4,8,8]{2,1,0:S(5)}, u32[]) "
         "dynamic-update-slice-start(%empty, %one, %n)", "to host"),
        ("(bf16[1,8,8]{2,1,0}, bf16[1,8,8]{2,1,0:S(5)}, u32[]) copy-start(%there)", "from host"),
    ],
)  # fmt: skip
def test_what_a_copy_writes_where(text, expected):
    one = (
        "  %one = bf16[1,8,8]{2,1,0} bitcast(%x)\n  %there = bf16[1,8,8]{2,1,0:S(5)} bitcast(%x)\n"
    )
    parsed = program(f"{EMPTY}{one}  %copying = {text}\n")
    scope = parsed.computations[parsed.entry]
    assert host_copies.copies(scope["copying"], scope)
    assert host_copies.written(parsed, scope["copying"], scope) == (expected, 128)


def test_a_network_on_the_lanes_to_the_host_delays_copies():
    gpu = replace(GPU, host=1.0, domain=2)
    beside = program(GATHER + EMPTY + WRITE + WRITTEN + DONE, HOST)
    sent_s = schedule.Roofline(gpu).collective(collectives_of(beside)[0])
    for shared, waits in ((False, 0.0), (True, sent_s * gpu.nic / gpu.host)):
        walked = schedule.Walk(beside).under(schedule.Roofline(replace(gpu, host_shared=shared)))
        assert walked.host.exposed_s == pytest.approx(ENTRY_S + waits)


def test_an_adapter_of_any_rate_takes_the_lanes_for_as_many_bytes():
    """Of a ring through both GPUs of a domain each adapter sends half; of an all-to-all and of a
    permute, what leaves the domain."""
    gather = Collective("all-gather", 800, ((0, 1, 2, 3),), 3)
    assert gather.adapter_bytes(replace(GPU, domain=2)) == 600 / 2
    assert gather.adapter_bytes(GPU) == 0
    exchange = replace(gather, kind="all-to-all")
    assert exchange.adapter_bytes(replace(GPU, domain=2)) == 400
    shift = Collective("collective-permute", 800, ((3, 4),), 3)
    assert shift.adapter_bytes(GPU) == 800
    beside = program(GATHER + EMPTY + WRITE + WRITTEN + DONE, HOST)
    for nic in (0.5, 5.0, 500.0):
        gpu = replace(GPU, host=1.0, domain=2, nic=nic)
        found = schedule.Walk(beside).under(schedule.Roofline(gpu))
        assert found.host.exposed_s == pytest.approx(ENTRY_S + 48e-9)


def test_in_a_forecast_an_asynchronous_copy_takes_its_turn():
    """On one GPU, kernels and asynchronous slices took turns (docs/design/forecast.md)."""
    costs = Measured(H100, load("h100"))
    alone, both = (
        schedule.Walk(program(body, COPIED)).under(costs) for body in (DOT, COPY + DOT + COPY_DONE)
    )
    start, moving = costs.kernel(schedule.Kernel((), 256, "")).values()
    assert both.step_s == pytest.approx(alone.step_s + start + moving)
