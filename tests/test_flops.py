"""Counts against the exact figures of first principles, and every published figure."""

from dataclasses import replace

import pytest

from jaxbench import flops, published, recipes
from jaxbench.models import MODELS

HELD = {path.stem.rsplit("_", 1)[0] for path in recipes.config_folder().glob("*.yaml")}
"""Models that have recipes."""


@pytest.mark.parametrize(
    ("model", "layers", "count"),
    [
        ("llama2_70b", 80, 68_976_648_192),
        ("llama31_8b", 32, 8_030_261_248),
        ("llama31_70b", 80, 70_553_706_496),
        ("llama31_405b", 126, 405_853_388_800),
        ("llama31_405b", 62, 201_840_345_088),
        ("llama31_405b", 30, 99_833_823_232),
        ("llama31_405b", 8, 29_704_339_456),
        ("nemotron4_340b", 96, 341_029_195_776),
        ("nemotronh_56b", 118, 56_324_350_464),
    ],
)
def test_parameters(model, layers, count):
    assert flops.parameters(replace(MODELS[model], layers=layers))["total"] == count


@pytest.mark.parametrize(
    ("model", "length", "projections", "scores", "mlp", "head", "causal"),
    [
        ("llama2_70b", 4096, 296868139499520, 131941395333120, 1385384650997760, 6442450944000,
         1754665939107840),
        ("llama31_8b", 8192, 65970697666560, 105553116266496, 277076930199552, 25821343383552,
         421645529382912),
        ("llama31_70b", 8192, 593736278999040, 527765581332480, 2770769301995520, 51642686767104,
         3680031058427904),
        ("llama31_405b", 8192, 3532730860044288, 1662461581197312, 16209000416673792,
         103285373534208, 20676247440850944),
    ],
)  # fmt: skip
def test_model_flops(model, length, projections, scores, mlp, head, causal):
    counts = flops.model_flops(MODELS[model], length, "full")
    assert counts == {
        "attention projections": projections,
        "attention scores": scores,
        "mlp": mlp,
        "head": head,
        "total": projections + scores + mlp + head,
    }
    assert flops.model_flops(MODELS[model], length, "causal")["total"] == causal


def test_model_flops_of_nemotron():
    counts = flops.model_flops(MODELS["nemotron4_340b"], 4096, "full")
    assert counts == {
        "attention projections": 1736678616072192,
        "attention scores": 356241767399424,
        "mlp": 6412351813189632,
        "head": 115964116992000,
        "total": 8621236313653248,
    }
    counts = flops.model_flops(MODELS["nemotronh_56b"], 8192, "full")
    assert counts == {
        "attention projections": 74217034874880,
        "attention scores": 65970697666560,
        "mlp": 1424967069597696,
        "head": 52776558133248,
        "mamba projections": 807110254264320 + 356241767399424,
        "mamba scan": 695784701952 + 5566277615616 + 2 * 11132555231232,
        "total": 2809810554716160,
    }
    causal = flops.model_flops(MODELS["nemotronh_56b"], 8192, "causal")["total"]
    assert causal == 2776825205882880


@pytest.mark.parametrize(
    ("model", "length", "count"),
    [
        ("nemotron4_340b", 4096, 10_090_733_604_175_872),
        ("nemotronh_56b", 8192, 2_816_072_617_033_728),
    ],
)
def test_flops_by_the_formula_of_the_source(model, length, count):
    assert published.source_flops(MODELS[model], length) == count


ROWS = [
    pytest.param(row, model, id=f"{model}_{row.dtype}-{row.gpus}")
    for row in published.rows()
    if (model := f"{row.workload.replace('.', '')}_{row.size}") in HELD
]


@pytest.mark.parametrize(("row", "model"), ROWS)
def test_published_figures_follow_from_their_step_time(row, model):
    cfg = replace(MODELS[model], layers=row.layers)
    tokens_per_s, mfu, days = published.reproduce(row, cfg)
    assert abs(tokens_per_s - row.tokens_per_s) < 1  # some rows are truncated to whole tokens
    assert abs(mfu - row.mfu_pct) < 0.00501
    if row.days_per_1t_tokens is not None:
        printed = 0.5 if row.workload == "nemotron4" else 0.00501  # whole days there
        assert abs(days - row.days_per_1t_tokens) < printed


@pytest.mark.parametrize(("row", "model"), ROWS)
def test_errata_are_needed(row, model):
    """A row whose code is dropped no longer reproduces: no code is listed that explains nothing."""
    cfg = replace(MODELS[model], layers=row.layers)
    for code in row.errata:
        fewer = replace(row, errata=tuple(set(row.errata) - {code}))
        if code == "FLOPS3":  # the rounded constant is used for all rows that the source rounds
            exact = published.source_flops(cfg, row.seq_len)
            mfu = published.reproduce(row, cfg)[1] * exact / 3.94e15
        else:
            mfu = published.reproduce(fewer, cfg)[1]
        assert abs(mfu - row.mfu_pct) > 0.00501


def test_all_rows_are_read():
    assert len(published.rows()) == 81
    assert {code for row in published.rows() for code in row.errata} == set(published.ERRATA)


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.0),
        ("NVIDIA H200", "fp8", 1979.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA GB200", "bf16", 2450.0),
        ("x86_64", "bf16", None),
    ],
)
def test_peak(device, dtype, peak):
    assert flops.peak_tflops(device, dtype) == peak
