"""Preparation of a session: output folder, checkpoint to restore, number of steps."""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxbench.cluster import job
from jaxbench.errors import RecipeError
from jaxbench.files import foreign
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run
from jaxbench.run import profiling, records
from jaxbench.run.session import Session


def prepare(run: Run, args: argparse.Namespace) -> tuple[Run, Session | None]:
    """The run with its number of steps, and its session; None if the run is completed already.

    Rank 0 decides for all: the others may see a stale shared file system.
    """
    plan = job.broadcast("start", lambda: _plan(run, args))
    if plan is None:
        return run, None
    folder, restore, steps = plan
    session = Session(folder=Path(folder), restore=restore and Path(restore), options=args)
    if args.nccl_trace:
        profiling.trace_nccl(session.folder)
    return replace(run, steps=steps), session


def _plan(run: Run, args: argparse.Namespace) -> tuple[str, str | None, int] | None:
    """(folder, checkpoint to restore, number of steps); None if the run is completed. Makes the
    folder. Raises RecipeError."""
    folder = args.output or Path("results", run.recipe, run.row, time.strftime("%Y%m%d-%H%M%S"))
    record = folder / "run.json"
    exists = record.exists()
    if exists and not args.resume:
        raise RecipeError(
            f"--output {folder} already holds a run; name another folder, or continue with --resume"
        )
    steps, restore = run.steps, None
    if args.restore is not None or args.resume:
        from jaxbench.run import checkpoint  # slow to import, and only needed here

        if args.restore is not None:
            restore = checkpoint.find(args.restore)
            if args.steps is None:
                steps = int(restore.name) + 1
            if int(restore.name) >= steps:
                raise RecipeError(f"--steps {steps}: {restore} has as many already")
        if args.resume and checkpoint.steps(folder / checkpoint.FOLDER):
            restore = checkpoint.find(folder)
        if restore is not None:
            checkpoint.check(restore, recipes.describe(run))
    if exists and _is_completed(record, replace(run, steps=steps)):
        return None
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    if reason := foreign(folder):
        raise RecipeError(f"--output {folder}: {reason}; name a folder of your own")
    return str(folder), None if restore is None else str(restore), steps


def _is_completed(path: Path, run: Run) -> bool:
    """Returns whether the recorded run is completed. Raises RecipeError if it is not `run`: devices
    and mesh may differ, the work may not."""

    def work(recipe: dict[str, Any]) -> dict[str, Any]:
        batch = {key: recipe["batch"][key] for key in ("global_batch", "sequence_length")}
        keys = ("recipe", "model", "precision", "optimizer", "steps", "seed")
        return {"batch": batch, **{key: recipe[key] for key in keys}}

    record = records.read(path)
    recorded = work(record["recipe"])
    requested = work(json.loads(json.dumps(recipes.describe(run))))
    for key, value in requested.items():
        if recorded[key] != value:
            raise RecipeError(f"--resume: {path} is another run: its {key} differs")
    return record["status"] == "completed"
