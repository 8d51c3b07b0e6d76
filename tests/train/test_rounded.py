"""Meshes, pipelines and microbatches in the dtypes of the rows, bf16 and FP8, next to one pass on
one device."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from cases import tiered
from steps import MESHES, projection, same_sequences
from tiny import tiny_run

LLAMA, QWEN, DEEPSEEK = "llama31_8b_bf16", "qwen3_30b_a3b_bf16", "deepseek_v3_bf16"
GPT_OSS, SUPER = "gpt_oss_120b_bf16", "nemotron3_super_120b_a12b_bf16"
LAYERS = {GPT_OSS: ("model.layers=2",), SUPER: ("model.layers=2", "model.pattern=ME")}
"""Fewer layers than those of `tiny`: one of each kind, with those of multi-token prediction."""

PIPELINED = "pipeline 2 x tensor 2 x data 2"
REPLICAS = "tensor 4 x data 2, summed in layers"
EXPERTS, LAST_STAGE = "fsdp 2 x expert 4", "pipeline 2 x expert 4"
ROUNDED = {
    "one device": (),
    PIPELINED: ("parallelism.pipeline=2", "parallelism.tensor=2"),
    **{name: MESHES[name] for name in ("tensor 4 x data 2", "context 4 x data 2")},
    EXPERTS: ("parallelism.fsdp=2", "parallelism.expert=4"),
    LAST_STAGE: ("parallelism.pipeline=2", "parallelism.expert=4"),
    "fsdp 8": MESHES["fsdp 8"],
    REPLICAS: (*MESHES["tensor 4 x data 2"], "execution.replica_sums=layer"),
}
BIAS = {"bf16": 1.2e-3, "fp8": 2e-2}
"""Tolerance of the length of gradients: twice the effect of roundings here, of which a model of 64
columns averages few; 1/3 rounded to bf16 has one of 2e-3."""
MOVED = {"bf16": 1e-2, "fp8": 5e-2}
"""Tolerance of the loads of experts, over their sum, which a token that rounding sends to another
expert changes by two: twice what was seen in FP8, 0.023."""

CASES = [(LLAMA, mesh, dtype, 6) for mesh, dtype in product(list(ROUNDED)[:4], BIAS)]
# A program in FP8 has products in bf16 too: routers, heads.
CASES += [(family, EXPERTS, "fp8", 3) for family in (QWEN, GPT_OSS, SUPER, DEEPSEEK)]
CASES += [(QWEN, "fsdp 8", dtype, 3) for dtype in BIAS]
CASES += [(LLAMA, REPLICAS, dtype, 6) for dtype in BIAS]
# Multi-token prediction, behind the stages; in FP8, with tensor ranks too, in `test_pipeline`.
CASES += [(DEEPSEEK, LAST_STAGE, "bf16", 6)]
SLOW = [(LLAMA, "tensor 4 x data 2", "fp8", 6), (QWEN, EXPERTS, "fp8", 3)]


@cache
def rounded_step(family, mesh, dtype, passes):
    """(loss, gradients, loads of experts where the router has a bias) of some sequences in a number
    of passes, rounded wherever the program says so: by default XLA:CPU keeps more digits."""
    ranks = {"one device": 1, EXPERTS: 8, "fsdp 8": 8, LAST_STAGE: 4}.get(mesh, 2)
    sequences = 12 if family == LLAMA else 24
    run = tiny_run(
        *LAYERS.get(family, ()), *ROUNDED[mesh], f"precision.dtype={dtype}",
        "precision.accumulate=fp32", "execution.remat=attention",
        f"batch.global_batch={sequences}", f"batch.microbatch={sequences // ranks // passes}",
        devices=1 if mesh == "one device" else 8, family=family,
    )  # fmt: skip
    assert run.accumulation == passes
    loss, grads = same_sequences(run, xla_allow_excess_precision=False)
    loads = {name: g for name, g in grads.items() if name.endswith(".mixer.bias.value")}
    assert bool(loads) == (run.model.bias_rate is not None)
    return loss, {name: g for name, g in grads.items() if name not in loads}, loads


@pytest.mark.parametrize(
    "case", tiered([], CASES, slow=SLOW), ids=lambda case: "-".join(map(str, case))
)
def test_meshes_and_passes_change_rounded_gradients_by_noise_alone(case):
    family, mesh, dtype, passes = case
    _, exact, _ = rounded_step(family, "one device", "fp32", 1)
    loss, grads, loads = rounded_step(family, mesh, dtype, passes)
    expected_loss, expected, expected_loads = rounded_step(family, "one device", dtype, 1)
    assert loss == pytest.approx(expected_loss, abs=BIAS[dtype])
    length, expected_length = projection(grads, exact), projection(expected, exact)
    assert length == pytest.approx(expected_length, abs=BIAS[dtype])
    for name, load in expected_loads.items():
        # No token is lost or counted twice.
        assert loads[name].sum() == pytest.approx(load.sum(), rel=1e-6)
        assert np.abs(loads[name] - load).sum() <= MOVED[dtype] * load.sum()
