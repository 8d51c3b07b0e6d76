"""`jaxbench compare`: its cells, what it marks, and its page."""

import json
from dataclasses import replace

import pytest
from compiled import needs_compiler
from made_plans import made, slower
from mistakes import assert_mistake
from parsed import Parsed, said_by

from jaxbench.base.hardware import H100, PLANNED
from jaxbench.forecast.goodput import Assumed, job_goodput
from jaxbench.plan import compare_gpus, search, systems
from jaxbench.recipe import flops, recipes

WORDS = ["--config", "llama31_8b_bf16", "--gpu", "h100,gb200", "--gpus", "8,12"]
STATE = 12 * 8_030_261_248
"""Bytes of weights and moments in fp32, for the parameters of Llama 3.1 8B."""


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """Returns a function that compares with made plans: a GB200 takes half as long as an H100, and
    12 of them cannot be compiled."""

    def plan_all(runs, target, config):
        step_s = 6 if target.name == "gb200" else 12
        plan = slower(made(gpus=8, gpu=target.gpu), step_s)
        failures = {run: "killed by signal 9" for run in runs if run.gpus != 8}
        return {run: plan for run in runs if run.gpus == 8}, failures

    monkeypatch.setattr(compare_gpus, "check_compiler", lambda: None)
    monkeypatch.setattr(compare_gpus, "plan_all", plan_all)

    def run(*words, form="json"):
        output = tmp_path / f"compared.{form}"
        words = [*WORDS, *words, "--format", form, "--output", str(output)]
        status = compare_gpus.main(words)
        text = output.read_text()
        return status, json.loads(text) if form == "json" else text

    return run


def figures(content):
    return [cell["figures"] for cell in content["cells"]]


def test_a_cell_is_what_one_calculates_by_hand(compared):
    status, content = compared("--price", "h100=2,gb200=5", "--tokens", "2e12", "--mtbf", "1e4")
    assert status == 0
    h100, uneven, gb200, failed = content["cells"]
    assert h100["state_bytes"] == pytest.approx(STATE, rel=1e-3)
    share = job_goodput(8, h100["state_bytes"], Assumed(mtbf_gpu_hours=1e4)).share
    assert h100["goodput"]["share"] == share
    h100, gb200 = ({**cell, **cell["figures"]} for cell in (h100, gb200))
    steps = 2e12 / (128 * 8192)
    days = steps * 12 / 86400 / share
    assert h100["days"] == pytest.approx(days)
    assert h100["days_high"] == pytest.approx(days * h100["high_s"] / 12)
    assert h100["cost"] == pytest.approx(2 * 8 * 24 * days)
    assert h100["mwh"] == pytest.approx(8 * 24 * days * 700 / 1e6)
    assert gb200["days"] == pytest.approx(days / 2)
    assert (h100["marks"], gb200["marks"]) == (["cheapest"], ["fastest"])
    assert "they do not fill nodes of 8" in uneven["why"]
    assert failed["why"] == "killed by signal 9"
    assert next(iter(content["goodput"])) == "--mtbf"
    assert max(map(int, content["goodput"]["--mtbf"])) == 100_000


@pytest.mark.slow
def test_what_is_not_known_is_left_out(compared, monkeypatch):
    unknown = {"gb200": replace(PLANNED["gb200"], power=0.0)}
    monkeypatch.setattr(systems, "PLANNED", PLANNED | unknown)
    _, content = compared("--price", "h100=2")
    h100, _, gb200, _ = figures(content)
    assert h100["mwh"]
    assert (gb200["mwh"], gb200["cost"]) == (None, None)
    assert content["cells"][0]["marks"] == []  # the other may be cheaper
    said = " ".join(content["notes"])
    assert "Energy of gb200: its power is not known." in said
    assert "No --price is given for gb200." in said
    # A setting of one GPU leaves the others as they are.
    _, content = compared("--system", "gb200:power=1000", "--system", "gb200:nic=100")
    same, _, changed, _ = figures(content)
    assert changed["mwh"] == pytest.approx(changed["gpu_hours"] / 1000)
    assert same["mwh"] == h100["mwh"]


