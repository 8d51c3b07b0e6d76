"""Checkpoints on disk: which of them can be read and hold the state of a recipe.

Needs no Orbax, which is slow to import.
"""

import json
from pathlib import Path
from typing import Any

from jaxbench.base.errors import RecipeError, RunFailed, listed
from jaxbench.recipe.build import differing

FOLDER = "checkpoints"
"""Subfolder of a run for its checkpoints."""

STATE, RECIPE = "state", "recipe"
"""Items of a checkpoint: the arrays and the recipe."""

COMMIT = "commit_success.txt"
"""Newer versions of Orbax write this file last, into each item and into the checkpoint."""

HISTORY = "dtype", "scaling", "amax_history"
"""Settings of `precision` on which the histories of delayed scaling in the state depend."""


def steps(folder: Path) -> list[int]:
    """Step numbers of the complete checkpoints in a folder, in ascending order."""
    return sorted(int(path.name) for path in numbered(folder) if unreadable(path) is None)


def numbered(folder: Path) -> list[Path]:
    """The checkpoints in a folder. While Orbax writes one, its name is not only a number."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return [path for path in paths if path.name.isdecimal()]


def readable(path: Path, recipe: dict[str, Any]) -> tuple[list[Path], list[str]]:
    """The checkpoints from which a run can start, newest first, and the reasons why newer ones are
    skipped. `path` is a checkpoint, a run, or a folder of checkpoints.

    Raises RecipeError if there is no checkpoint, or if the state of all that can be read differs
    from the recipe's. Raises RunFailed if none can be read. This looks only at metadata: data that
    cannot be read show when the state is restored.
    """
    found = numbered(path / FOLDER) or numbered(path)
    # The folder of a Slurm job is a number too, but holds no item of a checkpoint.
    is_checkpoint = (path / STATE).exists() or (path / RECIPE).exists()
    if not found and path.name.isdecimal() and is_checkpoint:
        found = [path]
    if not found:
        raise RecipeError(f"{path} has no checkpoint")
    good: list[Path] = []
    skipped: list[str] = []
    others: list[str] = []
    for candidate in sorted(found, key=lambda p: int(p.name), reverse=True):
        if reason := unreadable(candidate):
            why = f"{candidate} cannot be read: {reason}"
        elif difference := _difference(candidate, recipe):
            why = f"{candidate} has another state: {difference}"
            others.append(why)
        else:
            good.append(candidate)
            continue
        if not good:
            skipped.append(why)
    if others and not good:
        raise RecipeError(others[0])
    if not good:
        raise RunFailed(listed(skipped, 3, "; "), "storage")
    return good, skipped


def unreadable(path: Path) -> str | None:
    """Why a checkpoint cannot be read, as far as its metadata show; None if it can be read."""
    try:
        if (path / STATE / COMMIT).exists() and not (path / COMMIT).exists():
            return f"{path / COMMIT} is missing, so it was not completed"
        json.loads((path / RECIPE / "metadata").read_text())["model"]
        json.loads((path / STATE / "_METADATA").read_text())
        next((path / STATE).iterdir())
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, LookupError, TypeError) as error:
        return f"its metadata are incomplete or not ours: {error}"
    return None


def _difference(path: Path, recipe: dict[str, Any]) -> str:
    """How the state of a checkpoint differs from a recipe's, in the words of settings; empty if it
    does not differ."""
    there = json.loads((path / RECIPE / "metadata").read_text())
    names = HISTORY if _history(recipe) != _history(there) else ()
    here, there = (
        {
            "model": r["model"],
            "optimizer": {"moments": r.get("optimizer", {}).get("moments", "fp32")},
            "precision": {name: r["precision"].get(name) for name in names},
        }
        for r in (recipe, there)
    )
    return ", ".join(
        f"{name}: {value} here, {other} in the checkpoint"
        for name, value, other in differing(here, there)
    )


def _history(recipe: dict[str, Any]) -> int:
    """Steps in the histories of delayed scaling; 0 without delayed scaling."""
    precision = recipe.get("precision", {})
    delayed = precision.get("dtype") == "fp8" and precision.get("scaling") == "delayed"
    return precision.get("amax_history", 0) if delayed else 0
