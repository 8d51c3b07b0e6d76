"""Options of `train` for a job: by options of launch/submit.py, by published variables, and from
behind `--`."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from variables import Variables, observation, run_length

from jaxbench.errors import RecipeError
from jaxbench.run import arguments

DEFAULTS = {"seed": 0, "watchdog": 300.0}
"""Options of `train` that every job has."""

OWNED = {
    "config": "name the recipe before --",
    "gpus": "give it before --",
    "output": "STAGE_PATH is the root of the results",
    "cpu_devices": "--cpu rehearses a job on CPU devices",
    "local_devices": "it follows from --processes-per-node",
    "resume": "a job that saves (--checkpoint) resumes by itself",
    "compilation_cache": "it is in the stage folder",
}
"""Options of `train` that the launcher gives, and what to do instead."""


def behind(texts: list[str]) -> dict[str, Any]:
    """The options of `train` that stand behind `--`. Raises RecipeError for those of which the
    launcher decides."""
    try:
        options = arguments.given(texts)
    except RecipeError as error:
        raise RecipeError(f"behind --, options of train: {error}") from error
    for name, instead in OWNED.items():
        if name in options:
            raise RecipeError(f"{arguments.flag(name)} is the launcher's: {instead}")
    if options.get("profile") == "nsys":
        raise RecipeError(
            "--profile nsys is the launcher's: ENABLE_PROFILE=true starts nsys around the processes"
        )
    return options


def saving(args: argparse.Namespace, variables: Variables, stage: Path) -> dict[str, Any]:
    """Options of `train` for checkpoints, by option or variable."""
    options: dict[str, Any] = {}
    if variables.flag("ENABLE_CHECKPOINT") or args.checkpoint_every is not None:
        options["checkpoint"] = True
    if args.checkpoint_every is not None:
        options["checkpoint_every"] = args.checkpoint_every
    if load := variables.text("LOAD_CHECKPOINT_PATH"):
        options["restore"] = stage / load
    return options


def joined(own: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `train` from both sides of `--`. Raises RecipeError where they contradict."""
    for name in own:
        if name != "set" and asked.get(name, own[name]) != own[name]:
            values = (arguments.as_texts({name: given[name]}) for given in (own, asked))
            ours, theirs = (" ".join(texts) for texts in values)
            raise RecipeError(
                f"{ours}, which options or variables of launch/submit.sh ask for, and {theirs} "
                "behind -- contradict; give one"
            )
    ours, theirs = own.get("set", []), asked.get("set", [])
    values = dict(text.partition("=")[::2] for text in ours)
    for text in theirs:
        key, _, value = text.partition("=")
        if values.get(key, value) != value:
            raise RecipeError(f"--set {key}={values[key]} and --set {text} behind -- contradict")
    return {**DEFAULTS, **own, **asked, "set": list(dict.fromkeys([*ours, *theirs]))}


def train_options(
    args: argparse.Namespace, variables: Variables, workload: str, stage: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """(options of `train` from all sides, settings of observed runs)."""
    asked = dict(args.train)
    observed, settings, length = observation(variables, workload, asked)
    given = {"steps": run_length(variables, length), "seed": args.seed, "watchdog": args.watchdog}
    own = {name: value for name, value in given.items() if value is not None}
    own |= {"set": args.set} | saving(args, variables, stage) | observed
    if "restore" in asked:
        asked["restore"] = asked["restore"].absolute()
    options = joined(own, asked)
    if "restore" in options and not options["restore"].is_dir():
        raise RecipeError(f"LOAD_CHECKPOINT_PATH or --restore: {options['restore']} is no folder")
    if args.cpu and "pgle" in options:
        raise RecipeError("--pgle needs GPUs: a rehearsal (--cpu) has no latencies to hide")
    saves = "checkpoint" in options or "checkpoint_every" in options
    if args.requeue_at_time_limit and not saves:
        raise RecipeError(
            "--requeue-at-time-limit needs a job that saves: ENABLE_CHECKPOINT=true, or "
            "-- --checkpoint"
        )
    settings |= {
        "JAXBENCH_RESUME": str(saves).lower(),
        "JAXBENCH_REQUEUE_AT_LIMIT": str(args.requeue_at_time_limit).lower(),
    }
    return options, settings
