"""Transformer Engine's products on null GPUs, where it is installed."""

import null_gpus
import pytest
from engine import needs_te

from jaxbench.ops.quantized import te
from jaxbench.recipe.settings import BLOCKS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(null_gpus.missing() is not None, reason=str(null_gpus.missing())),
    *needs_te,
]


TILES = (
    "model.embed=256", "model.attention={heads: 4, kv_heads: 4, head_dim: 64}",
    "batch.sequence_length=64",
)  # fmt: skip
"""Sizes that its kernels of NVFP4 take on two ranks of `tensor`."""


@pytest.mark.nightly
@pytest.mark.parametrize("scaling", te.SCALING)
def test_transformer_engine_trains(scaling, tmp_path):
    """Its kernels are launched, and of the functions of cuBLAS and of the runtime only those that
    register kernels are stubs."""
    (counts := tmp_path / "counts").mkdir()
    blocks = scaling in BLOCKS
    setting = f"precision.{'dtype' if blocks else 'scaling'}={scaling}"
    settings = ("precision.implementation=te", setting, "parallelism.tensor=2", *TILES)
    command = null_gpus.start(
        *null_gpus.tiny("llama31_8b_fp8", *settings, gpus=4, steps=3), folder=tmp_path / "run",
        **null_gpus.environment(4, model="gb200" if blocks else "h100", counts=counts),
    ).wait()  # fmt: skip
    assert command.status == 0, command.text
    assert (command.record["status"], len(command.steps)) == ("completed", 3)
    assert command.record["kernels"]["products"] == f"{scaling if blocks else 'fp8'} by te"
    (counted,) = (text for path in counts.iterdir() if "kernels of" in (text := path.read_text()))
    called = {line.partition(" ")[2] for line in counted.splitlines()}
    assert {"cublasLtMatmul", "launches of the runtime"} <= called
    assert not [name for name in called if name.startswith(("stub cublas", "stub nvrtc"))]
    assert not [name for name in called if name.startswith("stub cuda")]
