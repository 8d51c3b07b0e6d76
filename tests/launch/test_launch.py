"""What launch/submit.py makes of options and published variables, and what it refuses."""

from pathlib import Path

import pytest
from launching import LLAMA, STAGE, job, refused, submit, value

import jaxbench
from jaxbench.cluster import devices
from jaxbench.recipe import recipes


def test_published_variables_and_options_are_the_same_job():
    published = job(**LLAMA, JOB_TOTAL_GPUS="512")
    options = job("configs/llama31_405b_bf16.yaml", "--gpus", "512", **STAGE)
    assert published.script() == options.script()
    assert (published.options["nodes"], published.options["ntasks-per-node"]) == ("64", "8")
    assert published.results == Path(f"/stage/results/{jaxbench.__version__}/bf16/405b/512")
    assert value(published, "--gpus") == "512"
    assert value(published, "--local-devices") == "1"
    assert published.run.model.layers == 126


def test_every_slurm_variable_reaches_the_script():
    made = job(
        **LLAMA, JOB_TOTAL_GPUS="512", GPUS_PER_NODE="4", SBATCH_ACCOUNT="me",
        SBATCH_PARTITION="fast", SBATCH_GPUS_PER_NODE="4", TIME_LIMIT="01:00:00", MAX_STEPS="20",
    )  # fmt: skip
    lines = made.script().splitlines()
    for option in ("account=me", "partition=fast", "gres=gpu:4", "time=01:00:00", "nodes=128"):
        assert f"#SBATCH --{option}" in lines
    assert value(made, "--steps") == "20"


def test_one_process_per_node():
    made = job("--processes-per-node", "1", **LLAMA, JOB_TOTAL_GPUS="512")
    assert made.options["ntasks-per-node"] == "1"
    assert value(made, "--local-devices") == made.settings["JAXBENCH_LOCAL_DEVICES"] == "8"


@pytest.mark.parametrize(
    ("variables", "steps", "window"),
    [
        ({}, "25", "20-25"),
        ({"PROFILE_START_STEP": "10", "PROFILE_STOP_STEP": "15"}, "15", "10-15"),
        ({"RUN_CONF_PROFILE_START_STEP": "30", "RUN_CONF_PROFILE_STOP_STEP": "40"}, "40", "30-40"),
    ],
)
def test_profiling(variables, steps, window):
    made = job(**LLAMA, **variables, JOB_TOTAL_GPUS="512", ENABLE_PROFILE="true",
               RUN_CONF_PROFILE_RANKS="0,1")  # fmt: skip
    assert (value(made, "--steps"), value(made, "--profile-steps")) == (steps, window)
    assert (value(made, "--profile"), value(made, "--profile-ranks")) == ("nsys", "0,1")
    assert made.settings["JAXBENCH_NSYS_RANKS"] == "0,1"


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        ({"WORKLOAD": "llama3.1", "MODEL_SIZE": "8B"}, "llama31_8b_bf16"),
        ({"WORKLOAD": "pretrain_llama3.1", "MODEL_SIZE": "70b", "DTYPE": "FP8"}, "llama31_70b_fp8"),
        ({"WORKLOAD": "nemotron", "MODEL_SIZE": "340b"}, "nemotron4_340b_fp8"),
        ({"WORKLOAD": "nemotronh"}, "nemotronh_56b_fp8"),
        ({"WORKLOAD": "qwen3", "MODEL_SIZE": "30b_a3b"}, "qwen3_30b_a3b_fp8"),
        ({"WORKLOAD": "grok1", "DTYPE": "bf16"}, "grok1_314b_bf16"),
        ({"WORKLOAD": "maxtext"}, "llama2_70b_fp8"),
        ({"WORKLOAD": "llama2", "MODEL_SIZE": "70b"}, "llama2_70b_fp8"),
    ],
)
def test_published_words_name_the_recipe(words, recipe):
    """In any case of letters; without DTYPE, the precision that the published script falls back
    to."""
    path = submit.recipe_path(None, submit.Variables(words))
    assert path == recipes.config_folder() / f"{recipe}.yaml"
    assert path.exists()
    assert submit.recipe_path(recipe, submit.Variables(words)) == path


