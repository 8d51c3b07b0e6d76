"""Times of single kernels and collectives, from measurements."""

from dataclasses import replace
from statistics import NormalDist, median

import pytest

from jaxbench.forecast import tables
from jaxbench.forecast.costs import CONDITIONS, Measured, slowest
from jaxbench.hardware import H100, PLANNED
from jaxbench.outliers import GPU_SPREAD
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import Work
from jaxbench.xla.timeline import Kernel


def measured(gpu=H100, conditions="expected") -> Measured:
    return Measured(gpu, tables.load("h100"), CONDITIONS[conditions])


def product(m: int, n: int, k: int, dtype: str = "bf16", batch: int = 1, **more) -> Work:
    return Work("product", dtype, 2 * batch * m * n * k, (batch, m, n, k), **more)


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3fn", "f8e5m2"])
def test_a_product_that_was_measured(dtype):
    name = "bf16" if dtype == "bf16" else "fp8"
    time = tables.load("h100").values["product", name][4096, 8192, 8192]
    burst = measured(conditions="fast")
    assert burst.work(product(4096, 8192, 8192, dtype)) == pytest.approx(time * 1e-6)


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bf16"), ("f8e4m3fn", "fp8")])
def test_products_of_a_step_keep_the_sustained_rate(dtype, name):
    """8192 x 28672 x 8192 has a faster burst, 1024 x 1024 x 8192 a slower one."""
    rate = {"bf16": 717e12, "fp8": 1330e12}[name]
    large, small = product(8192, 28672, 8192, dtype), product(1024, 1024, 8192, dtype)
    assert measured().work(large) == pytest.approx(large.flops / rate)
    assert measured(conditions="fast").work(large) < 0.97 * large.flops / rate
    assert measured().work(small) == measured(conditions="fast").work(small)


@pytest.mark.parametrize(
    ("dtype", "name"), [("f8e4m3fn", "mxfp8"), ("f4e2m1fn", "nvfp4"), ("bf16", "bf16")]
)
@pytest.mark.parametrize("gpu", ["b200", "gb200", "b300", "gb300"])
def test_block_scaled_products_have_tables_of_their_own(gpu, dtype, name):
    """A product whose operands have scales of blocks is not a per-tensor one, whose table has its
    quantization: that of an MXFP8 product is less."""
    loaded, gpu = tables.load(gpu), PLANNED[gpu]
    burst, expected = (Measured(gpu, loaded, CONDITIONS[c]) for c in ("fast", "expected"))
    work = product(8192, 8192, 8192, dtype, blocks=name != "bf16")
    time = loaded.values["product", name][8192, 8192, 8192] * 1e-6
    assert burst.work(work) == pytest.approx(time)
    rate = loaded.values["sustained", name][(200,)] * 1e12
    assert expected.work(work) == pytest.approx(max(time, work.flops / rate))
    assert burst.covers(work)
    if name == "mxfp8":
        assert burst.work(work) < 0.95 * burst.work(replace(work, blocks=False))


def test_mxfp8_without_a_table_takes_the_time_of_fp8():
    mxfp8 = product(4096, 8192, 8192, "f8e4m3fn", blocks=True)
    assert measured().work(mxfp8) == measured().work(replace(mxfp8, blocks=False))


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200", "gb200", "b300", "gb300"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_sustained_rates_are_those_of_the_longest_products(gpu, dtype):
    """Products of 16 ms and more, 12 in a row, are measured under the power limit. The package has
    a subset of their shapes, and in bf16 one of the two runs, which differ by up to 4 %."""
    values = tables.load(gpu).values
    rates = [
        2 * m * n * k / time / 1e6
        for (m, n, k), time in values["product", dtype].items()
        if time >= 16000
    ]
    assert median(rates) == pytest.approx(values["sustained", dtype][(200,)], rel=0.04)


@pytest.mark.parametrize("gpus", [1, 8, 2048])
def test_half_of_all_jobs_have_a_gpu_as_slow_as_the_slowest(gpus):
    speed = slowest(GPU_SPREAD, gpus)
    assert (1 - NormalDist(1, GPU_SPREAD).cdf(speed)) ** gpus == pytest.approx(0.5)


def test_slow_conditions_wait_for_the_slowest_gpu_of_the_job():
    large = product(8192, 28672, 8192)
    slow = [Measured(H100, tables.load("h100"), CONDITIONS["slow"], n) for n in (1, 64)]
    one, many = (costs.work(large) for costs in slow)
    assert one == measured().work(large)
    assert many == pytest.approx(one / slowest(GPU_SPREAD, 64))
    assert many / one == pytest.approx(1.036, abs=1e-3)


