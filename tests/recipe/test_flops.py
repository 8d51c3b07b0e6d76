"""Counts against the exact figures of first principles, and every published figure."""

import csv
from dataclasses import replace

import pytest

from jaxbench.base.errors import RecipeError
from jaxbench.recipe import flops, published, recipes
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.mixers import MambaConfig


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
        ("grok1_314b", 64, 316_454_737_920),
        ("grok1_314b", 32, 159_015_376_896),
        ("grok1_314b", 16, 80_295_696_384),
        ("grok1_314b", 8, 40_935_856_128),
        ("grok1_314b", 4, 21_255_936_000),
        ("grok1_314b", 2, 11_415_975_936),
        ("nemotron3_nano_30b_a3b", 52, 31_577_940_288),
        ("nemotron3_super_120b_a12b", 88, 123_611_033_088),
        ("qwen3_30b_a3b", 48, 30_532_122_624),
        ("qwen3_235b_a22b", 94, 235_093_634_560),
        ("deepseek_v3", 61, 682_636_487_424),
        ("kimi_k2", 61, 1_026_408_232_448),
        ("gpt_oss_120b", 36, 116_829_156_672),
        ("gpt3_5b", 24, 5_047_558_144),
        ("gpt3_175b", 96, 174_604_259_328),
    ],
)
def test_parameters(model, layers, count):
    assert flops.parameters(replace(MODELS[model], layers=layers))["total"] == count


@pytest.mark.parametrize(
    ("model", "length", "per_token"),
    [
        ("nemotron3_nano_30b_a3b", 8192, 22.278e9),
        ("nemotron3_super_120b_a12b", 4096, 83.720e9),
        ("nemotron3_super_120b_a12b", 8192, 84.727e9),
        ("qwen3_30b_a3b", 4096, 23.006e9),
        ("qwen3_235b_a22b", 4096, 148.035e9),
        ("deepseek_v3", 4096, 259.993e9),
        ("kimi_k2", 4096, 204.477e9),
        ("gpt_oss_120b", 4096, 32.630e9),
    ],
)
def test_model_flops_of_megatron_bridge(model, length, per_token):
    """By its formula (training/utils/flop_utils.py), which counts no router; its published TFLOP/s
    over its published tokens/s are these to four digits."""
    exact = published.source_flops(MODELS[model], length) / length
    assert exact == pytest.approx(per_token, rel=3e-5)


@pytest.mark.parametrize(
    ("model", "layers", "length", "experts", "router", "full", "causal", "source"),
    [
        ("grok1_314b", 64, 8192, 3799912185593856, 154618822656, 4432535098490880,
         4274205424091136, 4274050805268480),
        ("grok1_314b", 8, 8192, 474989023199232, 19327352832, 587957400502272, 568166191202304,
         568146863849472),
        ("grok1_314b", 2, 4096, 59373627899904, 2415919104, 85545279553536, 84308328972288,
         84305913053184),
    ],
)  # fmt: skip
def test_model_flops_of_experts(model, layers, length, experts, router, full, causal, source):
    cfg = replace(MODELS[model], layers=layers)
    counts = flops.model_flops(cfg, length, "full")
    assert (counts["experts"], counts["router"], counts["total"]) == (experts, router, full)
    assert flops.model_flops(cfg, length, "causal")["total"] == causal
    assert published.source_flops(cfg, length) == source


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


@pytest.mark.parametrize("length", [64, 128, 200])
def test_scores_within_a_window_are_counted_one_by_one(length):
    """For each pair of two layers, of which one has a window of 128."""
    cfg = MODELS["gpt_oss_120b"]
    per_score = 12 * 18 * cfg.attention.heads * cfg.attention.head_dim
    seen = sum(min(t + 1, 128) for t in range(length))
    square = length * min(length, 128)
    for convention, expected in (("full", square), ("causal", seen)):
        other = length * length if convention == "full" else length * length // 2
        if length <= 128 and convention == "causal":  # as without a window
            expected = other
        counts = flops.model_flops(cfg, length, convention)
        assert counts["attention scores"] == per_score * (expected + other)


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
        ("gpt3_5b", 2048, 66_898_410_602_496),
        ("gpt3_175b", 2048, 2_204_555_173_429_248),
    ],
)
def test_flops_by_the_formula_of_the_source(model, length, count):
    assert published.source_flops(MODELS[model], length) == count


