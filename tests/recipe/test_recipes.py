"""Recipes: what they resolve to, and how mistakes are answered."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import tiny_run

from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import PLANNED
from jaxbench.recipe import published, recipes
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.settings import SMOKE_STEPS, STEPS

GOLDEN = Path(__file__).parents[1] / "golden"
RECIPES = {recipe.name: recipe for recipe in recipes.load_all()}
EXAMPLE = RECIPES["llama2_70b_bf16"]


def text(recipe) -> str:
    """Every row of a recipe, resolved: a line for each section."""
    lines = []
    tables = [("", recipe.rows), *((f"{gpu} ", own) for gpu, own in recipe.gpu_rows.items())]
    for gpu, row in ((gpu, row) for gpu, rows in tables for row in rows):
        run = recipes.resolve(recipe.on(PLANNED.get(gpu.strip())), row)
        sections = recipes.describe(run)
        common = {k: v for k, v in sections.items() if not isinstance(v, dict)}
        lines.append(f"{gpu}{row}: mesh {run.mesh_text()}, {fields(common)}")
        nested = {k: v for k, v in sections.items() if isinstance(v, dict)}
        lines += [f"  {name}: {fields(values)}" for name, values in nested.items()]
    return "\n".join(lines) + "\n"


def fields(values: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


@pytest.mark.parametrize("name", RECIPES)
def test_resolved_recipe_is_the_golden_one(name, request):
    """`pytest --write-golden` rewrites the files; read the difference before committing it."""
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--write-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text(RECIPES[name]))
    assert text(RECIPES[name]) == path.read_text()


@pytest.mark.parametrize("name", RECIPES)
def test_every_published_row_has_a_recipe_row_with_its_work(name):
    rows = [row for row in published.rows() if row.recipe == name]
    # Measured in one dtype only.
    unmeasured = (
        "nemotronh_56b_bf16",
        "nemotron3_nano_30b_a3b_bf16",
        "gpt_oss_120b_fp8",
        "nemotron3_super_120b_a12b_fp8",
        "llama31_8b_nvfp4",
        "nemotronh_56b_mxfp8",
        "nemotronh_56b_nvfp4",
    )
    assert rows or name in unmeasured
    for row in rows:
        run = recipes.resolve(RECIPES[name].on(row.gpu), row.gpus)
        assert published.lookup(run, row.gpu) == row
        whole = MODELS[RECIPES[name].model].layers
        assert run.label == ("full" if row.layers == whole else "proxy")
    assert {1, "smoke"} <= RECIPES[name].rows.keys()
    smoke = recipes.resolve(RECIPES[name], "smoke")
    assert smoke.label == "smoke"
    assert (smoke.steps, recipes.resolve(RECIPES[name], 1).steps) == (SMOKE_STEPS, STEPS)
    assert published.lookup(smoke) is None


def test_every_model_has_a_recipe():
    assert {recipe.model for recipe in RECIPES.values()} == MODELS.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_opens_with_its_command_and_source(name):
    lines = (recipes.config_folder() / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == f"# python -m jaxbench.train --config configs/{name}.yaml"
    assert "published.csv" in "".join(lines[:6])


def override(*texts, row="smoke", devices=8):
    parsed = recipes.parse_overrides(list(texts))
    return recipes.resolve(EXAMPLE, row, devices=devices, overrides=parsed)


def test_overrides_are_typed_and_recorded():
    run = override(
        "parallelism.fsdp=4",
        "optimizer.eps=1e-6",
        "model.attention.rope.base=5",
        "execution.remat=full",
    )
    assert (run.parallelism.fsdp, run.optimizer.eps, run.model.attention.rope.base) == (
        4,
        1e-6,
        5.0,
    )
    assert run.data == 2
    assert run.overrides[0] == "parallelism.fsdp=4"
    assert recipes.describe(run)["parallelism"] == {
        "data": 2, "fsdp": 4, "expert": 1, "context": 1, "tensor": 1,
        "pipeline": 1, "virtual_stages": 1,
    }  # fmt: skip


def test_what_no_pipeline_can_hold():
    parsed = recipes.parse_overrides(["parallelism.pipeline=2", "execution.remat=full"])
    message = "nemotronh has Mamba-2 mixers, which no pipeline can hold"
    with pytest.raises(RecipeError, match=message):
        recipes.resolve(recipes.load("nemotronh_56b_bf16"), "smoke", devices=2, overrides=parsed)


def test_mamba_takes_whole_sequences():
    parsed = recipes.parse_overrides(["parallelism.context=2"])
    message = "parallelism.context = 2: nemotronh has Mamba-2 mixers, which take whole sequences"
    with pytest.raises(RecipeError, match=message):
        recipes.resolve(recipes.load("nemotronh_56b_bf16"), "smoke", devices=2, overrides=parsed)


def test_a_pipeline_without_a_microbatch_takes_one_for_each_rank():
    run = override("parallelism.pipeline=4", "parallelism.tensor=2")
    assert (run.microbatch, run.accumulation) == (2, 4)


def test_an_override_of_the_work_is_not_the_published_work():
    assert published.lookup(override(row=64))
    assert published.lookup(override("parallelism.fsdp=32", row=64))
    for change in ("model.layers=4", "batch.global_batch=256", "model.mlp.ffn=1024"):
        run = override(change, row=64)
        assert published.lookup(run) is None
        assert published.differences(run, "NVIDIA H100 80GB HBM3")
    assert override("model.layers=4", row=64).label == "proxy"
    assert published.differences(override(row=64), "NVIDIA H100 80GB HBM3") == []
    one = recipes.resolve(recipes.load("llama2_70b_bf16"), 1)
    reasons = published.differences(one, "NVIDIA H100 80GB HBM3")
    assert reasons == ["nothing is published for this work on 1 GPU"]
    assert "NVIDIA H200" in published.differences(override(row=64), "NVIDIA H200")[0]


EXPERTS = "model.pattern='*E'", "model.mlp=null", "model.experts={count: 8, top_k: 2, ffn: 64}"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["parallelism.fdsp=4"], "unknown key 'parallelism.fdsp'; did you mean 'parallelism.fsdp'"),
        (["fsdp=4"], "did you mean 'parallelism.fsdp'"),
        (["parallelism.fsdp"], "expected key=value"),
        (["parallelism.fsdp=four"], "parallelism.fsdp = 'four': expected int, got str"),
        (["parallelism.fsdp=true"], "expected int, got bool"),
        (["parallelism.fsdp=0"], "parallelism.fsdp = 0 must be above 0"),
        (["batch.microbatch=1.5"], "expected int, got float"),
        (["optimizer.eps=tiny"], "expected float, got str"),
        (["precision.dtype=fp4"], "expected one of bf16, fp8, mxfp8, nvfp4, fp32"),
        (["precision.last_bf16_layers=-1"], "precision.last_bf16_layers = -1 must not be negative"),
        (["precision.amax_history=0"], "precision.amax_history = 0 must be above 0"),
        (["precision.dtype={"], "cannot read the value"),
        (["execution.remat=queries"], "cannot read 'queries'; expected none, full, or some of"),
        (["execution.remat=query:x"], "cannot read 'query:x'"),
        (
            ["parallelism.fsdp=3"],
            "pipeline x fsdp x expert x context x tensor = 3 must divide the number of devices = 8",
        ),
        (
            ["parallelism.pipeline=2", "batch.microbatch=1", "execution.replica_sums=layer"],
            "execution.replica_sums = layer: a pipeline sums once per step",
        ),
        (
            ["parallelism.pipeline=2", "batch.microbatch=2"],
            "parallelism.pipeline = 2 must divide the number of microbatches = 1",
        ),
        (
            ["parallelism.pipeline=2", "parallelism.virtual_stages=3"],
            "parallelism.virtual_stages = 3: expected at most 2, the blocks of a rank, for "
            "4 repeated blocks (*-) over pipeline = 2",
        ),
        (
            ["parallelism.virtual_stages=2"],
            "parallelism.virtual_stages = 2 needs parallelism.pipeline",
        ),
        (
            ["parallelism.pipeline=2", "execution.remat=query,attention:2"],
            "execution.remat: the stages of a pipeline compute alike; no layer count for attention",
        ),
        (
            ["parallelism.pipeline=2", "precision.last_bf16_layers=1"],
            "last_bf16_layers = 1: the stages of a pipeline compute alike; expected 0",
        ),
        (
            ["parallelism.tensor=8"],
            "parallelism.tensor = 8 must divide model.attention.kv_heads = 4",
        ),
        (["model.vocabulary=2047", "parallelism.tensor=2"], "must divide model.vocabulary = 2047"),
        (["model.mlp.ffn=767", "parallelism.tensor=2"], "must divide model.mlp.ffn = 767"),
        (["model.embed=252", "parallelism.fsdp=8"], "must divide model.embed = 252"),
        (
            ["model.attention.heads=6"],
            "model.attention.kv_heads = 4 must divide model.attention.heads = 6",
        ),
        (
            ["model.attention.rope.scaling=5"],
            "model.attention.rope.scaling must be a mapping, not 5",
        ),
        (["model.attention.rope.scaling={factor: 2}"], "missing low, high, original_context"),
        (["batch.sequence_length=255", "parallelism.context=2"], "batch.sequence_length = 255"),
        (["parallelism.expert=2"], "parallelism.expert = 2 needs a model with experts"),
        (["batch.global_batch=12"], "ranks (data 8 x fsdp 1 x expert 1) = 8 must divide"),
        (["batch.microbatch=3"], "must divide batch.global_batch = 8"),
        (["model.layers=0x" + "f" * 5000], "model.layers is too large: at most 2147483647"),
        (["model.layers=1001"], "model.layers = 1001 must be at most 1000"),
        (["model.pattern=" + "M" * 2000], "expected 1 to 1000 letters"),
        (
            ["model.attention.rope.fraction=0.1"],
            "model.attention.rope.fraction = 0.1: 3 of the 32 features of a head would be "
            "rotated; expected an even number",
        ),
        (
            ["model.attention.rope.fraction=1.5"],
            "model.attention.rope.fraction = 1.5 must be at most 1",
        ),
        (["model.experts={count: 8, top_k: 2, ffn: 64}"], "model.experts needs E in model.pattern"),
        (
            ["model.attention.rope={base: 1, yarn: {factor: 2, original_context: 64}}"],
            "model.attention.rope.base = 1.0: expected more than 1 with yarn",
        ),
        (
            ["model.prediction={pattern: '*-', depth: 256}"],
            "model.prediction.depth = 256: expected fewer than the 256 tokens of a sequence",
        ),
        (
            ["model.prediction={pattern: '*-', depth: 2}", "precision.dtype=fp8"],
            "model.prediction.depth = 2 in FP8 needs precision.scaling = current",
        ),
        (["execution.expert_parts=2"], "execution.expert_parts needs experts"),
        (
            ["execution.expert_parts=2", "precision.dtype=fp8", *EXPERTS],
            "execution.expert_parts = 2 in FP8 needs precision.scaling = current",
        ),
        (
            ["execution.expert_parts=2", "batch.microbatch=1", *EXPERTS],
            "execution.expert_parts = 2 must divide the sequences of a microbatch = 1",
        ),
        (["model.mlp=null"], "model.pattern with - needs model.mlp"),
        (
            ["model.attention.rope=null", "model.attention.rope.fraction=1"],
            "model.attention.rope: missing base",
        ),
        (
            ["model.experts={count: 8, top_k: 4, ffn: 8, groups: 4, top_groups: 1}"],
            "model.experts.top_groups = 1 of groups = 4 must hold the top_k = 4 experts",
        ),
        (
            [
                "model.pattern='*E*-*-*-'",
                "parallelism.pipeline=2",
                "model.experts={count: 8, top_k: 2, ffn: 64}",
            ],
            "in front of the 3 repeated blocks (*-) no layer may have experts",
        ),
        (
            [
                "model.pattern='*E'",
                "model.mlp=null",
                "parallelism.fsdp=8",
                "model.experts={count: 8, top_k: 2, ffn: 64, latent: 100}",
            ],
            "fsdp x context x pipeline = 8 must divide model.experts.latent = 100",
        ),
        (["model.attention.head_dim=31"], "model.attention.head_dim = 31 must be even"),
        (["model.pattern='*-*'"], "without M two for each layer; it has 3"),
        (["model.mlp.biases=true"], "biases needs an activation without a gate; silu has one"),
        (
            ["model.learned_positions=128"],
            "batch.sequence_length = 256 must be at most model.learned_positions = 128",
        ),
        (["model.learned_positions=0"], "model.learned_positions = 0 must be above 0"),
        (["model.init_std=-1"], "model.init_std = -1.0 must be above 0"),
        (["optimizer.learning_rate=.nan"], "learning_rate = nan: expected a finite number"),
        (["optimizer.learning_rate=-1"], "learning_rate = -1.0 must not be negative"),
        (["optimizer.warmup=.inf"], "optimizer.warmup = inf: expected a finite number"),
        (["optimizer.eps=0"], "optimizer.eps = 0.0 must be above 0"),
        (
            ["optimizer.schedule=wsd", "optimizer.constant=5"],
            "optimizer.constant = 5: wsd has no constant tail",
        ),
        (
            [
                "model.pattern='*E'",
                "model.experts={count: 8, top_k: 2, ffn: 64, bias_rate: 0.1}",
            ],
            "model.experts.bias_rate = 0.1 needs model.experts.router = sigmoid",
        ),
    ],
)
def test_bad_override(texts, message):
    with pytest.raises(RecipeError) as error:
        override(*texts)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model: [", "not valid YAML"),
        ("- 1", "expected a mapping"),
        ("model: llama9", "model is 'llama9'; expected one of deepseek_v3"),
        ("model: llama2_70b\nrows: {}", "rows must map GPU counts"),
        ("model: llama2_70b\nrows: {big: {}}", "row 'big' must be a GPU count or 'smoke'"),
        ("model: llama2_70b\nrows: {8: 1}", "row 8 must be a GPU count or 'smoke' and hold"),
        ("model: llama2_70b\nbatsch: {}\nrows: {8: {}}", "unknown key 'batsch'"),
        ("model: llama2_70b\nbatch: 3\nrows: {8: {}}", "batch must be a mapping"),
        ("model: [llama2_70b]\nrows: {8: {}}", "model is ['llama2_70b']; expected one of"),
        ("model: llama2_70b\nrows: {0: {}}", "row 0 must be a GPU count"),
        ("model: llama2_70b\nrows: {8: {}}\ngb200: 4", "gb200 must map GPU counts"),
        ("model: llama2_70b\nrows: {8: {}}\ngb200: {x: {}}", "gb200: row 'x' must be a GPU count"),
        ("model: llama2_70b\nrows: {8: {}}\ngb20: {8: {}}", "'gb20'; did you mean 'gb200'"),
        ("model: llama2_70b\nrows: {true: {}}", "row True must be a GPU count"),
        ("model: llama2_70b\nrows: {8: {layers: " + "9" * 5000 + "}}", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
    ],
)
def test_bad_recipe_file(content, message, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    with pytest.raises(RecipeError, match=f"^{path}: ") as error:
        recipes.load(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_recipe_file_names_the_nearest_one():
    with pytest.raises(RecipeError, match=r"No such file.*; did you mean 'llama2_70b_bf16'"):
        recipes.load("llama2_70b_bf61")


def test_rows_of_a_gpu_take_the_place_of_others():
    recipe = RECIPES["llama31_405b_bf16"]
    assert recipe.on(None).rows == recipe.rows
    assert recipe.on(PLANNED["h200"]).rows == recipe.rows
    own = recipe.on(PLANNED["gb200"])
    assert own.rows.keys() == recipe.rows.keys() | {256}
    assert recipes.resolve(own, 128).model.layers == 126
    assert recipes.resolve(recipe, 128).model.layers == 62
    assert own.rows[2048] == recipe.rows[2048]


def test_bad_row_names_the_row():
    recipe = recipes.Recipe("mine", "llama2_70b", EXAMPLE.shared, {8: {"fsdq": 8}})
    with pytest.raises(RecipeError, match=r"recipe mine, row 8: unknown key 'fsdq'.*'fsdp'"):
        recipes.resolve(recipe, 8)
    for section in ([1], 3):
        recipe = recipes.Recipe("mine", "llama2_70b", EXAMPLE.shared, {8: {"batch": section}})
        with pytest.raises(RecipeError, match="row 8: batch must be a mapping, not "):
            recipes.resolve(recipe, 8)
    recipe = recipes.Recipe("mine", "llama2_70b", EXAMPLE.shared, {8: {"fsdp": 8}})
    with pytest.raises(RecipeError, match="row 8: batch: missing global_batch"):
        recipes.resolve(recipe, 8)


@pytest.mark.parametrize(
    ("platform", "devices", "gpus", "row"),
    [("gpu", 64, None, 64), ("gpu", 64, 64, 64), ("gpu", 8, None, 8), ("cpu", 8, None, "smoke")],
)
def test_row_of_a_machine(platform, devices, gpus, row):
    assert recipes.row_name(platform, devices, gpus) == row


@pytest.mark.parametrize(
    ("platform", "devices", "gpus", "message"),
    [
        ("gpu", 8, 64, "--gpus 64 was asked for, but this job sees 8 GPUs"),
        ("cpu", 1, 64, "--gpus 64 was asked for, but this job sees 1 CPU device"),
    ],
)
def test_no_row_for_a_machine(platform, devices, gpus, message):
    with pytest.raises(RecipeError) as error:
        recipes.row_name(platform, devices, gpus)
    assert message in str(error.value)


def test_microbatch_defaults_to_one_pass():
    run = tiny_run("parallelism.fsdp=2", devices=4)
    assert (run.batch_ranks, run.microbatch, run.accumulation) == (4, 2, 1)


@pytest.mark.parametrize(
    ("warmup", "steps", "length"), [(0.29, 100, 29), (0.1, 50, 5), (20, 50, 20)]
)
def test_a_share_of_a_run_is_whole_steps(warmup, steps, length):
    """0.29 x 100 is a little less than 29 in floating point."""
    optimizer = recipes.resolve(recipes.load("llama2_70b_bf16"), 64).optimizer
    assert replace(optimizer, warmup=warmup).warmup_steps(steps) == length
