"""Where a run begins: its folder, its checkpoint, its length."""

import argparse
import json
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from jaxbench.cluster import job
from jaxbench.errors import RecipeError
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run
from jaxbench.run import profiling, records
from jaxbench.run.session import Session


def prepare(run: Run, args: argparse.Namespace) -> tuple[Run, Session | None]:
    """The run and its session with folder and checkpoint found; no session if the run is complete.

    The first process decides for all: the others may see another moment of a shared file system.
    """
    decided = json.loads(job.from_first("start", lambda: json.dumps(_decide(run, args))))
    if decided["completed"]:
        return run, None
    given = {f.name: getattr(args, f.name) for f in fields(Session) if hasattr(args, f.name)}
    found = {
        "folder": Path(decided["folder"]),
        "restore": decided["restore"] and Path(decided["restore"]),
        "checkpoint": args.checkpoint or args.checkpoint_every is not None,
    }
    session = Session(**(given | found))
    if session.nccl_trace:
        profiling.trace_nccl(session.folder)
    return replace(run, steps=decided["steps"]), session


def _decide(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """What only one process may find out: folder, length of the run, and checkpoint."""
    folder = args.output or Path("results", run.recipe, run.row, time.strftime("%Y%m%d-%H%M%S"))
    there = (folder / "run.json").exists()
    if there and not args.resume:
        raise RecipeError(
            f"--output {folder} already holds a run; name another folder, or continue with --resume"
        )
    steps, restore = run.steps, None
    if args.restore is not None or args.resume:
        from jaxbench.run import checkpoint  # Orbax, which no other run needs

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
    completed = there and _continues(folder / "run.json", replace(run, steps=steps))
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "folder": str(folder),
        "steps": steps,
        "restore": restore and str(restore),
        "completed": completed,
    }


def _continues(path: Path, run: Run) -> bool:
    """Whether the recorded run is complete. Raises RecipeError if it is another one: devices and
    mesh may change, the work may not."""

    def work(recipe: dict[str, Any]) -> dict[str, Any]:
        batch = {key: recipe["batch"][key] for key in ("global_batch", "sequence_length")}
        rest = ("recipe", "model", "precision", "optimizer", "steps", "seed")
        return {"batch": batch, **{key: recipe[key] for key in rest}}

    record = records.read(path)
    theirs, ours = work(record["recipe"]), work(json.loads(json.dumps(recipes.describe(run))))
    differing = [key for key in ours if theirs[key] != ours[key]]
    if differing:
        raise RecipeError(f"--resume: {path} is another run: its {differing[0]} differs")
    return record["status"] == "completed"
