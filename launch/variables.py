"""Reads the published environment variables (docs/reference/launch.md)."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbatch import SITE

from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import PLANNED, Gpu
from jaxbench.recipe import recipes
from jaxbench.run.arguments import PROFILED_RANKS

WORKLOADS = {
    "llama3.1": "llama31", "nemotron": "nemotron4", "maxtext": "llama2",
    "maxtext_llama2": "llama2",
}  # fmt: skip
"""Published names of workloads that differ from the recipes' names."""
SIZES = {"grok1": "314b", "llama2": "70b", "nemotronh": "56b"}
"""The sizes of workloads whose published script has no MODEL_SIZE."""
DTYPES = {"llama31": "bf16"}
DTYPE = "fp8"
"""The precision if `DTYPE` is not set, as in the published scripts: bf16 for Llama 3.1, else
fp8."""
FOLDERS = {"llama31": "pretrain_llama3.1"}
"""The folders under `LLMB_INSTALL` of workloads that are not in `pretrain_<workload>`."""

PROFILED_STEPS = {"grok1": (20, 30, 50), "nemotron4": (20, 30, 50), "nemotronh": (45, 50, 50)}
"""The first profiled step, the step after the last one, and the length of the run, as published."""
LLAMA_PROFILED_STEPS = (20, 25, 25)
TRACED_STEPS = 5


KNOWN = (
    "WORKLOAD", "MODEL_SIZE", "DTYPE", "GPU_TYPE", "JOB_TOTAL_GPUS", "GPUS_PER_NODE", "STAGE_PATH",
    "LLMB_INSTALL", "LLMB_WORKLOAD", "SBATCH_GPUS_PER_NODE",
    *(f"SBATCH_{name.upper()}" for name in SITE),
    "ADDITIONAL_SLURM_PARAMS", "TIME_LIMIT", "MAX_STEPS", "ENABLE_PROFILE", "PROFILE_START_STEP",
    "PROFILE_STOP_STEP", "ENABLE_NCCLTRACE", "ENABLE_NCCL_TRACE", "ENABLE_CHECKPOINT",
    "LOAD_CHECKPOINT_PATH", "JAXBENCH_VENV", "DRY_RUN", *(f"RUN_CONF_{name}" for name in (
        "GPU_PER_NODE", "MAX_STEPS", "PROFILE_START_STEP", "PROFILE_STOP_STEP", "PROFILE_RANKS",
        "PROFILE_GPU_METRICS", "PROFILE_CPU", "IMAGE",
    )),
)  # fmt: skip
"""All variables that the launcher reads, except Slurm's own names for three of them."""


def misspelt(environment: Mapping[str, str]) -> list[str]:
    """A warning for each variable that nothing reads, if its name is almost the name of one that
    the launcher reads."""
    lines = []
    for name in sorted(environment):
        if name in KNOWN or name.startswith("SLURM_"):
            continue
        if name.startswith("SBATCH_"):
            instead = "a job has the options of launch/submit.sh, such as --sbatch"
            lines.append(f"{name} is not read: {instead}")
        elif near := difflib.get_close_matches(name, KNOWN, 1, cutoff=0.9):
            lines.append(f"{name} is not read; is {near[0]} meant?")
    return lines


class Variables:
    """Parses environment variables. Raises RecipeError for bad or contradictory values."""

    def __init__(self, environment: Mapping[str, str]):
        self._environment = environment

    def text(self, *names: str) -> str | None:
        """The value of a variable with several names; None if it is not set."""
        values = {name: value for name in names if (value := self._environment.get(name))}
        if len(set(values.values())) > 1:
            raise RecipeError(" and ".join(f"{n}={v}" for n, v in values.items()) + " contradict")
        return next(iter(values.values()), None)

    def flag(self, *names: str) -> bool:
        """A variable that is `true` or `false`, in upper or lower case. It is false if it is not
        set."""
        value = (self.text(*names) or "false").lower()
        if value not in ("true", "false"):
            raise RecipeError(f"{names[0]}={value}: expected true or false")
        return value == "true"

    def number(self, *names: str) -> int | None:
        """A variable that is a whole number above zero. None if it is not set."""
        value = self.text(*names)
        if value is not None and not (value.isdecimal() and int(value) > 0):
            raise RecipeError(f"{names[0]}={value}: expected a whole number above 0")
        return None if value is None else int(value)


