"""Options of `train` for a job. They come from the options of launch/submit.py, from published
variables, and from the arguments after `--`."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from variables import Variables, profile_options, run_length

from jaxbench.base.errors import RecipeError
from jaxbench.run import arguments

DEFAULTS = {"seed": 0, "watchdog": 300.0}
"""Options of `train` that every job has."""

RESERVED = {
    "config": "name the recipe before --",
    "gpus": "give it before --",
    "output": "STAGE_PATH is the root of the results",
    "cpu_devices": "--cpu rehearses a job on CPU devices",
    "local_devices": "it follows from --processes-per-node",
    "resume": "a job that saves (--checkpoint) resumes by itself",
    "compilation_cache": "it is in the stage folder",
}
"""Options of `train` that only the launcher sets, and what a user can do instead."""


def parse_train(texts: list[str]) -> dict[str, Any]:
    """Parses the options of `train` after `--`. Raises RecipeError for a mistake and for reserved
    options."""
    try:
        options = arguments.given(texts)
    except RecipeError as error:
        raise RecipeError(f"after --, in the options of train: {error}") from error
    for name, instead in RESERVED.items():
        if name in options:
            raise RecipeError(f"only the launcher sets {arguments.flag(name)}: {instead}")
    if options.get("profile") == "nsys":
        raise RecipeError(
            "only the launcher starts nsys: set ENABLE_PROFILE=true instead of --profile nsys"
        )
    return options


def merge(submit: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two sets of options of `train`: those that submit's options and variables ask for, and
    those after `--`. Raises RecipeError if they contradict each other."""
    for name in submit:
        if name != "set" and train.get(name, submit[name]) != submit[name]:
            first, second = (
                " ".join(arguments.as_texts({name: side[name]})) for side in (submit, train)
            )
            raise RecipeError(
                f"{first} (by options or variables of launch/submit.sh) contradicts {second} "
                "after --; give only one of them"
            )
    first, second = submit.get("set", []), train.get("set", [])
    values = dict(text.partition("=")[::2] for text in first)
    for text in second:
        key, _, value = text.partition("=")
        if values.get(key, value) != value:
            raise RecipeError(f"--set {key}={values[key]} and --set {text} after -- contradict")
    return {**DEFAULTS, **submit, **train, "set": list(dict.fromkeys([*first, *second]))}


def train_options(
    args: argparse.Namespace, variables: Variables, workload: str, stage: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of `train`, and the variables of the job's script. Raises RecipeError."""
    train = dict(args.train)
    options, settings, length = profile_options(variables, workload, train)
    values = {
        "steps": run_length(variables, length), "seed": args.seed, "watchdog": args.watchdog,
        "checkpoint_every": args.checkpoint_every,
    }  # fmt: skip
    options |= {"set": args.set} | {k: v for k, v in values.items() if v is not None}
    if variables.flag("ENABLE_CHECKPOINT") or args.checkpoint_every is not None:
        options["checkpoint"] = True
    if load := variables.text("LOAD_CHECKPOINT_PATH"):
        options["restore"] = stage / load
    if "restore" in train:
        train["restore"] = train["restore"].absolute()
    options = merge(options, train)
    if "restore" in options and not options["restore"].is_dir():
        raise RecipeError(
            f"LOAD_CHECKPOINT_PATH or --restore: {options['restore']} is not a folder"
        )
    if args.cpu and "pgle" in options:
        raise RecipeError("--pgle needs GPUs, since a rehearsal (--cpu) has no latencies to hide")
    saves = "checkpoint" in options or "checkpoint_every" in options
    if args.requeue_at_time_limit and not saves:
        raise RecipeError(
            "--requeue-at-time-limit needs a job that saves: ENABLE_CHECKPOINT=true, or "
            "-- --checkpoint"
        )
    return options, settings | {
        "JAXBENCH_RESUME": str(saves).lower(),
        "JAXBENCH_REQUEUE_AT_LIMIT": str(args.requeue_at_time_limit).lower(),
    }