def test_products_are_padded_to_tiles_and_batches_are_rows():
    costs = measured()
    assert costs.work(product(4000, 8100, 8190)) == costs.work(product(4096, 8192, 8192))
    assert costs.work(product(1024, 2048, 2048, batch=4)) == costs.work(product(4096, 2048, 2048))


@pytest.mark.parametrize(
    ("gpu", "dtype", "slower"),
    [
        ("h100", "tf32", 2), ("h100", "f32", 989 / 67), ("h100", "f64", 989 / 67),
        ("h100", "s32", 989 / 67), ("b200", "f64", 2250 / 37), ("b300", "s8", 2250 / 165),
        ("gb300", "f64", 2450 / 1.4),
    ],
)  # fmt: skip
def test_a_format_without_a_table_is_slower_in_proportion_to_the_peaks(gpu, dtype, slower):
    """The start of a kernel takes as long in every format."""
    costs = Measured(PLANNED[gpu], tables.load(gpu), CONDITIONS["expected"])
    in_bf16, start = costs.work(product(4096, 8192, 8192)), 3e-6
    work = product(4096, 8192, 8192, dtype)
    assert costs.work(work) == pytest.approx(start + slower * (in_bf16 - start), rel=1e-3)
    assert not costs.covers(work)


def test_int8_products_take_the_time_of_fp8_on_hopper():
    sizes = (4096, 8192, 8192)
    assert measured().work(product(*sizes, "s8")) == measured().work(product(*sizes, "f8e4m3fn"))


def test_no_product_is_faster_than_the_peak_or_its_bytes():
    """Far below the table a line that goes on may fall to nothing."""
    costs = measured()
    tiny = product(128, 128, 64)
    assert costs.work(tiny) >= tiny.flops / 989e12
    assert not costs.covers(tiny)
    moving = Kernel((tiny,), 10**9, "")
    start, seconds = 3e-6, 1e9 / (0.8 * 3352.32e9)
    assert costs.kernel(moving) == {"products": pytest.approx(start + seconds)}


@pytest.mark.parametrize(
    ("conditions", "tokens"), [("expected", 22.65), ("fast", 22.65), ("slow", 12.62)]
)
def test_the_scan_takes_the_time_of_a_public_triton_kernel(conditions, tokens):
    """Million tokens per second of 128 heads of 64 features, one group, state 128, in chunks of 128
    tokens: vllm-project/vllm pull request 27299. 6.32 MFLOP per token."""
    flops = 128 * (2 * 128 * 64 + 4 * 128 * 64) + 2 * 128 * 128
    scan = Work("ssd_forward", "bf16", flops * 10**6)
    assert measured(conditions=conditions).work(scan) == pytest.approx(1 / tokens, rel=1e-3)
    assert not measured().covers(scan)


def test_work_of_which_there_is_no_table_takes_its_peak_or_its_bytes():
    costs = measured()
    work = Work("other", "bf16", 10**12, bytes=10**9)
    assert costs.work(work) == pytest.approx(1e12 / 989e12, rel=1e-3)
    assert not costs.covers(work)
    gate = Work("gate_norm", "bf16", 0, bytes=10**9)
    assert costs.covers(gate)
    assert costs.kernel(Kernel((gate,), 10**9, "")) == {
        "other kernels": pytest.approx(3e-6 + 1e9 / (0.8 * 3352.32e9))
    }


def test_other_kernels_take_their_start_and_their_bytes():
    found = measured().kernel(Kernel((), 10**9, "jit(step)/add"))
    assert found == {
        "launches": pytest.approx(3e-6), "other kernels": pytest.approx(1e9 / (0.8 * 3352.32e9)),
    }  # fmt: skip
    assert measured().kernel(Kernel((), 0, "")) == {}


@pytest.mark.parametrize(("backward", "rate"), [(False, 529e12), (True, 518e12 * 529 / 600)])
def test_attention_runs_at_the_rate_that_was_measured(backward, rate):
    """cuDNN at a length of 8192: 529 TFLOP/s forward and causal, 600 unmasked, 518 backward. Ten
    FLOPs backward and four forward for each score and element of a head."""
    per_score = 10 if backward else 4
    work = Work("attention", "bf16", 0, (2, 32, 8192, 128), backward)
    seconds = per_score * 2 * 32 * 8192**2 * 128 / 2 / rate
    assert measured().work(work) == pytest.approx(seconds, rel=1e-4)
    longer = replace(work, sizes=(1, 32, 32768, 128))
    assert not measured().covers(longer)
    faster = {False: 539 / 529, True: (516 * 539 / 595) / (518 * 529 / 600)}[backward]
    assert measured().work(longer) == pytest.approx(8 * seconds / faster, rel=1e-4)


