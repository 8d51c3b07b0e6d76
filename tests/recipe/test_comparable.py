"""Which runs are compared with a published measurement: the work and its numerics must be equal."""

import pytest

from jaxbench.base import hardware
from jaxbench.recipe import published, recipes

H100, GB200 = hardware.PLANNED["h100"], hardware.PLANNED["gb200"]


def reasons(config, row, *texts, gpu=H100):
    overrides = recipes.parse_overrides(list(texts))
    run = recipes.resolve(recipes.load(config).on(gpu), row, overrides=overrides)
    return published.differences(run, gpu.device)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("precision.last_bf16_layers=1", "is 1, the row has 0"),
        ("precision.accumulate=fp32", "is fp32, the row has bf16"),
        ("precision.scaling=current", "is current, the row has delayed"),
        ("precision.amax_history=1", "is 1, the row has 1024"),
        ("optimizer.learning_rate=0", "is 0.0, the row has 0.0003"),
        ("optimizer.schedule=cosine", "is cosine, the row has megatron"),
        ("optimizer.weight_decay=0.033", "is 0.033, the row has 0.1"),
        ("optimizer.decay_vectors=true", "is True, the row has False"),
        ("batch.global_batch=256", "is 256, the row has 128"),
        ("batch.sequence_length=4096", "is 4096, the row has 8192"),
        ("model.layers=4", "is 4, the row has 32"),
        ("model.mlp.ffn=1024", "is 1024, the row has 14336"),
        ("model.init_std=0.02", "is 0.02, the row has 0.01"),
    ],
)
def test_a_change_of_the_work_or_its_numerics_is_named(setting, value):
    assert reasons("llama31_8b_fp8", 8, setting) == [f"{setting.partition('=')[0]} {value}"]


def test_what_is_removed_is_named():
    (removed,) = reasons("llama31_405b_bf16", 1024, "model.attention.rope.scaling=null")
    assert removed.startswith("model.attention.rope.scaling is None, the row has {'factor': 8.0")
    (removed,) = reasons("llama31_8b_fp8", 8, "model.attention.rope=null")
    assert removed.startswith("model.attention.rope is None, the row has {'base': 500000.0")


@pytest.mark.parametrize(
    "settings",
    [
        ("parallelism.fsdp=4", "parallelism.tensor=2"),
        ("parallelism.pipeline=2", "parallelism.fsdp=4", "batch.microbatch=2"),
        ("execution.remat=full", "execution.attention=xla", "execution.ssd=xla"),
        ("execution.xla_flags=default",),
        ("precision.implementation=xla", "precision.gather=bf16"),
        ("precision.scaling=delayed", "optimizer.learning_rate=3e-4"),
    ],
)
def test_what_leaves_the_result_as_it_is_is_free(settings):
    assert reasons("llama31_8b_fp8", 8, *settings) == []


def test_slots_of_dropless_experts_are_free_and_those_of_a_capacity_are_not():
    """A run that drops tokens has a verdict of its own."""
    settings = "model.experts.slots=shared", "model.experts.rank_capacity_factor=1.5"
    overrides = recipes.parse_overrides([*settings])
    recipe = recipes.load("qwen3_30b_a3b_bf16")
    whole, changed = (recipes.resolve(recipe, 16, overrides=o) for o in ((), overrides))
    assert whole.model.experts.slots == "own"
    assert reasons("qwen3_30b_a3b_bf16", 16, *settings) == []
    assert changed.label == "full"
    assert published.lookup(changed, H100) == published.lookup(whole, H100) is not None
    (reason,) = reasons("grok1_314b_bf16", 512, "model.experts.capacity_factor=2")
    assert reason.startswith("model.experts.capacity_factor is 2.0")


def test_tokens_with_a_structure_are_other_work():
    (reason,) = reasons("llama31_8b_fp8", 8, "batch.tokens=zipf")
    assert reason == "batch.tokens is zipf, the row has uniform"


def test_every_change_is_named():
    assert reasons(
        "grok1_314b_bf16", 512, "model.experts.routing=random", "optimizer.eps=1e-6"
    ) == [
        "model.experts.routing is random, the row has learned",
        "optimizer.eps is 1e-06, the row has 1e-08",
    ]


def test_a_row_is_compared_with_its_own_settings():
    """Rows of GB200 are its own, and those of Nemotron-4 keep moments in another dtype."""
    assert reasons("nemotron4_340b_fp8", 128) == []
    (reason,) = reasons("nemotron4_340b_fp8", 128, "optimizer.moments=fp32")
    assert reason == "optimizer.moments is fp32, the row has bf16"
    (reason,) = reasons("nemotron4_340b_fp8", 128, "optimizer.moments=bf16", gpu=GB200)
    assert reason == "optimizer.moments is bf16, the row has fp32"
    assert reasons("llama31_405b_bf16", 128, gpu=GB200) == []
    (reason,) = reasons("llama31_405b_bf16", 128, "model.layers=62", gpu=GB200)
    assert reason == "model.layers is 62, the row has 126"


def test_a_row_that_limits_its_experts_is_whole_and_another_limit_is_not():
    """Super has a capacity on H100 alone."""
    assert reasons("nemotron3_super_120b_a12b_bf16", 64) == []
    assert reasons("nemotron3_super_120b_a12b_bf16", 64, gpu=GB200) == []
    less = recipes.parse_overrides(["model.experts.capacity_factor=0.25"])
    for name, gpus in (("nemotron3_super_120b_a12b_bf16", 64), ("grok1_314b_bf16", 512)):
        whole, changed = (
            recipes.resolve(recipes.load(name), gpus, overrides=texts) for texts in ((), less)
        )
        assert (whole.label, changed.label) == ("full", "proxy")
        assert published.lookup(whole) is not None
        assert published.lookup(changed) is None


def test_a_recipe_file_of_a_user_is_compared_with_the_published_row(tmp_path):
    path = tmp_path / "mine.yaml"
    text = recipes.find("llama31_8b_fp8").read_text()
    path.write_text(text.replace("{dtype: fp8,", "{dtype: fp8, scaling: current,"))
    assert reasons(path, 8) == ["precision.scaling is current, the row has delayed"]


def test_the_other_precision_is_compared_with_its_own_row():
    assert reasons("llama31_8b_fp8", 8, "precision.dtype=bf16") == []
    assert reasons("nemotronh_56b_bf16", 64) == ["nothing is published for this work on 64 GPUs"]
