"""Times of single kernels and collectives, from measurements."""

from dataclasses import replace
from math import prod
from statistics import NormalDist, median

import pytest

from jaxbench.base.hardware import H100, PLANNED, Gpu
from jaxbench.base.outliers import GPU_SPREAD
from jaxbench.forecast import tables
from jaxbench.forecast.costs import EXPECTED, WEIGHTS, Conditions, Measured
from jaxbench.forecast.sensitivity import slowest
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import GROUPED, Work
from jaxbench.xla.timeline import Kernel

BURSTS = Conditions(sustained=False)


def measured(gpu: Gpu = H100, conditions: Conditions = EXPECTED) -> Measured:
    return Measured(gpu, tables.load(gpu.name.lower()), conditions)


def on(gpu: str, conditions: Conditions = EXPECTED) -> Measured:
    return measured(PLANNED[gpu], conditions)


def product(m: int, n: int, k: int, dtype: str = "bf16", batch: int = 1, **more) -> Work:
    return Work("product", dtype, 2 * batch * m * n * k, (batch, m, n, k), **more)


def test_bytes_take_longer_on_slower_memory_than_the_measured_one():
    before = measured()._memory(2**30)
    after = measured(replace(H100, bandwidth=H100.bandwidth / 2))._memory(2**30)
    assert before[1] > 0
    assert after == (before[0], pytest.approx(2 * before[1]))


def test_a_gpu_with_another_peak_scales_what_was_measured():
    """Only its own dtype changes, and nothing of it counts as measured any more."""
    half = measured(replace(H100, tflops=H100.tflops | {"bf16": H100.tflops["bf16"] / 2}))
    start, _ = measured()._memory(0)
    large = product(8192, 28672, 8192)
    assert half.work(large) - start == pytest.approx(2 * (measured().work(large) - start))
    assert measured().covers(large)
    assert not half.covers(large)
    fp8 = product(8192, 28672, 8192, "f8e4m3fn")
    assert (half.work(fp8), half.covers(fp8)) == (measured().work(fp8), True)
    other = replace(PLANNED["gb200"], tflops=PLANNED["gb200"].tflops | {"mxfp8": 20_000.0})
    blocks = product(8192, 28672, 8192, "f8e4m3fn", blocks=True)
    times = [measured(gpu).work(blocks) for gpu in (PLANNED["gb200"], other)]
    assert times[1] < 0.3 * times[0]
    heads = attention(4, 32, 4096, 128, 128)
    assert half.work(heads) == pytest.approx(2 * measured().work(heads))


def test_oversubscribed_uplinks_slow_down_what_leaves_a_leaf():
    """Of the four nodes that a ring has below a leaf, one sends upwards, a quarter of the traffic.
    In an all-to-all of eight nodes 32 of 56 remote GPUs are below another leaf."""
    ring, spread = gather(range(64), 2**33), gather(range(64), 2**33, "all-to-all")
    leaf = replace(H100, leaf=4)
    slow = replace(leaf, oversubscription=2.0)
    for gpu in (leaf, slow):
        assert measured(gpu).collective(ring) == measured().collective(ring)
    factor = measured(slow).collective(spread) / measured().collective(spread)
    assert factor == pytest.approx(2 * 32 / 56, rel=1e-3)
    slower = measured(replace(leaf, oversubscription=8.0)).collective(ring)
    # Twice as long over the network; NVLink's share of the time stays.
    assert 1.9 < slower / measured().collective(ring) < 2
    apart = Collective("all-gather", 2**33, ((0, 32),))
    assert measured(slow).collective(apart) > 1.9 * measured().collective(apart)
    # Of the 32 pairs of neighbouring nodes that begin below a leaf, 8 end below the next one.
    pairs = tuple((n, n + 8) for n in range(56))
    sent = Collective("collective-permute", 2**30, pairs)
    for oversubscription, factor in ((4.0, 1), (8.0, 2)):
        seconds = measured(replace(leaf, oversubscription=oversubscription)).collective(sent)
        assert seconds / measured().collective(sent) == pytest.approx(factor, rel=1e-2)
    # In a ring over two leaves, every leaf sends one node's pairs of four upwards.
    ring_pairs = tuple((n, (n + 8) % 64) for n in range(64))
    for pairs in (ring_pairs, tuple((b, a) for a, b in ring_pairs)):
        sent = Collective("collective-permute", 2**30, pairs)
        assert sent.uplink_slowdown(replace(leaf, oversubscription=8.0)) == 2
    below = gather(range(32), 2**33, "all-to-all")
    assert measured(slow).collective(below) == measured().collective(below)
    later = measured(replace(H100, latency=24.0)).collective(ring) - measured().collective(ring)
    assert later == pytest.approx(7 * 10e-6)


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3fn", "f8e5m2"])
def test_a_product_that_was_measured(dtype):
    name = "bf16" if dtype == "bf16" else "fp8"
    time = tables.load("h100").values["product", name][4096, 8192, 8192]
    burst = measured(conditions=BURSTS)
    assert burst.work(product(4096, 8192, 8192, dtype)) == pytest.approx(time * 1e-6)


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bf16"), ("f8e4m3fn", "fp8")])
def test_products_of_a_step_keep_the_sustained_rate(dtype, name):
    """8192 x 28672 x 8192 has a faster burst, 1024 x 1024 x 8192 a slower one."""
    rate = {"bf16": 717e12, "fp8": 1400e12}[name]
    large, small = product(8192, 28672, 8192, dtype), product(1024, 1024, 8192, dtype)
    assert measured().work(large) == pytest.approx(large.flops / rate)
    assert measured(conditions=BURSTS).work(large) < 0.97 * large.flops / rate
    assert measured().work(small) == measured(conditions=BURSTS).work(small)