ROWS = [pytest.param(row, row.model, id=f"{row.recipe}-{row.gpus}") for row in published.rows()]


STATED_FLOPS = {
    ("grok1", "314b", 64): 4.27e15,
    ("nemotron4", "340b", 96): 1.01e16,
    ("nemotronh", "56b", 118): 2.816e15,
    ("llama2", "70b", 80): 1.82e15,
    ("llama3.1", "8b", 32): 4.74e14,
    ("llama3.1", "70b", 80): 3.94e15,
    ("gpt3", "5b", 24): 6.69e13,
    ("gpt3", "175b", 96): 2.20e15,
}
"""Model FLOPs per sequence as the source rounds them, by workload, size and layers. For 405B and
the shortened Grok-1 it states none and the tables use the unrounded formula."""

FULL_COUNT = 8.62e15
"""Of Nemotron-4, as releases from 25.05 on count it."""


def reproduce(row, cfg):
    """(tokens/s, MFU in percent, days to 1T tokens) from the row's step time, by the source's rules
    and the row's errata."""
    exact_step_s = row.step_time_s
    if {"RND", "STEP", "RATE"} & set(row.errata):
        exact_step_s = row.seq_len * row.gbs / row.tokens_per_s
    tokens_per_s = row.seq_len * row.gbs / exact_step_s
    stated = STATED_FLOPS.get((row.workload, row.size, row.layers))
    per_sequence = stated or published.source_flops(cfg, row.seq_len)
    if "FULL" in row.errata:
        per_sequence = FULL_COUNT
    if "GQA16" in row.errata:
        extra_groups = 2 * cfg.embed * cfg.attention.kv_heads * cfg.attention.head_dim
        per_sequence += 6 * row.seq_len * cfg.layers * extra_groups
    if "CAUSAL" in row.errata:
        per_sequence = flops.model_flops(cfg, row.seq_len, "causal")["total"]
    if "OLD" in row.errata:
        experts = replace(cfg.experts, activation="relu2", biases=False)
        attention = replace(cfg.attention, window=None)
        cfg = replace(cfg, pattern="*E", attention=attention, experts=experts)
        per_sequence = published.source_flops(cfg, row.seq_len)
    if row.workload == "nemotron3" and "OVER" not in row.errata:
        for m in cfg.each(MambaConfig):
            missing = 2 * cfg.embed - m.heads * m.head_dim
            per_sequence -= 3 * row.seq_len * (6 * cfg.embed + 7 * m.state) * missing
    peak, step_s = row.gpu.tflops[row.dtype], exact_step_s
    if "PEAK" in row.errata:  # inferred from the steps as they are printed
        peak, step_s = 989.5, row.step_time_s
    mfu = row.gbs * per_sequence / step_s / row.gpus / (peak * 1e12)
    if "STEP" in row.errata:  # its days follow from the misprint
        exact_step_s = row.step_time_s
    days = flops.days_per_1t_tokens(row.seq_len * row.gbs / exact_step_s)
    if "HALF" in row.errata:
        tokens_per_s, days = tokens_per_s / 2, days * 2
    return tokens_per_s, 100 * mfu, days