def test_systems_are_told_apart_by_their_names(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("like: h100\nnic: 25\n")
    target = compare_gpus.with_system(systems.find(str(path)), ["mine:nic=12", "h100:nic=100"])
    assert target.gpu.nic == 12
    other = tmp_path / "h100.yaml"
    other.write_text("like: h100\n")
    words = [*WORDS, "--gpu", f"H100,{other}"]
    assert_mistake(compare_gpus.main, words, "another GPU is called h100; rename the file", capsys)


def test_an_interrupted_comparison_says_that_it_can_go_on(monkeypatch, capsys):
    def plan_all(runs, target, config):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_gpus, "check_compiler", lambda: None)
    monkeypatch.setattr(compare_gpus, "plan_all", plan_all)
    assert compare_gpus.main(WORDS) == 130
    assert "the same command continues from them" in capsys.readouterr().err


@pytest.mark.slow
def test_what_does_not_fit_is_no_winner(compared, monkeypatch):
    def plan_all(runs, target, config):
        plan = made(gpus=8, gpu=target.gpu)
        size = replace(plan.bytes_per_device, peak=2**38)
        too_big = replace(plan, fits=False, bytes_per_device=size)
        return {runs[0]: too_big}, dict.fromkeys(runs[1:], "no")

    monkeypatch.setattr(compare_gpus, "plan_all", plan_all)
    status, content = compared()
    assert status == 1
    assert not any(cell["marks"] for cell in content["cells"])
    assert content["cells"][0]["why"].startswith("does not fit: 185.2 GiB over the limit; --search")


@pytest.mark.slow
def test_the_table_says_why_a_cell_is_missing(compared, capsys):
    assert compare_gpus.main(WORDS) == 0
    said = capsys.readouterr().out
    assert "8 x gb200   bf16          6.00  " in said
    assert "\n12 x gb200: killed by signal 9\n" in said
    assert "one in 50,677 GPU-hours, Llama 3 405B on 16,384 H100s" in said


def test_a_comparison_is_a_page(compared):
    _, text = compared("--price", "h100=2,gb200=5", form="html")
    page = Parsed(text)
    said = said_by(text)
    assert "1 trillion tokens of Llama 3.1 8B take 66.4 days on 8 GB200s, the fastest; " in said
    assert "8 H100s are the cheapest with a cost of 51,000." in said
    assert page.all("td", colspan="9") == [{"role": "cell", "colspan": "9"}] * 2
    (curve,) = page.all("path", **{"class": "line ours"})
    assert curve["d"].count("L") == len(compare_gpus.CURVE) - 1
    assert "Llama 3: 99.7 on 8 GPUs" in said


def test_a_model_stands_for_its_recipes():
    configs, _ = compare_gpus.chosen(["llama31_70b"])
    assert {*configs} == {f"llama31_70b_{name}" for name in ("bf16", "fp8", "mxfp8", "nvfp4")}
    assert compare_gpus.narrowest(configs, H100) == "llama31_70b_fp8"
    assert compare_gpus.narrowest(configs, PLANNED["gb200"]) == "llama31_70b_nvfp4"
    two, _ = compare_gpus.chosen(["llama31_70b_bf16", "llama31_70b_fp8"])
    assert compare_gpus.narrowest(two, PLANNED["gb200"]) == "llama31_70b_fp8"


LLAMA32_3B = {
    "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "head_dim": 128,
    "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": True, "rope_theta": 500000.0,
}  # fmt: skip
"""From the public config.json of Llama 3.2 3B, which has 3,212,749,824 parameters."""


