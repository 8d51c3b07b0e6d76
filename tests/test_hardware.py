"""The GPUs that are known."""

import pytest

from jaxbench import hardware
from jaxbench.recipe import published, recipes


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


def test_every_planned_gpu_is_described():
    for name, gpu in hardware.PLANNED.items():
        assert hardware.identify(gpu.device).name.lower() == name
        assert {"bf16", "fp8"} <= gpu.tflops.keys()
        assert 0 < gpu.memory_limit < gpu.memory
        assert gpu.bandwidth > gpu.nvlink > gpu.nic > 0
        assert f'name: "{gpu.device}"' in gpu.description
        assert f"device_memory_size: {gpu.memory} " in gpu.description
