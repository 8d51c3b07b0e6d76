"""The GPUs that are known."""

import re
from pathlib import Path

import pytest

from jaxbench.base import hardware
from jaxbench.forecast import tables
from jaxbench.recipe import published, recipes

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.0),
        ("NVIDIA H200", "fp8", 1979.0),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 NVL", "fp8", 1670.5),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA GB200", "bf16", 2450.0),
        ("NVIDIA B300 SXM6 AC", "nvfp4", 13500.0),
        ("NVIDIA GB300", "mxfp8", 4900.0),
        ("NVIDIA H200", "mxfp8", None),
        ("x86_64", "bf16", None),
    ],
)
def test_peak(device, dtype, peak):
    assert hardware.peak_tflops(device, dtype) == peak


@pytest.mark.parametrize("device", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200"])
def test_another_card_is_not_the_published_one(device):
    run = recipes.resolve(recipes.load("llama31_8b_bf16"), 8)
    (reason,) = published.differences(run, device)
    assert reason == f"the hardware is {device}, the published one is H100"
    assert published.differences(run, "NVIDIA H100 80GB HBM3") == []


def test_a_gpu_stands_beside_its_own_row():
    """405B on 512 is published for both, the same work: 19.78 s and 9.508 s."""
    recipe = recipes.load("llama31_405b_bf16")
    for name, device, seconds in (
        ("h100", "NVIDIA H100 80GB HBM3", 19.78),
        ("gb200", "NVIDIA GB200", 9.508),
    ):
        gpu = hardware.PLANNED[name]
        run = recipes.resolve(recipe.on(gpu), 512)
        assert published.lookup(run, gpu).step_time_s == seconds
        assert published.differences(run, device) == []
    run = recipes.resolve(recipe.on(hardware.PLANNED["gb200"]), 128)  # on H100 62 layers
    (reason,) = published.differences(run, "NVIDIA H100 80GB HBM3")
    assert reason.endswith("the published one is GB200")


def test_every_planned_gpu_is_described():
    for name, gpu in hardware.PLANNED.items():
        assert hardware.identify(gpu.device).name.lower() == name
        assert {"bf16", "fp8"} <= gpu.tflops.keys()
        assert 0 < gpu.memory_limit < gpu.memory
        assert gpu.bandwidth > gpu.nvlink > gpu.nic > 0
        assert f'name: "{gpu.device}"' in gpu.description
        (memory,) = re.findall(r"device_memory_size: (\d+) ", gpu.description)
        # The limit of XLA's scheduler is that of a real GPU, whose allocator takes a share.
        assert 0.8 * int(memory) == pytest.approx(hardware.MEMORY_FRACTION * gpu.memory)
        assert "major: {} minor: {} ".format(*gpu.capability) in gpu.description
        assert gpu.domain % gpu.node == 0
        assert ("nvfp4" in gpu.tflops) == (gpu.capability >= (10, 0))


def test_compilers_know_the_cudnn_that_is_pinned():
    (pinned,) = re.findall(r"^nvidia-cudnn-cu13==(\d+)\.(\d+)", CONSTRAINTS.read_text(), re.M)
    version = ".".join(pinned)
    assert f'dnn_version: "{version}.0"' in hardware.H100.description
    assert "major: {} minor: {} patch: 0".format(*pinned) in hardware.H100.description


@pytest.mark.parametrize(
    ("name", "count", "spread"),
    [
        ("h100", 3, (1, 1, 3)),  # a part of a node
        ("h100", 24, (3, 1, 8)),
        ("h100", 12, None),
        ("gb200", 4, (1, 1, 4)),
        ("gb200", 72, (1, 18, 4)),  # one rack
        ("gb200", 96, (2, 12, 4)),
        ("gb200", 128, (2, 16, 4)),  # as published: 16 of a rack's 18 trays
        ("gb200", 512, (8, 16, 4)),
        ("gb200", 3072, (48, 16, 4)),
        ("gb200", 76, None),  # 19 nodes: 18 and 1
        ("gb200", 10, None),
        ("b300", 256, (32, 1, 8)),
        ("gb300", 256, (4, 16, 4)),
    ],
)
def test_domains_are_filled_evenly(name, count, spread):
    gpu = hardware.PLANNED[name]
    assert gpu.spread(count) == spread
    if spread:
        domains, nodes, devices = spread
        assert domains * nodes * devices == count
        assert nodes * devices <= gpu.domain
    else:
        below, above = gpu.nearest(count)
        assert below < count < above
        assert gpu.spread(below)
        assert gpu.spread(above)


PAGE = Path(__file__).parents[1] / "docs/reference/hardware.md"
HEADING = """# GPUs that plans know

`plan`, `compare` and `check` assume this about a GPU and its node.
The table comes from `jaxbench/base/hardware.py`, which has the sources, and from our measurements.
`pytest --write-golden` writes it.
`--system` [changes](commands.md#jaxbench-plan) most of it.

- Peaks are dense, in TFLOP/s. *Sustained* is what large matmuls reach under the power limit.
- A step may use the memory except for 8 %, which libraries need, and 2 GiB of reserve.
- NVLink, network and host are GB/s of one GPU in one direction.
- A *domain* is the GPUs that NVLink joins.

GB200 and B200 have half the network of GB300 and B300 here, as the published systems have.
For an equal network, give `compare` the option `--system gb200:nic=100`.

`train` also runs on A100, H100 PCIe, H100 NVL and H200 NVL, but `plan` cannot compile for them.

"""
HEADINGS = (
    "GPU", "bf16 peak", "bf16 sustained", "FP8 peak", "FP8 sustained", "NVFP4 peak", "memory GiB",
    "a step may use GiB", "memory GB/s", "NVLink", "network", "host", "W", "GPUs per host",
    "GPUs per domain",
)  # fmt: skip


def line(name: str, gpu: hardware.Gpu) -> str:
    """The line of a GPU in the table."""
    measured = tables.load(name).values
    bf16, fp8 = (min(measured["sustained", dtype].values()) for dtype in ("bf16", "fp8"))
    peaks = gpu.tflops["bf16"], bf16, gpu.tflops["fp8"], fp8
    cells = [
        f"`{name}`", *(f"{peak:.0f}" for peak in peaks), f"{gpu.tflops.get('nvfp4', 0):.0f}",
        f"{gpu.memory / 2**30:.1f}", f"{gpu.memory_limit / 2**30:.1f}", f"{gpu.bandwidth:.0f}",
        f"{gpu.nvlink:.0f}", f"{gpu.nic:.0f}", f"{gpu.host:.0f}", f"{gpu.power:.0f}",
        str(gpu.node), str(gpu.domain),
    ]  # fmt: skip
    return f"| {' | '.join('' if cell == '0' else cell for cell in cells)} |"


def test_the_page_of_gpus_is_current(request):
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    lines += [line(name, gpu) for name, gpu in hardware.PLANNED.items()]
    text = HEADING + "\n".join(lines) + "\n"
    if request.config.getoption("--write-golden"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "pytest --write-golden rewrites it"