def gather(devices: range, whole: int, kind: str = "all-gather") -> Collective:
    return Collective(kind, "c", whole, tuple(devices), 1, "")


def test_a_collective_inside_a_node_that_was_measured():
    times = tables.load("h100").values["collective", "all-gather"]
    time = times[8, 2**26] * 1e-6
    costs = measured()
    assert costs.collective(gather(range(8), 2**26)) == pytest.approx(time)
    scattered = gather(range(8), 2**23, "reduce-scatter")
    by_table = tables.load("h100").values["collective", "reduce-scatter"][8, 2**26]
    assert costs.collective(scattered) == pytest.approx(by_table * 1e-6)
    slower = measured(replace(H100, nvlink=225.0)).collective(gather(range(8), 2**26))
    assert slower == pytest.approx(2 * time)


def test_a_larger_ring_inside_a_domain_takes_a_step_for_each_gpu():
    domain = replace(H100, domain=64)
    time = tables.load("h100").values["collective", "all-gather"][8, 2**26] * 1e-6
    found = measured(domain).collective(gather(range(64), 2**26))
    assert found == pytest.approx(time * (63 / 64) / (7 / 8) + 56 * 3.4e-6)


def test_a_ring_between_nodes_by_hand():
    """1 GiB over 8 nodes of 8 GPUs: 86.25 % of 400 GB/s, but no more than a ring sends over NVLink;
    and NCCL's latencies."""
    over_nvlink = (
        2**29 * 7 / 8 / (tables.load("h100").values["collective", "all-gather"][8, 2**29] * 1e-6)
    )
    sent, rate = 2**30 * 63 / 64, min(0.8625 * 400e9, over_nvlink)
    latency = 8.4e-6 + 56 * 3.4e-6 + 7 * 14e-6
    found = measured().collective(gather(range(64), 2**30))
    assert found == pytest.approx(sent / rate + latency)
    untuned = measured(conditions="slow").collective(gather(range(64), 2**30))
    assert untuned == pytest.approx(sent / 200e9 + latency)


def test_an_all_to_all_leaves_over_one_adapter():
    found = measured().collective(gather(range(16), 2**30, "all-to-all"))
    assert found == pytest.approx(2**30 / 2 / (0.97 * 50e9) + 22.4e-6)


def test_between_more_nodes_than_were_measured_the_line_goes_on():
    shares = [
        2**30 * (n - 1) / n / 400e9 / (measured().collective(gather(range(n), 2**30)) - latency)
        for n, latency in ((512, 0.0024135), (1024, 0.0048339), (2048, 0.0096747))
    ]
    assert shares == pytest.approx([0.70, 0.65, 0.60], abs=0.001)


def test_a_product_is_looked_up_transposed_where_only_that_was_measured():
    """57344 rows are beyond the table, as many columns are not."""
    costs = measured()
    assert costs.covers(product(57344, 8192, 8192))
    assert costs.work(product(57344, 8192, 8192)) == costs.work(product(8192, 57344, 8192))


def test_attention_of_another_head_dim_lies_outside():
    assert measured().covers(Work("attention", "bf16", 0, (1, 96, 4096, 128)))
    assert not measured().covers(Work("attention", "bf16", 0, (1, 96, 4096, 192)))


def test_a_small_all_reduce_takes_a_tree():
    """On 2048 GPUs: twice 7 steps of 4 us and 8 of 14 us, not 2047 of a ring."""
    found = measured().collective(gather(range(2048), 2560, "all-reduce"))
    assert found == pytest.approx(8.4e-6 + 2 * (7 * 4e-6 + 8 * 14e-6), rel=1e-2)


def test_a_larger_all_to_all_inside_a_domain_takes_no_more_steps():
    domain = replace(H100, domain=64)
    time = tables.load("h100").values["collective", "all-to-all"][8, 2**26] * 1e-6
    found = measured(domain).collective(gather(range(64), 2**26, "all-to-all"))
    assert found == pytest.approx(time * (63 / 64) / (7 / 8))


def test_an_untuned_network_is_never_the_faster_one():
    for n in (16, 512, 2048):
        seconds = [
            measured(H100, c).collective(gather(range(n), 2**33)) for c in ("expected", "slow")
        ]
        assert seconds[0] <= seconds[1]
