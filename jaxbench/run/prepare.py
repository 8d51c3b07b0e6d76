"""Prepares a session: output folder, checkpoint to restore, number of steps."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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


class Begin(NamedTuple):
    """How a run begins: its number of steps, the checkpoints to start from, newest first, and the
    reasons why newer ones are skipped."""

    steps: int
    checkpoints: Sequence[Path] = ()
    skipped: Sequence[str] = ()


def _decide(run: Run, options: Options, held: ExitStack) -> dict[str, Any] | None:
    """The number of `steps` and, as JSON, the fields of the session; None if the run is completed.
    Makes the folder and becomes its owner. Raises RecipeError for a mistake, and RunFailed if no
    checkpoint can be read."""
    old = options.output if options.resume else None
    new = old is None or not any((old / name).exists() for name in RUN_FILES)
    begin = _begin(run, options) if new else None  # a mistake leaves no folder behind
    folder = _own(run, options, held)
    if not new:
        begin = _resume(run, options, folder)
    return begin and {
        "folder": str(folder), "steps": begin.steps, "skipped": [*begin.skipped],
        "checkpoints": [*map(str, begin.checkpoints)],
    }  # fmt: skip


def _begin(run: Run, options: Options) -> Begin:
    """A run that begins from `--restore`, or else with new weights."""
    if options.restore is None:
        return Begin(run.steps)
    readable, skipped = saved_checkpoints.readable(options.restore, recipes.describe(run))
    done = int(readable[0].name)
    steps = done + 1 if options.steps is None else run.steps
    if done >= steps:
        raise RecipeError(f"--steps {steps}: the checkpoint {readable[0]} has as many already")
    first, end = options.profile_steps
    if options.profile and not (first < steps and end > done):
        raise RecipeError(
            f"--profile-steps {first}-{end}: this run has steps {done} to {steps - 1}"
        )
    return Begin(steps, readable, skipped)


def _resume(run: Run, options: Options, folder: Path) -> Begin | None:
    """A run that goes on from its own checkpoints. If it has none yet, it begins again. None if it
    is completed."""
    path = folder / "run.json"
    if path.exists():
        record = records.read(path)
        recorded = _recorded_work(record, path)
        if options.restore is not None and options.steps is None:
            # What `--restore` names may have been trained further, or deleted.
            run = replace(run, steps=recorded["steps"])
        _check_same(recorded, run, path)
        if record["status"] == "completed":
            return None
        options = replace(options, steps=run.steps)
    if saved_checkpoints.numbered(folder / saved_checkpoints.FOLDER):
        return Begin(run.steps, *saved_checkpoints.readable(folder, recipes.describe(run)))
    return _begin(run, options)


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


def _check_same(recorded: dict[str, Any], run: Run, path: Path) -> None:
    """Raises RecipeError if the recorded work is not that of `run`: devices and mesh may differ,
    but the work may not."""
    requested = _work_of(recipes.describe(run))
    texts = [
        f"{name} is {there}, not {here}" for name, here, there in differing(requested, recorded)
    ]
    if texts:
        raise RecipeError(f"--resume: {path} is another run, whose {listed(texts, 3, '; ')}")


def _recorded_work(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """The work of a recorded run. Raises RecipeError for a record of another version."""
    try:
        return _work_of(record["recipe"])
    except (LookupError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, LookupError) else "its recipe has another form"
        raise RecipeError(f"--resume: {path} is no record of this version: {reason}") from error


def _work_of(recipe: dict[str, Any]) -> dict[str, Any]:
    """The settings that all starts of a run have in common."""
    batch = {key: recipe["batch"][key] for key in ("global_batch", "sequence_length")}
    keys = ("recipe", "model", "precision", "optimizer", "steps", "seed")
    return {"batch": batch, **{key: recipe[key] for key in keys}}
