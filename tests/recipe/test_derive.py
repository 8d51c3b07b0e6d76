"""Rows for GPU counts that a recipe has none for."""

import math
from dataclasses import replace

import pytest

from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import H100, PLANNED
from jaxbench.recipe import derived_rows, flops, published, recipes

RECIPES = {recipe.name: recipe for recipe in recipes.load_all()}
COUNTS = (1, 2, 3, 4, 6, 8, 12, 24, 96, 100, 3072)


def derived(name, gpus, gpu=H100, *texts):
    overrides = recipes.parse_overrides(list(texts))
    recipe = derived_rows.extend(RECIPES[name].on(gpu), gpus, gpu, overrides)
    return recipes.resolve(recipe, gpus, overrides=overrides)


@pytest.mark.parametrize("gpu", ["h100", "gb200"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_count_has_a_row_or_one_line(name, gpu):
    """Constructing a `Run` checks its mesh and batch; here its work and its room."""
    gpu = PLANNED[gpu]
    recipe, refused = RECIPES[name].on(gpu), {}
    for gpus in COUNTS:
        try:
            run = derived(name, gpus, gpu)
        except RecipeError as error:
            refused[gpus] = str(error)
            continue
        assert run.gpus == gpus == math.prod(run.mesh_shape)
        if gpus in recipe.rows:
            assert run.label in ("full", "proxy")
            continue
        assert run.label == "derived"
        assert gpu.spread(gpus)
        source = recipes.resolve(recipe, derived_rows.base(recipe, gpus))
        assert (run.model, run.precision) == (source.model, source.precision)
        assert run.batch.sequence_length == source.batch.sequence_length
        share, theirs = run.batch.global_batch / gpus, source.batch.global_batch / source.gpus
        one_pass = run.microbatch * run.batch_ranks * run.parallelism.pipeline / gpus
        assert abs(share - theirs) <= one_pass / 2 or share == one_pass
        state = (run.optimizer.state_bytes + 2) * flops.parameters(run.model)["total"]
        assert state / run.parallelism.ranks <= gpu.memory_limit
        assert published.lookup(run, gpu) is None
        (reason,) = published.differences(run, gpu.device)
        assert reason == f"its row is derived: the recipe has none for {gpus} GPUs"
    whole, state = "they do not fill nodes of ", "no mesh of them has room for the train state"
    for gpus, line in refused.items():
        assert "\n" not in line
        why = state if gpu.spread(gpus) else whole
        assert line.startswith(f"recipe {name} on {gpus} {gpu.name}s: {why}")
    assert not {1, 3072} & refused.keys()


@pytest.mark.parametrize(
    ("name", "gpus", "mesh", "batch"),
    [
        ("llama31_8b_bf16", 4, "fsdp 4", 64),  # below the smallest row: of half its GPUs
        ("llama31_8b_bf16", 96, "data 12 x fsdp 8", 1536),  # more replicas of the row of 64
        ("llama2_70b_fp8", 3072, "data 24 x fsdp 128", 6144),
        ("llama2_70b_fp8", 96, "data 3 x fsdp 32", 192),  # 96 does not divide the model
        ("grok1_314b_bf16", 96, "pipeline 2 x fsdp 6 x expert 8", 1536),  # 6144 = 3 x 2048
        ("nemotron4_340b_bf16", 96, "pipeline 4 x fsdp 3 x tensor 8", 24),
    ],
)
def test_the_mesh_is_the_closest(name, gpus, mesh, batch):
    run = derived(name, gpus)
    assert (run.mesh_text(), run.batch.global_batch) == (mesh, batch)


def test_a_row_that_is_there_is_taken():
    recipe = RECIPES["llama2_70b_bf16"]
    assert derived_rows.extend(recipe, 64, H100) is recipe
    assert derived_rows.extend(recipe, "smoke", None) is recipe


def test_settings_of_the_mesh_are_kept():
    """Of axes that `--set` sizes, the others fit themselves to them."""
    run = derived("llama2_70b_bf16", 96, H100, "parallelism.tensor=2", "parallelism.fsdp=16")
    assert run.mesh_text() == "data 3 x fsdp 16 x tensor 2"
    run = derived("llama31_8b_bf16", 12, PLANNED["gb200"], "parallelism.pipeline=2")
    assert (run.parallelism.pipeline, run.parallelism.virtual_stages) == (2, 1)


@pytest.mark.parametrize(
    ("name", "gpus", "texts", "message"),
    [
        ("llama31_8b_bf16", 100, (), "they do not fill nodes of 8; the nearest counts that work: "
         "96 and 104; its rows are 8, 16, 32, 64, 128, 1, smoke"),
        ("llama2_70b_bf16", 8, (), "no mesh of them has room for the train state; "
         "the nearest counts that work: 16; its rows are 64"),
        ("llama2_70b_bf16", 24, (), "the nearest counts that work: 16 and 32"),
        ("nemotron4_340b_fp8", 4, (), "the nearest counts that work: 48;"),
        ("llama31_8b_bf16", 4, ("parallelism.fsdp=3",), "no mesh of them with fsdp=3 has room"),
        ("llama31_8b_bf16", 0, (), "--gpus 0: expected a whole number from 1 to 1048576"),
        ("llama31_8b_bf16", -8, (), "--gpus -8: expected a whole number"),
        ("llama31_8b_bf16", 2**20 + 8, (), "expected a whole number from 1 to 1048576"),
    ],
)  # fmt: skip
def test_a_count_that_cannot_work_names_those_that_do(name, gpus, texts, message):
    with pytest.raises(RecipeError) as error:
        derived(name, gpus, H100, *texts)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "gpus", "texts"),
    [
        ("llama2_70b_bf16", 8, ("model.layers=20",)),
        ("nemotron4_340b_bf16", 16, ("model.layers=8", "parallelism.pipeline=4",
                                     "parallelism.virtual_stages=2", "parallelism.tensor=4")),
    ],
)  # fmt: skip
def test_a_smaller_model_needs_fewer_gpus(name, gpus, texts):
    with pytest.raises(RecipeError, match="has room for the train state"):
        derived(name, gpus, H100, *(text for text in texts if "layers" not in text))
    assert derived(name, gpus, H100, *texts).gpus == gpus