def test_a_recipe_is_found_by_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    made = job("llama31_8b_bf16", "--gpus", "8", **STAGE)
    assert value(made, "--config") == str(recipes.config_folder() / "llama31_8b_bf16.yaml")


@pytest.mark.parametrize("name", ["ENABLE_NCCLTRACE", "ENABLE_NCCL_TRACE"])
def test_nccl_trace(name):
    made = job(**LLAMA, JOB_TOTAL_GPUS="512", **{name: "True"})
    assert "--nccl-trace" in made.arguments
    assert value(made, "--steps") == "5"
    assert made.options["time"] == "00:15:00"
    assert f"/results/{jaxbench.__version__}-nccl-trace/" in str(made.results)


def test_second_generation_folders():
    environment = {k: v for k, v in LLAMA.items() if k != "STAGE_PATH"}
    made = job(**environment, LLMB_INSTALL="/llmb", JOB_TOTAL_GPUS="512")
    assert str(made.results).startswith("/llmb/workloads/pretrain_llama3.1/results/")
    made = job("nemotronh_56b_fp8", "--gpus", "32", LLMB_INSTALL="/llmb")
    assert str(made.results).startswith("/llmb/workloads/pretrain_nemotronh/results/")
    made = job(**environment, LLMB_INSTALL="/llmb", LLMB_WORKLOAD="/mine", JOB_TOTAL_GPUS="512")
    assert str(made.results).startswith("/mine/results/")


def test_rows_of_another_gpu():
    """GB200: four to a node, rows of their own; any count has a row."""
    made = job(**LLAMA, GPU_TYPE="gb200", JOB_TOTAL_GPUS="256")
    assert (made.options["nodes"], made.run.label) == ("64", "full")
    assert made.remarks() == []
    assert "nothing is published for" in job(**LLAMA, JOB_TOTAL_GPUS="256").remarks()[0]
    made = job(**LLAMA, GPU_TYPE="B200", JOB_TOTAL_GPUS="512")
    assert made.options["nodes"] == "64"
    assert "512 B200s" in made.remarks()[0]
    made = job("llama31_8b_bf16", "--gpus", "24", STAGE_PATH="/stage")
    assert (made.run.label, made.options["nodes"]) == ("derived", "3")