@pytest.mark.parametrize(
    ("dtype", "name"), [("f8e4m3fn", "mxfp8"), ("f4e2m1fn", "nvfp4"), ("bf16", "bf16")]
)
@pytest.mark.parametrize("gpu", ["b200", "gb200", "b300", "gb300"])
def test_block_scaled_products_have_tables_of_their_own(gpu, dtype, name):
    """A product whose operands have scales of blocks is not a per-tensor one."""
    burst, values = on(gpu, BURSTS), tables.load(gpu).values
    work = product(8192, 8192, 8192, dtype, blocks=name != "bf16")
    time = values["product", name][8192, 8192, 8192] * 1e-6
    assert burst.work(work) == pytest.approx(time)
    rate = values["sustained", name][(200,)] * 1e12
    assert on(gpu).work(work) == pytest.approx(max(time, work.flops / rate))
    assert burst.covers(work)


@pytest.mark.parametrize(
    ("gpu", "together", "quantization"),
    [
        ("h100", 884.91, 109.9 + 66.9), ("h200", 884.23, 106.5 + 49.7),
        ("b200", 470.85, 52.4 + 46.1), ("b300", 403.53, 51.4 + 45.0),
        ("gb200", 487.32, 51.6 + 43.3), ("gb300", 403.14, 51.6 + 42.8),
    ],
)  # fmt: skip
def test_quantization_is_counted_once(gpu, together, quantization):
    """Microseconds of aiconfigurator-core 0.12.0 for 8192 cubed in FP8: the table `gemm` times the
    product and the quantization of one operand, `computescale` and `scale_matrix` time the latter.
    A step has kernels of its own for it, which read the operand twice and write it in FP8."""
    costs = on(gpu, BURSTS)
    once = costs.work(product(8192, 8192, 8192, "f8e4m3fn")) * 1e6
    assert once + quantization == pytest.approx(together, rel=1e-3)
    elements = 8192**2
    kernels = [
        Kernel((), 2 * elements, "quantized.w"),
        Kernel((), 3 * elements, "quantized.w", fp8=elements),
    ]
    quantized = sum(sum(costs.kernel(kernel).values()) for kernel in kernels) * 1e6
    assert once + quantized == pytest.approx(together, rel=0.1)


def test_mxfp8_on_a_gpu_without_it_takes_the_time_of_bf16():
    mxfp8 = product(4096, 8192, 8192, "f8e4m3fn", blocks=True)
    assert measured().work(mxfp8) == measured().work(product(4096, 8192, 8192))


def grouped(rows: int, groups: int = 16, dtype: str = "bf16", kind="grouped", **more) -> Work:
    """A matmul of experts of 4096 x 1536 (Qwen3 235B)."""
    sizes = groups, rows, 1536, 4096
    return Work(kind, dtype, 2 * prod(sizes), sizes, **more)


