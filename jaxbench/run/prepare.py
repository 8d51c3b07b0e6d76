"""Prepares a session: output folder, checkpoint to restore, number of steps."""

import json
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxbench.base.errors import RecipeError, listed
from jaxbench.base.files import foreign, new_folder, owned
from jaxbench.cluster import job
from jaxbench.recipe import recipes
from jaxbench.recipe.build import differing
from jaxbench.recipe.settings import Run
from jaxbench.run import profiling, records, saved_checkpoints
from jaxbench.run.arguments import Options
from jaxbench.run.session import Session

RUN_FILES = "run.json", "steps.jsonl", saved_checkpoints.FOLDER
"""What a run leaves in its folder."""


def prepare(run: Run, options: Options, held: ExitStack) -> tuple[Run, Session | None]:
    """The run with its number of steps, and its session; None for the session if the run is
    completed already.

    Rank 0 decides for all, because the others may see a stale shared file system. It owns the
    folder until `held` is closed.
    """
    start = job.broadcast("start", lambda: _decide(run, options, held))
    if start is None:
        return run, None
    session = Session(
        folder=Path(start["folder"]),
        options=options,
        checkpoints=tuple(map(Path, start["checkpoints"])),
        skipped=tuple(start["skipped"]),
    )
    if options.nccl_trace:
        profiling.trace_nccl(session.folder)
    return replace(run, steps=start["steps"]), session


def _decide(run: Run, options: Options, held: ExitStack) -> dict[str, Any] | None:
    """The number of `steps` and, as JSON, the fields of the session; None if the run is completed.
    Makes the folder and becomes its owner. Raises RecipeError for a mistake, and RunFailed if no
    checkpoint can be read."""
    recipe, steps = recipes.describe(run), run.steps
    readable: list[Path] = []
    skipped: list[str] = []
    if options.restore is not None:
        readable, skipped = saved_checkpoints.readable(options.restore, recipe)
        done = int(readable[0].name)
        steps = done + 1 if options.steps is None else steps
        if done >= steps:
            raise RecipeError(f"--steps {steps}: the checkpoint {readable[0]} has as many already")
        first, end = options.profile_steps
        if options.profile and not (first < steps and end > done):
            raise RecipeError(
                f"--profile-steps {first}-{end}: this run has steps {done} to {steps - 1}"
            )
    folder = _own(run, options, held)
    if options.resume:
        record = folder / "run.json"
        if record.exists() and _is_completed(record, replace(run, steps=steps)):
            return None
        if any((folder / saved_checkpoints.FOLDER).glob("[0-9]*")):
            readable, skipped = saved_checkpoints.readable(folder, recipe)
    return {
        "folder": str(folder), "checkpoints": [*map(str, readable)], "skipped": skipped,
        "steps": steps,
    }  # fmt: skip


def _own(run: Run, options: Options, held: ExitStack) -> Path:
    """The folder of the run. This process is its only writer until `held` is closed. The folder is
    new, or with --resume may hold the run. Raises RecipeError for any other folder."""
    if options.output is None:
        now = time.strftime("%Y%m%d-%H%M%S")
        folder = new_folder(Path("results", run.recipe, run.row, now))
    else:
        folder = options.output
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    if reason := foreign(folder):
        raise RecipeError(f"--output {folder}: {reason}; name a folder of your own")
    held.enter_context(owned(folder))
    if not options.resume and any((folder / name).exists() for name in RUN_FILES):
        raise RecipeError(
            f"--output {folder} already holds a run; name another folder, or continue with --resume"
        )
    return folder


def _is_completed(path: Path, run: Run) -> bool:
    """Returns whether the recorded run is completed. Raises RecipeError if it is not `run`: devices
    and mesh may differ, but the work may not."""

    def work(recipe: dict[str, Any]) -> dict[str, Any]:
        batch = {key: recipe["batch"][key] for key in ("global_batch", "sequence_length")}
        keys = ("recipe", "model", "precision", "optimizer", "steps", "seed")
        return {"batch": batch, **{key: recipe[key] for key in keys}}

    record = records.read(path)
    requested = work(json.loads(json.dumps(recipes.describe(run))))
    try:
        recorded = work(record["recipe"])
    except (LookupError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, LookupError) else "its recipe has another form"
        raise RecipeError(f"--resume: {path} is no record of this version: {reason}") from error
    texts = [
        f"{name} is {there}, not {here}" for name, here, there in differing(requested, recorded)
    ]
    if texts:
        raise RecipeError(f"--resume: {path} is another run, whose {listed(texts, 3, '; ')}")
    return record["status"] == "completed"