def test_a_config_of_hugging_face_is_a_changed_llama(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA32_3B))
    configs, changes = compare_gpus.chosen([str(path)])
    assert "llama31_8b_bf16" in configs
    run, _ = compare_gpus.whole_row("llama31_8b_bf16", 8, changes, H100)
    assert flops.parameters(run.model)["total"] == 3_212_749_824
    llama8b = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
               "num_hidden_layers": 32, "tie_word_embeddings": False, "head_dim": None}  # fmt: skip
    path.write_text(json.dumps(LLAMA32_3B | llama8b))
    assert compare_gpus.chosen([str(path)])[1] == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; expected 'llama'"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; expected a whole number above 0"),
        ({"mlp_bias": True}, "mlp_bias is True; our Llama has False"),
    ],
)
def test_a_config_of_another_model_is_refused(changed, message, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA32_3B | changed))
    assert_mistake(compare_gpus.main, ["--config", path, *WORDS[2:]], message, capsys)


def test_every_cell_trains_the_whole_model():
    assert recipes.resolve(recipes.load("llama31_405b_bf16"), 64).model.layers == 30
    run, _ = compare_gpus.whole_row("llama31_405b_bf16", 64, [], H100)
    assert run.model.layers == 126
    run, _ = compare_gpus.whole_row("llama31_405b_bf16", 64, ["model.layers=8"], H100)
    assert run.model.layers == 8


@pytest.mark.slow
def test_a_search_takes_the_best_candidate(compared, monkeypatch):
    """The candidate after the row is the fastest."""
    times = iter([3.0, 2.0])

    def plan_each(runs, target, config):
        for run in runs:
            yield run, slower(made(gpus=8), next(times, 4.0))

    monkeypatch.setattr(search, "plan_each", plan_each)
    monkeypatch.setattr(search, "check_compiler", lambda: None)
    _, content = compared("--gpu", "h100", "--gpus", "8", "--search", "--limit", "3")
    (cell,) = content["cells"]
    assert cell["figures"]["step_s"] == 2.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h10"], "--gpu: 'h10' is not one of h100, h200"),
        (["--gpus", "8,many"], "--gpus 8,many: expected numbers such as 64,256"),
        (["--gpus", ","], "--gpu and --gpus need at least one value each"),
        (["--price", "h100"], "--price h100: expected a GPU and a price above 0"),
        (["--price", "tpu=1"], "--price tpu=..: tpu is not in --gpu"),
        (["--tokens", "0"], "--tokens 0: expected a number above 0"),
        (["--mtbf", "nan"], "--mtbf nan: expected a number above 0"),
        (["--system", "gb200:nic=x"], "--system nic=x: expected one of nvlink=N"),
        (["--system", "tpu:nic=1"], "--system tpu:nic=1: tpu is not in --gpu"),
        (["--gpu", "H100", "--price", "H100=2", "--limit", "3"], "--limit needs --search"),
        (["--gpu", "H100", "--system", "H100:nic=x"], "--system nic=x: expected one of nvlink=N"),
        (["--limit", "3"], "--limit needs --search"),
        (["--output", "x"], "--output needs --format json or html"),
        (["--config", "llama31_9b"], "(jaxbench list shows all)"),
        (["--config", "no.json"], "a config.json excludes other models and recipes"),
        (["--config", "llama31_70b"], "these recipes train different models, llama31_8b and llama"),
    ],
)
def test_mistakes(words, message, capsys):
    assert_mistake(compare_gpus.main, [*WORDS, *words], message, capsys)


@needs_compiler
@pytest.mark.parametrize("dtype", ["fp16", "[bf16]"])
def test_a_mistyped_format_of_a_recipe_is_named(dtype, tmp_path, capsys):
    text = (recipes.config_folder() / "llama31_8b_bf16.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("{dtype: bf16,", f"{{dtype: {dtype},", 1))
    words = ["--config", path, "--gpu", "h100", "--gpus", "8"]
    assert_mistake(compare_gpus.main, words, "precision.dtype", capsys)