def test_grouped_matmuls_take_what_public_kernels_take():
    """Milliseconds of vLLM's experts of Qwen3 235B on an H100, forward, 16384 tokens, by
    aiconfigurator-core 0.12.0: three matmuls, and 0.9 ms for the activation and the sum of the top
    8, by their bytes."""
    seconds = 3 * measured().work(grouped(1024, 128))
    assert seconds == pytest.approx((10.15 - 0.91) * 1e-3, rel=0.02)


@pytest.mark.parametrize("gpu", PLANNED)
@pytest.mark.parametrize("kind", GROUPED)
def test_no_grouped_matmul_is_faster_than_a_plain_one(gpu, kind):
    costs = on(gpu)
    block_scaled = ["mxfp8", "nvfp4"] if "nvfp4" in PLANNED[gpu].tflops else []
    dtypes = {"bf16": "bf16", "fp8": "f8e4m3fn", "mxfp8": "f8e4m3fn", "nvfp4": "f4e2m1fn"}
    for name in ["bf16", "fp8", *block_scaled]:
        for rows in (128, 512, 2048, 8192):
            work = grouped(rows, dtype=dtypes[name], kind=kind, blocks=name in block_scaled)
            assert costs.work(work) >= costs.work(replace(work, kind="product"))


def test_more_rows_of_a_group_take_longer():
    """Padding is work: rows of padding take as long as others."""
    costs = measured()
    seconds = [costs.work(grouped(rows)) for rows in range(1024, 4096, 64)]
    assert seconds == sorted(seconds)
    assert costs.work(grouped(2048)) == pytest.approx(2 * costs.work(grouped(1024)))


def test_gradients_of_weights_are_assumed_until_they_are_measured(tmp_path):
    """On an H100 we have measured them in our own steps, on other GPUs not."""
    forward, weights = (on("b200").work(grouped(1024, kind=kind)) for kind in GROUPED)
    assert forward / weights == pytest.approx(WEIGHTS)
    assert on("b200").covers(grouped(1024))
    assert not on("b200").covers(grouped(1024, kind="grouped_weights"))
    step = grouped(576, 64, kind="grouped_weights")
    assert measured().work(step) == pytest.approx(1024.7e-6)
    assert measured().covers(step)
    file = tmp_path / "own.csv"
    file.write_text(
        "# gpu: h100\nkind,name,sizes,microseconds\n"
        "grouped,bf16,16x1024x1536x4096,500\ngrouped_weights,bf16,16x1024x1536x4096,700\n"
    )
    own = Measured(H100, tables.load("h100", file))
    found = [own.work(grouped(1024, kind=kind)) for kind in GROUPED]
    assert found == pytest.approx([500e-6, 700e-6])
    assert own.covers(grouped(1024, kind="grouped_weights"))


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
    speed = slowest(gpus)
    assert (1 - NormalDist(1, GPU_SPREAD).cdf(speed)) ** gpus == pytest.approx(0.5)


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
    costs = on(gpu)
    in_bf16, start = costs.work(product(4096, 8192, 8192)), 1.51e-6
    work = product(4096, 8192, 8192, dtype)
    assert costs.work(work) == pytest.approx(start + slower * (in_bf16 - start), rel=1e-3)
    assert not costs.covers(work)


def test_a_sort_waits_for_each_of_its_launches():
    once = measured().kernel(Kernel((), 13 * 10**6, "jit(step)/sort"))
    found = measured().kernel(Kernel((), 13 * 10**6, "jit(step)/sort", launches=13))
    assert found["launches"] == pytest.approx(13 * once["launches"])
    assert found["other kernels"] > once["other kernels"]


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
    assert costs.kernel(moving) == {"products": pytest.approx(1e9 / 3.0e12, rel=0.01)}


def test_the_scan_takes_about_the_time_of_a_public_triton_kernel():
    """Million tokens per second of 128 heads of 64 features, one group, state 128, in chunks of 128
    tokens: vllm-project/vllm pull request 27299. 6.32 MFLOP per token. Ours was timed at a state of
    256."""
    flops = 128 * (2 * 128 * 64 + 4 * 128 * 64) + 2 * 128 * 128
    scan = Work("ssd_forward", "bf16", flops * 10**6)
    assert measured().work(scan) == pytest.approx(1 / 22.65, rel=0.1)
    assert not measured().covers(scan)