def test_checkpoints(tmp_path):
    (tmp_path / "old").mkdir()
    environment = LLAMA | {"STAGE_PATH": str(tmp_path), "JOB_TOTAL_GPUS": "512"}
    made = job(**environment, ENABLE_CHECKPOINT="true", LOAD_CHECKPOINT_PATH="old")
    assert "--checkpoint" in made.arguments
    assert value(made, "--restore") == str(tmp_path / "old")
    assert "--steps" not in made.arguments  # one step more than the checkpoint has, as published
    assert made.settings["JAXBENCH_RESUME"] == "true"
    assert job(**environment).settings["JAXBENCH_RESUME"] == "false"


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        ((), STAGE, "name a recipe, or set WORKLOAD, MODEL_SIZE and DTYPE"),
        ((), LLAMA, "name --gpus"),
        (
            ("--gpus", "8"),
            LLAMA | {"JOB_TOTAL_GPUS": "512"},
            "--gpus and JOB_TOTAL_GPUS contradict",
        ),
        (("--gpus", "100"), LLAMA, "100 GPUs do not fill nodes of 8"),
        (("--gpus", "512"), LLAMA | {"STAGE_PATH": ""}, "set STAGE_PATH"),
        (("--gpus", "512"), LLAMA | {"LLMB_INSTALL": "/llmb"}, "are both set; use one"),
        (("--gpus", "512"), LLAMA | {"ENABLE_PROFILE": "yes"}, "expected true or false"),
        (("--gpus", "512"), LLAMA | {"MAX_STEPS": "0"}, "MAX_STEPS=0: expected a whole number"),
        (("--gpus", "512"), LLAMA | {"GPUS_PER_NODE": "7"}, "do not fill nodes"),
        (("--gpus", "512", "--processes-per-node", "2"), LLAMA, "expected 1 or 8"),
        (("--gpus", "512", "--processes-per-node", "0"), LLAMA, "expected 1 or 8"),
        (("--gpus", "512", "--system", "mars"), LLAMA, "there is no launch/env/mars.sh"),
        (
            ("--gpus", "512"),
            LLAMA | {"ENABLE_NCCLTRACE": "true", "MAX_STEPS": "50"},
            "MAX_STEPS=50 contradicts a profiled or traced run of 5",
        ),
        (
            ("--gpus", "512"),
            LLAMA | {"ENABLE_PROFILE": "true", "RUN_CONF_PROFILE_RANKS": "0-7"},
            "RUN_CONF_PROFILE_RANKS=0-7: expected numbers",
        ),
        (
            ("--gpus", "512"),
            LLAMA
            | {
                "ENABLE_PROFILE": "true",
                "PROFILE_STOP_STEP": "30",
                "RUN_CONF_PROFILE_STOP_STEP": "40",
            },
            "PROFILE_STOP_STEP=30 and RUN_CONF_PROFILE_STOP_STEP=40 contradict",
        ),
        (("--gpus", "512"), LLAMA | {"LOAD_CHECKPOINT_PATH": "none"}, "is not a folder"),
        (
            ("--gpus", "512"),
            LLAMA | {"ENABLE_PROFILE": "true", "ENABLE_NCCLTRACE": "true"},
            "exclude each other",
        ),
        (
            ("--gpus", "512"),
            LLAMA | {"ENABLE_NCCLTRACE": "true", "ENABLE_NCCL_TRACE": "false"},
            "contradict",
        ),
        (("configs/llama2_70b_bf16.yaml", "--gpus", "64"), LLAMA, "contradicts the recipe"),
        (
            ("--gpus", "512"),
            LLAMA | {"ENABLE_PROFILE": "true", "PROFILE_START_STEP": "30"},
            "profiles nothing",
        ),
        (("--gpus", "512"), LLAMA | {"GPU_TYPE": "v100"}, "GPU_TYPE=v100: expected one of h100"),
        (("--gpus", "512"), LLAMA | {"WORKLOAD": "gpt"}, "/gpt_405b_bf16.yaml: No such file"),
        (("--gpus", "0", "--cpu"), LLAMA, "--gpus 0: expected a whole number above 0"),
        (("--gpus", "512", "--time", "soon"), LLAMA, "--time soon: expected a time above 0 as M, "),
        (("--gpus", "512", "--time", "0"), LLAMA, "--time 0: expected a time above 0"),
        (("--gpus", "512"), LLAMA | {"TIME_LIMIT": "1:2:3:4"}, "TIME_LIMIT 1:2:3:4: expected"),
        (("--gpus", "512", "--requeue-at-time-limit"), LLAMA, "needs a job that saves"),
        (("--gpus", "512"), {**LLAMA, "STAGE_PATH": "/a%j"}, "cannot write to a path with %"),
    ],
)
def test_a_mistake_is_one_line_before_submission(options, variables, message, monkeypatch, capsys):
    refused(options, variables, message, monkeypatch, capsys)


def test_a_dry_run_prints_the_script_and_the_recipe(monkeypatch, capsys):
    monkeypatch.setattr(submit.os, "environ", LLAMA | {"DRY_RUN": "true", "JOB_TOTAL_GPUS": "512"})
    monkeypatch.setattr(submit, "submit", lambda job: pytest.fail("it was submitted"))
    assert submit.main([]) == 0
    script, recipe = capsys.readouterr().out.split("# the resolved recipe:\n")
    assert script.rstrip() == job(**LLAMA, JOB_TOTAL_GPUS="512").script().rstrip()
    assert submit.yaml.safe_load(recipe)["model"]["layers"] == 126


def test_the_environment_is_recorded_by_an_allow_list(monkeypatch):
    foreign = {"HF_TOKEN": "a", "GH_PAT": "b", "SLURM_JWT": "c", "MY_NOTES": "d", "LESSOPEN": "e"}
    secret = {"JAXBENCH_API_KEY": "f", "SLURM_JOB_AUTH": "g"}
    recorded = {
        "STAGE_PATH": "/stage",
        "XLA_FLAGS": "--x",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
    }
    address = {"JAX_PROXY": "http://me:h@proxy:80/x"}
    monkeypatch.setattr(devices.os, "environ", foreign | secret | recorded | address)
    assert devices.variables() == {
        **recorded, **dict.fromkeys(secret, "REDACTED"), "JAX_PROXY": "http://REDACTED@proxy:80/x",
    }  # fmt: skip
