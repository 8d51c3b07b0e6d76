"""Named flag sets, and flags that the installed compiler does not know."""

import jax
import pytest

from jaxbench.base.errors import RecipeError
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run
from jaxbench.xla import flags


def smoke_run(recipe: str, chosen: str = "tuned") -> Run:
    loaded = recipes.load(recipe)
    overrides = recipes.parse_overrides([f"execution.xla_flags={chosen}"])
    return recipes.resolve(loaded, "smoke", devices=1, overrides=overrides)


@pytest.mark.parametrize(("release", "old"), [((0, 10), True), ((0, 11), False), ((0, 12), False)])
def test_pipelining_is_as_the_installed_jax_has_it(monkeypatch, release, old):
    monkeypatch.setattr(flags, "jax_release", lambda: release)
    tuned = flags.options(smoke_run("llama2_70b_bf16"), "gpu")
    hybrid = flags.options(smoke_run("nemotronh_56b_bf16"), "gpu")
    assert ("xla_gpu_pipeline_all_gather" in tuned) is not old
    assert "xla_gpu_pipeline_all_gather" not in hybrid


@pytest.mark.parametrize(
    ("chosen", "axes", "combined"),
    [
        ("guided", "fsdp=4", True),
        ("guided", "fsdp=2", True),
        ("guided", "fsdp=1", False),
        ("guided", "tensor=2", False),
        ("tuned", "fsdp=4", False),
    ],
)
def test_a_guided_layer_combines_its_collectives_if_fsdp_is_the_only_axis(
    monkeypatch, chosen, axes, combined
):
    monkeypatch.setattr(flags, "jax_release", lambda: (0, 11))
    changes = [f"parallelism.{axes}", "batch.global_batch=8", f"execution.xla_flags={chosen}"]
    overrides = recipes.parse_overrides(changes)
    run = recipes.resolve(recipes.load("llama2_70b_bf16"), "smoke", devices=4, overrides=overrides)
    options = flags.options(run, "gpu")
    gathers = "xla_gpu_all_gather_combine_threshold_bytes"
    assert options.get(gathers) == (flags.GATHERED * run.parallelism.fsdp if combined else None)
    scatters = options["xla_gpu_reduce_scatter_combine_threshold_bytes"]
    assert scatters == (flags.SCATTERED if combined else 1)


def test_layers_that_stand_one_after_another_are_not_pipelined(monkeypatch):
    monkeypatch.setattr(flags, "jax_release", lambda: (0, 11))
    run = smoke_run("llama31_8b_bf16")
    assert run.unrolled
    assert flags.options(run, "gpu") == flags.TUNED | flags.UNROLLED


@pytest.mark.parametrize(
    ("variable", "chosen", "release", "concurrent"),
    [
        ("", "tuned", (0, 11), "none"),
        ("", f"tuned,{flags.MULTI_STREAMING}=true", (0, 11), "none"),
        (f"--{flags.SPLITTING}=false", "tuned", (0, 11), "synchronous"),
        (f"--{flags.SPLITTING}=false", "tuned", (0, 10), "none"),
        (f"--{flags.SPLITTING}=false", f"tuned,{flags.MULTI_STREAMING}=true", (0, 11), "all"),
        (f"--{flags.SPLITTING}=0 --{flags.MULTI_STREAMING}", "tuned", (0, 11), "all"),
        (f"--{flags.SPLITTING}", "tuned", (0, 11), "none"),
    ],
)
def test_collectives_run_at_once_only_if_communicators_are_not_split(
    monkeypatch, variable, chosen, release, concurrent
):
    monkeypatch.setenv("XLA_FLAGS", variable)
    monkeypatch.setattr(flags, "jax_release", lambda: release)
    assert flags.concurrent(smoke_run("llama31_8b_bf16", chosen)) == concurrent


def test_the_split_of_communicators_is_no_option_of_a_program():
    with pytest.raises(RecipeError, match=f"only from .*; set XLA_FLAGS=--{flags.SPLITTING}=false"):
        flags.options(smoke_run("llama31_8b_bf16", f"tuned,{flags.SPLITTING}=false"), "gpu")


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


