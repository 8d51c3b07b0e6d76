"""The published variables (docs/launch.md), and what launch/submit.py makes of their words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxbench.errors import RecipeError
from jaxbench.hardware import PLANNED, Gpu
from jaxbench.recipe import recipes

WORKLOADS = {
    "llama3.1": "llama31", "nemotron": "nemotron4", "maxtext": "llama2",
    "maxtext_llama2": "llama2",
}  # fmt: skip
"""Published names of workloads that are spelt otherwise here."""
SIZES = {"grok1": "314b", "llama2": "70b", "nemotronh": "56b"}
"""Where the published script asks for no size."""
DTYPES = {"llama31": "bf16"}
DTYPE = "fp8"
"""Without `DTYPE`, as the published scripts: Llama 3.1 bf16, the others fp8."""
FOLDERS = {"llama31": "pretrain_llama3.1"}
"""Folders of workloads under `LLMB_INSTALL` that are not named `pretrain_<workload>`."""

PROFILED_STEPS = {"grok1": (20, 30, 50), "nemotron4": (20, 30, 50), "nemotronh": (45, 50, 50)}
"""First and last profiled step and run length by workload, as published; Llama's stand below."""
LLAMA_PROFILED_STEPS = (20, 25, 25)
TRACED_STEPS = 5


class Variables:
    """Environment variables, with mistakes in them as RecipeError."""

    def __init__(self, environment: Mapping[str, str]):
        self._environment = environment

    def text(self, *names: str) -> str | None:
        """The value of the first variable that is set; the others must agree with it."""
        found = {name: value for name in names if (value := self._environment.get(name))}
        if len(set(found.values())) > 1:
            raise RecipeError(" and ".join(f"{n}={v}" for n, v in found.items()) + " contradict")
        return next(iter(found.values()), None)

    def flag(self, *names: str) -> bool:
        """A variable that is `true` or `false`, in any case of letters."""
        value = (self.text(*names) or "false").lower()
        if value not in ("true", "false"):
            raise RecipeError(f"{names[0]}={value}: expected true or false")
        return value == "true"

    def number(self, *names: str) -> int | None:
        """A whole number above zero."""
        value = self.text(*names)
        if value is not None and not (value.isdigit() and int(value) > 0):
            raise RecipeError(f"{names[0]}={value}: expected a whole number above 0")
        return None if value is None else int(value)


def recipe_path(config: str | None, variables: Variables) -> Path:
    """The recipe of the option, or of WORKLOAD, MODEL_SIZE and DTYPE, which must agree with it."""
    names = ("WORKLOAD", "MODEL_SIZE", "DTYPE")
    words = {name: value.lower() for name in names if (value := variables.text(name))}
    if "WORKLOAD" in words:
        workload = words["WORKLOAD"].removeprefix("pretrain_")
        words["WORKLOAD"] = WORKLOADS.get(workload, workload)
    if config is not None:
        path = recipes.find(config).resolve()
        for name, value in words.items():
            if value not in path.stem.split("_"):
                raise RecipeError(f"{name}={variables.text(name)} contradicts the recipe {config}")
        return path
    workload = words.get("WORKLOAD", "")
    size = words.get("MODEL_SIZE") or SIZES.get(workload)
    if not (workload and size):
        raise RecipeError("name a recipe, or set WORKLOAD, MODEL_SIZE and DTYPE")
    dtype = words.get("DTYPE") or DTYPES.get(workload, DTYPE)
    return recipes.config_folder() / f"{workload}_{size}_{dtype}.yaml"


def stage_folder(variables: Variables, workload: str) -> Path:
    """The root of the results."""
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
    """The GPU whose rows are asked for. Raises RecipeError for one that is not known."""
    kind = variables.text("GPU_TYPE") or "h100"
    if kind.lower() not in PLANNED:
        raise RecipeError(f"GPU_TYPE={kind}: expected one of {', '.join(PLANNED)}")
    return PLANNED[kind.lower()]


def observation(
    variables: Variables, workload: str, asked: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str], int | None]:
    """(options of `train`, settings, run length or None) of profiling or of the NCCL trace. Options
    that were `asked` for behind `--` take the place of published defaults."""
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
        first, last = asked.get("profile_steps", (first, last))
    first, last = start or first, stop or last
    if variables.number("PROFILE_STOP_STEP"):
        length = last  # the run ends with the profile, as published
    ranks = variables.text("RUN_CONF_PROFILE_RANKS")
    if ranks is None:
        ranks = ",".join(map(str, asked.get("profile_ranks", range(8))))
    if first >= last:
        raise RecipeError(f"profiling from step {first} to step {last} profiles nothing")
    if not all(rank.isdigit() for rank in ranks.split(",")):
        raise RecipeError(f"RUN_CONF_PROFILE_RANKS={ranks}: expected numbers, such as 0,1")
    settings = {"JAXBENCH_NSYS_RANKS": ranks}
    for name in ("RUN_CONF_PROFILE_GPU_METRICS", "RUN_CONF_PROFILE_CPU"):
        settings[name] = str(variables.flag(name)).lower()
    options = {
        "profile": "nsys", "profile_steps": (first, last),
        "profile_ranks": tuple(map(int, ranks.split(","))),
    }  # fmt: skip
    return options, settings, max(length, last)


def run_length(variables: Variables, observed: int | None) -> int | None:
    """Steps of the run where something names them; an observed run has its own number."""
    steps = variables.number("MAX_STEPS", "RUN_CONF_MAX_STEPS")
    if observed and steps and steps != observed:
        raise RecipeError(f"MAX_STEPS={steps} contradicts a profiled or traced run of {observed}")
    return observed or steps