def mfu_tolerance(row):
    """Half of the last digit that the source prints: one decimal for Grok-1's proxies, and for
    GB200, where it is also cut off. GPT-3 175B has two, cut off. Megatron-Bridge prints whole
    TFLOP/s, some of them cut off and some rounded up, of NVFP4 off by two; where its tokens/s are
    those of whole samples/s, half a sample."""
    if "WHOLE" in row.errata:
        return row.mfu_pct * row.seq_len / 2 / row.tokens_per_s
    if row.gpu_type == "gb200":
        return 0.1
    if row.size == "175b":
        return 0.01
    if row.source_file.startswith("Megatron-Bridge"):
        return (200 if row.dtype == "nvfp4" else 100) / row.gpu.tflops[row.dtype]
    return 0.0501 if row.workload == "grok1" and row.days_per_1t_tokens is None else 0.00501


def reproduces(row, cfg):
    """Whether tokens/s, MFU and days follow from the row's step time."""
    tokens_per_s, mfu, days = reproduce(row, cfg)
    whole = row.workload == "nemotron4"  # days there
    printed = 0.5 if whole else 0.0501 if row.size == "175b" else 0.00501
    if row.gpu_type == "gb200":  # cut off, some to one digit
        printed *= 2.2
    return (
        row.tokens_per_s is None  # a sample of a log: it prints the step time alone
        or (
            abs(tokens_per_s - row.tokens_per_s) < 1  # some rows are truncated to whole tokens
            and (row.mfu_pct is None or abs(mfu - row.mfu_pct) < mfu_tolerance(row))
            and (row.days_per_1t_tokens is None or abs(days - row.days_per_1t_tokens) < printed)
        )
    )


@pytest.mark.parametrize(("row", "model"), ROWS)
def test_published_figures_follow_from_their_step_time(row, model):
    assert reproduces(row, replace(MODELS[model], layers=row.layers))


@pytest.mark.parametrize(("row", "model"), ROWS)
def test_errata_are_needed(row, model):
    """A row whose code is dropped no longer reproduces: no code is listed that explains nothing."""
    cfg = replace(MODELS[model], layers=row.layers)
    for code in set(row.errata) - {"GA", "RATE"}:
        fewer = replace(row, errata=tuple(set(row.errata) - {code}))
        if code == "FLOPS3":  # the rounded constant is used for all rows that the source rounds
            exact = published.source_flops(cfg, row.seq_len)
            mfu = reproduce(row, cfg)[1] * exact / 3.94e15
            assert abs(mfu - row.mfu_pct) > mfu_tolerance(row)
        else:
            assert not reproduces(fewer, cfg)


def test_printed_accumulation_is_wrong_where_listed():
    with (recipes.config_folder() / "published.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["workload"] == "grok1"]
    assert len(lines) == 24
    for line in lines:
        sizes = ("gpus", "tp", "pp", "cp", "gbs", "mbs", "ga")
        gpus, tp, pp, cp, batch, microbatch, printed = (int(line[name]) for name in sizes)
        passes = batch // (microbatch * gpus // (tp * pp * cp))
        assert (passes != printed) == ("GA" in line["errata"])


def test_step_times_of_printed_rates():
    for row in published.rows():
        if "RATE" in row.errata:
            assert row.step_time_s == round(row.seq_len * row.gbs / row.tokens_per_s, 3)


def test_all_rows_are_read():
    assert len(published.rows()) == 169
    assert {code for row in published.rows() for code in row.errata} == set(published.ERRATA)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (",", ";", "line 2 has no workload; expected commas between the columns"),
        ("llama2,70b", "llama9,70b", "unknown work: llama9 70b bf16"),
        (",h100,", ",h99,", "unknown GPU: h99"),
    ],
)
def test_a_table_that_is_wrong_is_an_error(old, new, message, tmp_path, monkeypatch):
    text = (recipes.config_folder() / "published.csv").read_text()
    (tmp_path / "published.csv").write_text(text.replace(old, new))
    monkeypatch.setattr(recipes, "config_folder", lambda: tmp_path)
    with pytest.raises(RecipeError, match=message):
        published.rows.__wrapped__()