GEMM = "xla_gpu_enable_triton_gemm"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--xla_gpu_graph_level=0", "xla_gpu_graph_level was removed from XLA; use xla_gpu_enable"),
        ("--xla_gpu_no_such=1", "the installed compiler does not know xla_gpu_no_such"),
        (f"--{GEMM}-false", f"does not know {GEMM}-false; did you mean '{GEMM}'"),
        (f"--{GEMM}=maybe", f"{GEMM} cannot be 'maybe'"),
        (
            f"--xla_dump_hlo_as_text=true --{GEMM}=false,--xla_dump_to=x",
            f"{GEMM} cannot be 'false,",
        ),
        (
            "--xla_gpu_autotune_level=high --xla_gpu_nope=1",
            "xla_gpu_autotune_level cannot be 'high'; .* does not know xla_gpu_nope",
        ),
        ("--xla_gpu_pipeline_all_gather=NOPE", "xla_gpu_pipeline_all_gather cannot be 'NOPE'"),
    ],
)
def test_a_bad_flag_is_found_before_it_aborts_and_named_alone(text, message):
    with pytest.raises(RecipeError, match=f"^XLA_FLAGS: .*{message}") as error:
        flags.check(text)
    assert "\n" not in str(error.value)
    assert "dump_hlo_as_text" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"--{GEMM} false", f"'false' is not a flag; expected --{GEMM}=false, separated by spaces"),
        (f"--{GEMM} = false", "'=' is not a flag; expected --xla_name=value"),
        (f"--{GEMM}=false --xla_x='a", "--xla_x='a.? is not a flag"),
        (f'--{GEMM}=fa"l"se', "is not a flag"),
        (f"--{GEMM}=false -xla_dump_to=x", "'-xla_dump_to=x' is not a flag"),
        (f'"--{GEMM}=false"', "neither a file nor flags"),
        (f"{GEMM}=false", "neither a file nor flags"),
        (" ", "neither a file nor flags"),
    ],
)
def test_what_the_compiler_would_drop_or_take_for_a_file_is_named(text, message):
    with pytest.raises(RecipeError, match=message):
        flags.check(text)


def test_known_flags_are_kept_also_in_quotes_and_in_a_file(tmp_path):
    text = f"--{GEMM}=\"false\" --xla_dump_hlo_as_text --xla_disable_hlo_passes='a,b'"
    (tmp_path / "flags").write_text(text)
    flags.check(text)
    for value in (text, str(tmp_path / "flags")):
        found = {GEMM: "false", "xla_dump_hlo_as_text": "", "xla_disable_hlo_passes": "a,b"}
        assert flags.values_in(value) == found


def test_a_bad_change_of_the_set_is_named_on_every_platform():
    changes = f"tuned,{GEMM}=maybe,xla_gpu_nope=1"
    message = f"^execution.xla_flags: {GEMM} cannot be 'maybe'; .* know xla_gpu_nope"
    with pytest.raises(RecipeError, match=message):
        flags.check_changes(smoke_run("llama31_8b_bf16", changes))


def test_xla_flags_go_before_the_recipe_and_that_is_said(monkeypatch):
    monkeypatch.setattr(flags, "jax_release", lambda: (0, 11))
    monkeypatch.setenv(
        "XLA_FLAGS",
        f"--xla_gpu_enable_latency_hiding_scheduler=false --{GEMM}=0 --xla_dump_to=x "
        "--xla_gpu_memory_limit_slop_factor=140 --xla_gpu_pipeline_all_gather=off",
    )
    run = smoke_run("llama2_70b_bf16")
    options = flags.options(run, "gpu")
    changed = {
        "xla_gpu_enable_latency_hiding_scheduler": False,
        "xla_gpu_memory_limit_slop_factor": 140,
        "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_OFF",
    }
    assert options == flags.TUNED | flags.PIPELINED | changed
    lines = flags.overruled(run, "gpu")
    assert [line.split()[1] for line in lines] == [name for name in options if name in changed]
    assert "scheduler is False, not True as in the recipe's set" in lines[0]
    assert flags.overruled(run, "cpu") == []


def test_xla_flags_and_a_change_that_contradict_are_refused(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--{GEMM}=false")
    flags.options(smoke_run("llama31_8b_bf16", f"tuned,{GEMM}=false"), "gpu")
    with pytest.raises(RecipeError, match=f"XLA_FLAGS has {GEMM}=false, .*=True: keep one"):
        flags.options(smoke_run("llama31_8b_bf16", f"tuned,{GEMM}=true"), "gpu")


def test_copies_of_layers_without_collectives_are_not_in_graphs():
    """There they would hold up kernels; `test_streams` looks at both programs."""
    loaded = recipes.load("llama2_70b_bf16")
    for row, offload, graphs in ((1, "gate,up", False), (1, "none", True), (64, "gate,up", True)):
        overrides = recipes.parse_overrides([f"execution.offload={offload}"])
        run = recipes.resolve(loaded, row, devices=row, overrides=overrides)
        given = flags.options(run, "gpu")
        assert (flags.WITHOUT_GRAPHS.items() <= given.items()) is not graphs


def test_devices_wait_for_each_other_while_they_pin_memory_of_the_host():
    """Whatever the set; the compiler knows the options, by names that `XLA_FLAGS` does not have."""
    loaded = recipes.load("llama2_70b_bf16")
    for chosen in ("tuned", "default"):
        overrides = recipes.parse_overrides([f"execution.xla_flags={chosen}"])
        given = flags.options(recipes.resolve(loaded, 64, overrides=overrides), "gpu")
        assert flags.PINNING.items() <= given.items()
    assert not flags.PINNING.keys() & flags.options(smoke_run("llama31_8b_bf16"), "gpu").keys()
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=flags.PINNING)
    assert compiled(1.0) == 2