def test_work_of_which_there_is_no_table_takes_its_peak_or_its_bytes():
    costs = measured()
    work = Work("other", "bf16", 10**12, bytes=10**9)
    assert costs.work(work) == pytest.approx(1e12 / 989e12, rel=1e-3)
    assert not costs.covers(work)
    gate = Work("gate_norm", "bf16", 0, bytes=10**9)
    assert costs.covers(gate)
    assert costs.kernel(Kernel((gate,), 10**9, "")) == {
        "other kernels": pytest.approx(1e9 / 3.0e12, rel=0.01)
    }


def test_other_kernels_take_their_start_and_their_bytes():
    """An H100 with 3352 GB/s moves 3.04 TB/s, and less in a kernel that casts to FP8 or transposes
    it, or that is short."""
    large = Kernel((), 10**9, "jit(step)/add")
    found = measured().kernel(large)
    assert found["launches"] == pytest.approx(1.52e-6)
    assert found["other kernels"] == pytest.approx(1e9 / 3.04e12, rel=0.01)
    short = measured().kernel(replace(large, bytes=10**8))
    assert short["other kernels"] > found["other kernels"] / 10
    cast = replace(large, fp8=10**9 // 3)
    assert measured().kernel(cast)["other kernels"] == pytest.approx(1e9 / 1.98e12, rel=0.01)
    from_fp32 = replace(large, fp8=10**9 // 5)
    assert measured().kernel(from_fp32) == found
    assert measured().kernel(Kernel((), 0, "")) == {}


def test_more_bandwidth_helps_large_kernels_most():
    """An H200 has the multiprocessors of an H100 and 1.43 times its bandwidth. Blackwell has more
    of both, and no kernel gains more than its bandwidth."""

    def gain(gpu: str, moved: int, fp8: int = 0) -> float:
        kernel = Kernel((), moved, "", fp8=fp8)
        here, there = measured().kernel(kernel), on(gpu).kernel(kernel)
        return sum(here.values()) / sum(there.values())

    assert gain("h200", 4 * 10**9) == pytest.approx(1.4, abs=0.05)
    assert 1.0 < gain("h200", 10**9, fp8=10**9 // 3) < 1.15
    for gpu in ("h200", "b200", "b300", "gb200", "gb300"):
        more = PLANNED[gpu].bandwidth / H100.bandwidth
        gains = [gain(gpu, moved) for moved in (10**8, 10**9, 10**10)]
        assert all(1.0 < found < more for found in gains)
        assert gain(gpu, 10**9, fp8=10**9 // 3) < gain(gpu, 10**9)


GPUS = ["h100", "h200", "b200", "gb200", "b300", "gb300"]


def attention(batch: int, heads: int, length: int, *width: int, backward: bool = False) -> Work:
    return Work("attention", "bf16", 0, (batch, heads, length, *width), backward)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_takes_the_times_of_its_table(gpu, direction):
    """In a step it keeps a share of the rate of short runs."""
    expected, bursts = on(gpu), on(gpu, BURSTS)
    values = tables.load(gpu).values
    (kept,) = values.get(("kept", direction), {(128, 128): 1.0}).values()
    for sizes, time in values["attention", direction].items():
        work = attention(*sizes, backward=direction == "backward")
        assert kept * expected.work(work) == pytest.approx(time * 1e-6)
        assert expected.covers(work)
        assert bursts.work(work) == pytest.approx(time * 1e-6)


@pytest.mark.parametrize(
    ("gpu", "sizes", "forward", "backward"),
    [
        ("gb200", (2, 64, 4096, 128, 128), 1408, 1148),
        ("gb200", (2, 64, 8192, 128, 128), 1574, 1332),
        ("gb200", (2, 128, 4096, 192, 128), 1406, 1057),
        ("gb300", (2, 64, 4096, 128, 128), 1703, 1248),
        ("gb300", (2, 64, 8192, 128, 128), 1856, 1435),
        ("gb300", (2, 128, 8192, 192, 128), 1825, 1291),
        ("h200", (2, 64, 8192, 128, 128), 655, 526),
        ("h200", (2, 128, 4096, 192, 128), 612, 490),
        ("h100", (2, 16, 8192, 128, 128), 529, 0.89 * 518 * 529 / 600),
    ],
)
def test_attention_has_the_published_rates(gpu, sizes, forward, backward):
    """TFLOP/s as NVIDIA/cudnn-frontend counts them: half of the scores, and for each of them two
    matmuls forward and five backward, three of which are over the head dim of keys. In a step an
    H100 keeps 0.84 of the forward rate of an H200's benchmark, and 0.78 of the backward rate."""
    batch, heads, length, key, value = sizes
    scores = batch * heads * length**2 / 2
    for rate, dims, back in ((forward, key + value, False), (backward, 3 * key + 2 * value, True)):
        seconds = 2 * dims * scores / (rate * 1e12)
        if gpu != "h100":
            seconds /= 0.78 if back else 0.84
        assert on(gpu).work(attention(*sizes, backward=back)) == pytest.approx(seconds, rel=2e-3)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("backward", [False, True])
def test_longer_and_wider_attention_takes_longer(gpu, backward):
    lengths = [2**i + j for i in range(8, 18) for j in (0, 2 ** (i - 1))]
    for width in ((64, 64), (128, 128), (192, 128), (192, 192), (96, 96), (256, 256)):
        works = [attention(1, 64, length, *width, backward=backward) for length in lengths]
        seconds = [on(gpu).work(work) for work in works]
        assert seconds == sorted(seconds)
    for length in lengths:
        narrow, wide = ((64, 64), (128, 128))
        each = (attention(1, 64, length, *w, backward=backward) for w in (narrow, wide))
        assert on(gpu).work(next(each)) < on(gpu).work(next(each))


def test_attention_of_other_sizes_lies_outside():
    """Its rate is that of the width whose head dims have the nearest sum. Beyond the lengths of a
    width the rate changes as that of width 128."""
    h100, gb200 = on("h100"), on("gb200")
    assert h100.covers(attention(1, 96, 4096, 128, 128))
    assert h100.covers(attention(1, 96, 4096, 192, 192))
    assert not h100.covers(attention(1, 96, 8192, 192, 192))
    assert not h100.covers(replace(attention(1, 96, 4096, 128, 128), dtype="f8e4m3fn"))
    assert not gb200.covers(attention(1, 96, 4096, 192, 192))
    assert gb200.width(attention(1, 96, 4096, 256, 256)) == (192, 128)
    assert gb200.width(attention(1, 96, 4096, 96, 64)) == (64, 64)
    four, eight = (
        {width: h100.work(attention(1, 64, s, *width)) for width in ((128, 128), (192, 128))}
        for s in (4096, 8192)
    )
    assert eight[192, 128] / four[192, 128] == pytest.approx(eight[128, 128] / four[128, 128])
    longest, longer = (gb200.work(attention(1, 64, s, 128, 128)) for s in (32768, 65536))
    assert longer == pytest.approx(4 * longest)


def test_attention_in_our_own_steps_on_an_h100():
    """GPT-OSS in benchmarks/measured.jsonl, which no table is made of: two layers with a
    window of 128 and two without, forward 1.823 ms and backward 2.986 ms. Remat runs the forward
    pass twice."""
    h100 = on("h100")
    for measured_s, runs, backward in ((1.823e-3, 4, False), (2.986e-3, 2, True)):
        window, full = (
            h100.work(attention(4096 // length, 64, length, 64, 64, backward=backward))
            for length in (512, 4096)
        )
        assert runs * (window + full) == pytest.approx(measured_s, rel=0.07)


@pytest.mark.parametrize("backward", [False, True])
def test_an_h200_attends_in_steps_as_an_h100_does(backward):
    """Its multiprocessors are the same. No table of the H100 has these two from the H200's
    benchmark: width 128 is from the FlashAttention-3 paper, 192/128 from our own steps."""
    for sizes, most in (((2, 64, 8192, 128, 128), 0.04), ((1, 128, 4096, 192, 128), 0.08)):
        work = attention(*sizes, backward=backward)
        assert on("h200").work(work) == pytest.approx(on("h100").work(work), rel=most)


@pytest.mark.parametrize(("gpu", "most"), [("gb200", 0.08), ("gb300", 0.12)])
def test_a_width_that_is_in_no_table_is_forecast_from_the_nearest(gpu, most):
    """cuDNN 9.22 forward with width 256, 32 query and 2 key-value heads, in milliseconds
    (NVIDIA/cudnn-frontend commit 3929da2, qwen35): no table has it."""
    measured = {
        "gb200": {4096: 0.191, 8192: 0.644, 16384: 2.438, 32768: 10.148},
        "gb300": {4096: 0.158, 8192: 0.560, 16384: 2.132, 32768: 8.394},
    }[gpu]
    for length, time in measured.items():
        seconds = 0.84 * on(gpu).work(attention(1, 32, length, 256, 256))
        assert seconds == pytest.approx(1e-3 * time, rel=most)


def gather(devices: range, whole: int, kind: str = "all-gather") -> Collective:
    return Collective(kind, whole, (tuple(devices),))


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
    """1 GiB over 8 nodes of 8 GPUs: 86.8 % of 400 GB/s, but no more than a ring sends over NVLink;
    and NCCL's latencies."""
    over_nvlink = (
        2**29 * 7 / 8 / (tables.load("h100").values["collective", "all-gather"][8, 2**29] * 1e-6)
    )
    sent, latency = 2**30 * 63 / 64, 8.4e-6 + 56 * 3.4e-6 + 7 * 14e-6
    found = measured().collective(gather(range(64), 2**30))
    assert found == pytest.approx(sent / min(0.868 * 400e9, over_nvlink) + latency)


@pytest.mark.parametrize(("nodes", "bus"), [(4, 360), (8, 345), (16, 320), (32, 300), (128, 260)])
def test_a_ring_on_h100s_has_the_bus_rate_that_was_measured(nodes, bus):
    """Of a message of 16 GiB, with the latencies: NVIDIA/nccl issue 1229. Up to 8 nodes NVLink's
    table is a limit."""
    costs, whole = measured(), 2**34
    costs._nvlink = lambda kind: 450e9
    gpus = 8 * nodes
    found = whole * (gpus - 1) / gpus / costs.collective(gather(range(gpus), whole))
    assert found == pytest.approx(bus * 1e9, rel=2e-3)


BUS = {
    2: (337, 340, 341), 4: (325, 330, 332), 8: (313, 315, 316), 16: (286, 315, 310),
    32: (234, 286, 310), 64: (224, 232, 286),
}  # fmt: skip
"""Bus rates in GB/s of all-gathers of 2, 4 and 8 GiB on B200s by the number of nodes, in one
cluster: togethercomputer/together-dgxc-benchmarking, worklog of 2026-04-25."""


@pytest.mark.parametrize(
    ("of", "median_error", "worst"), [("b200", 0.004, 0.14), ("h100", 0.075, 0.13)]
)
def test_a_ring_by_the_number_of_nodes_and_the_size(of, median_error, worst):
    """B200's own shares have one number for each number of nodes; the sizes come from the
    latencies. The other shares are those of a cluster of H100s."""
    shares = {("network", "ring"): tables.load(of).values["network", "ring"]}
    loaded = tables.load("b200")
    loaded = replace(loaded, values={**loaded.values, **shares})
    costs, errors = Measured(PLANNED["b200"], loaded), []
    for nodes, rates in BUS.items():
        for whole, bus in zip((2**31, 2**32, 2**33), rates, strict=True):
            gpus = 8 * nodes
            seconds = whole * (gpus - 1) / gpus / (bus * 1e9)
            errors.append(abs(costs.collective(gather(range(gpus), whole)) / seconds - 1))
    assert median(errors) < median_error
    assert max(errors) < worst


def test_an_all_reduce_is_no_slower_than_a_ring():
    """Of 2 GiB on B200s, NCCL told to use rings (same source): trees are faster on 16 nodes and
    more."""
    for nodes, bus in ((2, 342), (4, 312), (8, 305), (16, 287), (32, 269), (64, 223)):
        gpus, whole = 8 * nodes, 2**31
        seconds = on("b200").collective(gather(range(gpus), whole, "all-reduce"))
        ring = 2 * whole * (gpus - 1) / gpus / (bus * 1e9)
        assert 0.8 < seconds / ring < 1.02


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    "kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]
)
def test_a_faster_link_or_less_to_send_never_takes_longer(gpu, kind):
    """For rings inside a domain and between domains."""
    nearest = PLANNED[gpu]
    faster = [replace(nearest, nic=x * nearest.nic) for x in (0.5, 1, 2, 8)]
    wider = [replace(nearest, nvlink=x * nearest.nvlink) for x in (0.5, 1, 2)]
    costs = [measured(g) for g in (*faster, *wider)]
    for gpus in (2, 6, 8, 64, 72, 576):
        times = [
            [each.collective(gather(range(gpus), 2**n, kind)) for n in range(8, 36)]
            for each in costs
        ]
        for times_by_size in times:
            assert times_by_size == sorted(times_by_size)
        for links in (times[: len(faster)], times[len(faster) :]):
            for by_link in zip(*links, strict=True):
                assert list(by_link) == sorted(by_link, reverse=True)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_higher_peak_or_a_faster_memory_never_makes_a_kernel_slower(gpu):
    known = PLANNED[gpu]
    peaks = {name: 2 * peak for name, peak in known.tflops.items()}
    faster = replace(known, tflops=peaks), replace(known, bandwidth=2 * known.bandwidth)
    works = [product(m, 4096, k, dtype) for m in (128, 4096, 2**17) for k in (64, 8192)
             for dtype in ("bf16", "f8e4m3fn", "f32")]  # fmt: skip
    works += [attention(1, 64, length, 128, 128) for length in (256, 8192)]
    works += [grouped(1024, dtype=dtype) for dtype in ("bf16", "f8e4m3fn")]
    for conditions in (BURSTS, EXPECTED):
        costs = [measured(g, conditions) for g in (known, *faster)]
        for kernel in [Kernel((work,), 10**8, "") for work in works] + [Kernel((), 10**9, "")]:
            seconds, *others = (sum(each.kernel(kernel).values()) for each in costs)
            assert all(other <= seconds for other in others)


@pytest.mark.parametrize("gpu", ["gb200", "gb300"])
def test_an_all_reduce_over_a_whole_rack_takes_its_measured_time(gpu):
    """737 GB/s for 1 GiB, and on 64 GPUs nearly as much. A small one takes the steps of a ring."""
    for gpus, most in ((72, 1e-4), (64, 0.02)):
        seconds = on(gpu).collective(gather(range(gpus), 2**30, "all-reduce"))
        assert 2 * 2**30 * (gpus - 1) / gpus / seconds == pytest.approx(737e9, rel=most)
    small = on(gpu).collective(gather(range(72), 2**20, "all-reduce"))
    assert small < on(gpu).collective(gather(range(72), 2**27, "all-reduce"))


def test_an_all_to_all_leaves_over_one_adapter():
    found = measured().collective(gather(range(16), 2**30, "all-to-all"))
    assert found == pytest.approx(2**30 / 2 / (0.97 * 50e9) + 22.4e-6)


def test_between_more_nodes_than_were_measured_the_line_goes_on():
    shares = [
        2**30 * (n - 1) / n / 400e9 / (measured().collective(gather(range(n), 2**30)) - latency)
        for n, latency in ((512, 0.0024135), (1024, 0.0048339), (2048, 0.0096747))
    ]
    assert shares == pytest.approx([0.729, 0.701, 0.673], abs=0.001)


def test_a_product_is_looked_up_transposed_where_only_that_was_measured():
    """57344 rows are beyond the table, as many columns are not."""
    costs = measured()
    assert costs.covers(product(57344, 8192, 8192))
    assert costs.work(product(57344, 8192, 8192)) == costs.work(product(8192, 57344, 8192))


def test_a_small_all_reduce_takes_a_tree():
    """On 2048 GPUs: twice 7 steps of 4 us and 8 of 14 us, not 2047 of a ring."""
    found = measured().collective(gather(range(2048), 2560, "all-reduce"))
    assert found == pytest.approx(8.4e-6 + 2 * (7 * 4e-6 + 8 * 14e-6), rel=1e-2)


def test_a_larger_all_to_all_inside_a_domain_takes_no_more_steps():
    domain = replace(H100, domain=64)
    time = tables.load("h100").values["collective", "all-to-all"][8, 2**26] * 1e-6
    found = measured(domain).collective(gather(range(64), 2**26, "all-to-all"))
    assert found == pytest.approx(time * (63 / 64) / (7 / 8))