def recipe_path(config: str | None, variables: Variables) -> Path:
    """The file of the recipe that `config` names, or WORKLOAD, MODEL_SIZE and DTYPE. If both are
    given, they must agree."""
    names = ("WORKLOAD", "MODEL_SIZE", "DTYPE")
    values = {name: value.lower() for name in names if (value := variables.text(name))}
    if "WORKLOAD" in values:
        workload = values["WORKLOAD"].removeprefix("pretrain_")
        values["WORKLOAD"] = WORKLOADS.get(workload, workload)
    if config is not None:
        path = recipes.find(config).resolve()
        for name, value in values.items():
            if f"_{value}_" not in f"_{path.stem}_":
                raise RecipeError(f"{name}={variables.text(name)} contradicts the recipe {config}")
        return path
    workload = values.get("WORKLOAD", "")
    size = values.get("MODEL_SIZE") or SIZES.get(workload)
    if not (workload and size):
        raise RecipeError("name a recipe, or set WORKLOAD, MODEL_SIZE and DTYPE")
    dtype = values.get("DTYPE") or DTYPES.get(workload, DTYPE)
    return recipes.config_folder() / f"{workload}_{size}_{dtype}.yaml"


def stage_folder(variables: Variables, workload: str) -> Path:
    """The root folder of results and compiled programs."""
    stage, install = variables.text("STAGE_PATH"), variables.text("LLMB_INSTALL")
    if stage and install:
        raise RecipeError("STAGE_PATH and LLMB_INSTALL are both set; use one")
    if install:
        folder = FOLDERS.get(workload, f"pretrain_{workload}")
        stage = variables.text("LLMB_WORKLOAD") or f"{install}/workloads/{folder}"
    if not stage:
        raise RecipeError("set STAGE_PATH (or LLMB_INSTALL) to a folder that all nodes share")
    return Path(stage).absolute()


def gpu_type(variables: Variables) -> Gpu:
    """The GPU whose rows we run."""
    kind = variables.text("GPU_TYPE") or "h100"
    if kind.lower() not in PLANNED:
        raise RecipeError(f"GPU_TYPE={kind}: expected one of {', '.join(PLANNED)}")
    return PLANNED[kind.lower()]


def profile_options(
    variables: Variables, workload: str, train: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str], int | None]:
    """For a profile or an NCCL trace: the options of `train`, the variables of the job's script,
    and the length of the run (None for the default). `train` has the options after `--`, which
    replace published defaults."""
    profile = variables.flag("ENABLE_PROFILE")
    trace = variables.flag("ENABLE_NCCLTRACE", "ENABLE_NCCL_TRACE")
    if profile and trace:
        raise RecipeError("ENABLE_PROFILE and ENABLE_NCCLTRACE exclude each other")
    if trace:
        return {"nccl_trace": True}, {}, TRACED_STEPS
    if not profile:
        return {}, {}, None
    start = variables.number("PROFILE_START_STEP", "RUN_CONF_PROFILE_START_STEP")
    stop = variables.number("PROFILE_STOP_STEP", "RUN_CONF_PROFILE_STOP_STEP")
    first, last, length = PROFILED_STEPS.get(workload, LLAMA_PROFILED_STEPS)
    if not (start or stop):
        first, last = train.get("profile_steps", (first, last))
    first, last = start or first, stop or last
    if variables.number("PROFILE_STOP_STEP"):
        length = last  # the run ends with the profile, as published
    ranks = variables.text("RUN_CONF_PROFILE_RANKS")
    if ranks is None:
        ranks = ",".join(map(str, train.get("profile_ranks", PROFILED_RANKS)))
    if first >= last:
        raise RecipeError(f"profiling from step {first} to step {last} profiles nothing")
    if not all(rank.isdecimal() for rank in ranks.split(",")):
        raise RecipeError(f"RUN_CONF_PROFILE_RANKS={ranks}: expected numbers, such as 0,1")
    settings = {"JAXBENCH_NSYS_RANKS": ranks}
    for name in ("RUN_CONF_PROFILE_GPU_METRICS", "RUN_CONF_PROFILE_CPU"):
        settings[name] = str(variables.flag(name)).lower()
    options = {
        "profile": "nsys", "profile_steps": (first, last),
        "profile_ranks": tuple(map(int, ranks.split(","))),
    }  # fmt: skip
    return options, settings, max(length, last)


def run_length(variables: Variables, profiled: int | None) -> int | None:
    """The number of steps; None for the default. `profiled` is the number for a profiled or traced
    run."""
    steps = variables.number("MAX_STEPS", "RUN_CONF_MAX_STEPS")
    if profiled and steps and steps != profiled:
        raise RecipeError(f"MAX_STEPS={steps} contradicts a profiled or traced run of {profiled}")
    return profiled or steps
