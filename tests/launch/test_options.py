"""Options of jobs: of `train`, behind `--`, and of sbatch."""

import pytest
from launching import LLAMA, STAGE, job, refused, sbatch, value

import jaxbench


def test_options_of_train_reach_the_job(tmp_path):
    made = job(
        "llama31_8b_bf16", "--gpus", "8", "--set", "batch.microbatch=2", "--",
        "--checkpoint-every", "10", "--keep", "5", "--pgle", "--restore", str(tmp_path),
        "--set", "execution.remat=full", "--steps", "20", "--seed", "3", "--watchdog", "60",
        **STAGE,
    )  # fmt: skip
    for option, expected in (
        ("--checkpoint-every", "10"), ("--keep", "5"), ("--restore", str(tmp_path)),
        ("--steps", "20"), ("--seed", "3"), ("--watchdog", "60.0"),
    ):  # fmt: skip
        assert value(made, option) == expected
        assert made.arguments.count(option) == 1
    assert "--pgle" in made.arguments
    assert made.run.overrides == ("batch.microbatch=2", "execution.remat=full")
    assert made.run.execution.remat == "full"
    assert made.settings["JAXBENCH_RESUME"] == "true"


def test_options_of_train_take_the_place_of_published_defaults():
    options = ("--profile-steps", "10-12", "--profile-ranks", "3")
    made = job("--gpus", "512", "--", *options, **LLAMA, ENABLE_PROFILE="true")
    assert (value(made, "--profile"), value(made, "--profile-steps")) == ("nsys", "10-12")
    assert made.settings["JAXBENCH_NSYS_RANKS"] == value(made, "--profile-ranks") == "3"
    made = job("--gpus", "512", "--", "--profile", "jax", "--profile-steps", "10-12", **LLAMA)
    assert (value(made, "--profile"), "--steps" in made.arguments) == ("jax", False)
    made = job("--gpus", "512", "--", "--nccl-trace", **LLAMA)
    assert f"/results/{jaxbench.__version__}-nccl-trace/" in str(made.results)


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (("--seed", "1", "--", "--seed", "1"), {}),
        (("--", "--checkpoint"), {"ENABLE_CHECKPOINT": "true"}),
        (("--", "--steps", "20"), {"MAX_STEPS": "20"}),
        (("--set", "batch.microbatch=2", "--", "--set", "batch.microbatch=2"), {}),
    ],
)
def test_the_same_said_twice_is_said_once(options, variables):
    made = job("llama31_8b_bf16", "--gpus", "8", *options, **STAGE, **variables)
    texts = [text for text in made.arguments if text.startswith("--") and text != "--set"]
    assert len(texts) == len(set(texts))
    assert len(made.run.overrides) <= 1


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("30", 1800), ("5:00", 300), ("2:01", 180), ("01:00:00", 3600), ("1-2", 93600),
        ("1-2:03", 93780), ("1-2:03:04", 93840),
    ],
)  # fmt: skip
def test_time_limits_are_read_as_slurm_does(limit, seconds):
    assert sbatch.seconds(limit, "--time") == seconds
    made = job("--gpus", "512", "--time", limit, **LLAMA, TIME_LIMIT="00:10:00")
    assert made.options["time"] == limit


def test_a_job_is_told_before_its_limit_where_there_is_time():
    saves = LLAMA | {"JOB_TOTAL_GPUS": "512", "ENABLE_CHECKPOINT": "true"}
    made = job(**saves)
    assert "#SBATCH --signal=USR1@120" in made.script().splitlines()
    assert made.warnings() == []
    made = job("--time", "2:00", **saves)
    assert "--signal" not in made.script().partition("export")[0]
    (line,) = made.warnings()
    assert "a time limit of 2:00 leaves no time to save before it" in line
    assert job("--time", "2:00", **(saves | {"ENABLE_CHECKPOINT": ""})).warnings() == []


def test_a_job_goes_on_at_its_limit_when_it_is_to():
    saves = LLAMA | {"JOB_TOTAL_GPUS": "512", "ENABLE_CHECKPOINT": "true"}
    assert job(**saves).settings["JAXBENCH_REQUEUE_AT_LIMIT"] == "false"
    made = job("--requeue-at-time-limit", **saves)
    assert "export JAXBENCH_REQUEUE_AT_LIMIT=true" in made.script().splitlines()


def test_directives_are_quoted_as_sbatch_reads_them():
    """Tried with Slurm 22.05: inside of double quotes a backslash protects, outside it does not."""
    made = job("--gpus", "512", **(LLAMA | {"STAGE_PATH": """/my stage's "#1\""""}))
    lines = made.script().splitlines()
    (output,) = [line for line in lines if line.startswith('#SBATCH "--output')]
    assert output.startswith('#SBATCH "--output=/my stage\'s \\"#1\\"/results/')
    assert output.endswith('/slurm-%j.out"')
    assert sbatch.directive("comment", "a\\b") == '#SBATCH "--comment=a\\\\b"'
    assert sbatch.directive("exclusive", None) == "#SBATCH --exclusive"


def test_a_job_asks_for_all_memory_of_its_nodes():
    """XLA's allocator alone takes gigabytes of the host's for each GPU. Where it runs on CPUs, the
    cluster's default is left."""
    assert "#SBATCH --mem=0" in job("--gpus", "512", **LLAMA).script().splitlines()
    assert "--mem" not in job("nemotronh_56b_bf16", "--gpus", "4", "--cpu", **STAGE).script()