def test_one_gpu_is_said_in_the_singular():
    recipe = RECIPES["llama2_70b_bf16"]
    recipe = replace(recipe, rows={64: recipe.rows[64]})
    with pytest.raises(RecipeError, match="on 1 H100: no mesh of it has room for "):
        derived_rows.extend(recipe, 1, H100)


def test_the_gpus_of_a_job_may_lie_in_any_nodes():
    """12 in nodes of 4, which this job has whatever DGX nodes have."""
    recipe = derived_rows.extend(RECIPES["llama31_8b_bf16"], 12, H100, whole_nodes=False)
    assert recipes.resolve(recipe, 12).mesh_text() == "data 3 x fsdp 4"
    recipe = derived_rows.extend(RECIPES["llama31_8b_bf16"], 12, None, whole_nodes=False)
    assert recipes.resolve(recipe, 12).label == "derived"


def test_a_recipe_of_one_gpu_alone():
    recipe = recipes.Recipe("mine", "llama31_8b", RECIPES["llama31_8b_bf16"].shared, {
        1: {"layers": 2, "global_batch": 1},
    })  # fmt: skip
    assert recipes.resolve(derived_rows.extend(recipe, 4, H100), 4).batch.global_batch == 4
    nothing = recipes.Recipe("mine", "llama31_8b", recipe.shared, {"smoke": {}})
    with pytest.raises(RecipeError, match="its rows are smoke"):
        derived_rows.extend(nothing, 4, H100)
