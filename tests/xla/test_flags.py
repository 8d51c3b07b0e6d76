"""Named flag sets, and flags that the installed compiler does not know."""

import pytest

from jaxbench.errors import RecipeError
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run
from jaxbench.xla import flags


def smoke_run(recipe: str, chosen: str = "tuned") -> Run:
    loaded = recipes.load(recipe)
    overrides = recipes.parse_overrides([f"execution.xla_flags={chosen}"])
    return recipes.resolve(loaded, "smoke", devices=1, overrides=overrides)


@pytest.mark.parametrize(("release", "old"), [((0, 10), True), ((0, 11), False), ((0, 12), False)])
def test_pipelining_has_the_names_of_the_installed_jax(monkeypatch, release, old):
    monkeypatch.setattr(flags, "_release", lambda: release)
    published = flags.options(smoke_run("llama31_8b_bf16", "published"), "gpu")
    tuned = flags.options(smoke_run("llama2_70b_bf16"), "gpu")
    hybrid = flags.options(smoke_run("nemotronh_56b_bf16"), "gpu")
    for before, after in flags.RENAMED.items():
        assert (before in published, after in published) == (old, not old)
    assert ("xla_gpu_pipeline_all_gather" in tuned) is not old
    assert "xla_gpu_pipeline_all_gather" not in hybrid


def test_layers_that_stand_one_after_another_are_not_pipelined(monkeypatch):
    monkeypatch.setattr(flags, "_release", lambda: (0, 11))
    run = smoke_run("llama31_8b_bf16")
    assert run.unrolled
    assert flags.options(run, "gpu") == flags.TUNED | flags.UNROLLED


def test_a_set_can_be_changed():
    run = smoke_run("llama31_8b_bf16", "default,xla_gpu_a=false,xla_gpu_b=4,xla_gpu_c=x")
    assert flags.options(run, "gpu") == {"xla_gpu_a": False, "xla_gpu_b": 4, "xla_gpu_c": "x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [("best", "'best' is none of tuned"), ("tuned,gpu_a=1", "cannot read 'gpu_a=1'")],
)
def test_an_unknown_set_or_change_is_an_error(text, message):
    with pytest.raises(RecipeError, match=message):
        flags.options(smoke_run("llama31_8b_bf16", text), "cpu")


def test_a_cpu_takes_the_defaults():
    assert flags.options(smoke_run("llama31_8b_bf16"), "cpu") == {}


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--xla_gpu_graph_level=0", "xla_gpu_graph_level was removed from XLA; use xla_gpu_enable"),
        ("--xla_gpu_no_such=1", "the installed compiler does not know xla_gpu_no_such"),
    ],
)
def test_an_unknown_flag_in_the_environment_is_found_before_it_aborts(monkeypatch, flag, message):
    monkeypatch.setenv("XLA_FLAGS", flag)
    with pytest.raises(RecipeError, match=message):
        flags.check_environment(flag)


def test_a_known_flag_in_the_environment_is_kept(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=true")
    flags.check_environment("--xla_gpu_enable_latency_hiding_scheduler=true")