def test_options_of_sbatch_reach_the_script():
    made = job(
        "--gpus", "512", "--sbatch", "qos=high", "--sbatch=--contiguous", "--sbatch", "exclusive",
        **LLAMA, ADDITIONAL_SLURM_PARAMS="nodelist=n[1-9],n12;reservation=r 1;exclusive;mem=0",
    )  # fmt: skip
    lines = made.script().splitlines()
    for line in ("--qos=high", "--contiguous", '"--nodelist=n[1-9],n12"', '"--reservation=r 1"'):
        assert f"#SBATCH {line}" in lines
    assert lines.count("#SBATCH --exclusive") == lines.count("#SBATCH --mem=0") == 1
    made = job("--gpus", "512", **LLAMA, ADDITIONAL_SLURM_PARAMS="qos=high licenses=a")
    assert (made.options["qos"], made.options["licenses"]) == ("high", "a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--checkpoint",), "--checkpoint is an option of train; put it after --"),
        (("--keep", "5"), "--keep is an option of train; put it after --"),
        (("--chek",), "unrecognized arguments: --chek"),
        (("--gpu", "512"), "unrecognized arguments: --gpu 512; did you mean '--gpus'?"),
        (("--seed", "x"), "argument --seed: invalid int value: 'x'"),
        (("--checkpoint-every", "0"), "--checkpoint-every = 0 must be above 0"),
        (("--", "--chek"), "after --, in the options of train: unrecognized arguments: --chek"),
        (("--", "--steps", "many"), "argument --steps: invalid int value: 'many'"),
        (("--", "--profile", "cupti"), "argument --profile: invalid choice: 'cupti'"),
        (("--", "--keep", "0"), "--keep = 0 must be above 0"),
        (("--", "--keep", "3"), "--keep 3 needs --checkpoint or --checkpoint-every"),
        (("--", "--step", "5"), "unrecognized arguments: --step 5; did you mean '--steps'?"),
        (("--restarts", "-1"), "--restarts -1: expected 0 or more"),
        (("--", "--profile=jax", "--profile-ranks=0,512"), "--profile-ranks 512: the job"),
        (("--", "--profile=jax", "--profile-ranks=-1"), "--profile-ranks -1: the job"),
        (("--", "--config", "x"), "only the launcher sets --config: name the recipe before --"),
        (("--", "--gpus", "8"), "only the launcher sets --gpus: give it before --"),
        (("--", "--output", "x"), "only the launcher sets --output: STAGE_PATH"),
        (("--", "--cpu-devices", "8"), "only the launcher sets --cpu-devices: --cpu rehearses"),
        (("--", "--local-devices", "8"), "only the launcher sets --local-devices: it follows from"),
        (("--", "--resume"), "only the launcher sets --resume: a job that saves"),
        (("--", "--compilation-cache", "x"), "only the launcher sets --compilation-cache"),
        (("--", "--profile", "nsys"), "set ENABLE_PROFILE=true instead of --profile nsys"),
        (("--", "--pgle", "--profile", "jax"), "--profile and --pgle exclude each other"),
        (("--", "--restore", "/none"), "--restore: /none is not a folder"),
        (("--seed", "1", "--", "--seed", "2"), "--seed 1 (by options or variables of launch/"),
        (
            ("--set", "batch.microbatch=2", "--", "--set", "batch.microbatch=4"),
            "--set batch.microbatch=2 and --set batch.microbatch=4 after -- contradict",
        ),
        (("--sbatch", "nodes=3"), "--nodes=3 contradicts launch/submit.sh, which sets nodes; use"),
        (("--sbatch", "node=3"), "--node=3 contradicts launch/submit.sh, which sets nodes"),
        (("--sbatch", "signal=INT@9"), "--signal=INT@9 contradicts"),
        (("--sbatch", "no-requeue"), "--no-requeue would break the job: use --restarts 0"),
        (("--sbatch", "array=0-3"), "--array=0-3 would break the job: one job is one run; launch"),
        (("--sbatch", "export=NONE"), "--export=NONE would break the job: the job has the env"),
        (("--sbatch", "dist=cyclic"), "--dist=cyclic would break the job: ranks are placed in bl"),
        (("--sbatch", "ntasks=3"), "--ntasks=3 would break the job: use --gpus"),
        (("--sbatch", "qos=a", "--sbatch", "qos=b"), "--qos=a is given too"),
        (("--sbatch", "-q high"), "expected a long option of sbatch, such as qos=high"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_option_is_one_line_too(options, message, monkeypatch, capsys):
    refused(("--gpus", "512", *options), LLAMA, message, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        ({"MAX_STEPS": "20"}, ("--steps", "30"), "--steps 20 (by options or variables"),
        ({"ENABLE_PROFILE": "true"}, ("--profile", "jax"), "--profile nsys (by options or var"),
        ({"ENABLE_PROFILE": "true"}, ("--pgle",), "--profile and --pgle exclude each other"),
        (
            {"ENABLE_PROFILE": "true", "PROFILE_STOP_STEP": "30"},
            ("--profile-steps", "20-25"), "--profile-steps 20-30 (by options or variables",
        ),
        (
            {"ADDITIONAL_SLURM_PARAMS": "partition=b", "SBATCH_PARTITION": "a"}, (),
            "--partition=b contradicts launch/submit.sh, which sets partition; use S",
        ),
    ],
)  # fmt: skip
def test_variables_and_options_may_not_contradict(variables, options, message, monkeypatch, capsys):
    refused(("--gpus", "512", "--", *options), LLAMA | variables, message, monkeypatch, capsys)
