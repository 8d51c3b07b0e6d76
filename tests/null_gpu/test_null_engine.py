"""Transformer Engine's products on null GPUs, where it is installed."""

import null_gpus
import pytest
from engine import needs_te

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(null_gpus.missing() is not None, reason=str(null_gpus.missing())),
    *needs_te,
]


@pytest.mark.nightly
@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_transformer_engine_trains(scaling, tmp_path):
    """Its kernels are launched, and of the functions of cuBLAS and of the runtime only those that
    register kernels are stubs."""
    (counts := tmp_path / "counts").mkdir()
    settings = ("precision.implementation=te", f"precision.scaling={scaling}")
    command = null_gpus.start(
        *null_gpus.tiny("llama31_8b_fp8", *settings, "parallelism.tensor=2", gpus=4, steps=3),
        folder=tmp_path / "run", **null_gpus.environment(4, counts=counts),
    ).wait()  # fmt: skip
    assert command.status == 0, command.text
    assert (command.record["status"], len(command.steps)) == ("completed", 3)
    assert command.record["kernels"]["products"] == "fp8 by te"
    (counted,) = (text for path in counts.iterdir() if "kernels of" in (text := path.read_text()))
    called = {line.partition(" ")[2] for line in counted.splitlines()}
    assert {"cublasLtMatmul", "launches of the runtime"} <= called
    assert not [name for name in called if name.startswith(("stub cublas", "stub nvrtc"))]
    assert not [name for name in called if name.startswith("stub cuda")]
