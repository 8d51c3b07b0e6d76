"""Chooses the sizes of Pallas kernels for a job (`--tune-kernels`): the processes time candidates
together, agree on the fastest, and keep them."""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from jaxbench.base.files import private, write_json
from jaxbench.cluster import job
from jaxbench.recipe.settings import Run
from jaxbench.run.cache import name_of
from jaxbench.train import kernel_timing


def tune(
    run: Run, folder: Path | None, identity: dict[str, Any], say: Callable[[str], None]
) -> tuple[AbstractContextManager[None], dict[str, Any]]:
    """Chooses the sizes for the kernels of a run's program on the current mesh. Returns a context
    in which kernels have them, and what run.json records.

    Sizes come from earlier starts, which kept them in `folder` for the same `identity`, or are
    timed now. Every process times a share of the kernels, and all use the same results: programs
    of a job have to be equal.
    """
    asked = kernel_timing.cases(run)
    kept = job.broadcast("kept kernel sizes", lambda: read(folder, identity, say))
    known = {
        name: kept[name]
        for name, case in asked.items()
        if kernel_timing.is_choice(kept.get(name), case)
    }
    missing = [case for name, case in sorted(asked.items()) if name not in known]
    if missing:
        count = sum(len(case.candidates) for case in missing)
        say(f"kernel sizes: timing {count} candidates for {len(missing)} kernels")
    start = time.perf_counter()
    share = missing[jax.process_index() :: jax.process_count()]
    timed = {
        case.name: kernel_timing.choose(case, kernel_timing.timings(case, run)) for case in share
    }
    job.meet("timing kernels")
    for found in job.all_gather("kernel sizes", timed):
        known |= found
    if missing and jax.process_index() == 0:
        keep(folder, identity, kept | known, say)
    default = sum(known[name]["sizes"] == str(case.candidates[0]) for name, case in asked.items())
    took = f"timed {len(missing)} kernels in {time.perf_counter() - start:.1f} s"
    known_before = f"{len(asked) - len(missing)} were known"
    say(f"kernel sizes: {took}, {known_before}; {default} of {len(asked)} are the default")
    sizes = {name: choice["sizes"] for name, choice in known.items()}
    return kernel_timing.using_sizes(asked, sizes), known


def file_in(folder: Path, identity: dict[str, Any]) -> Path:
    return folder / f"kernel-sizes-{name_of(identity)}.json"


def read(folder: Path | None, identity: dict[str, Any], say: Callable[[str], None]) -> dict:
    """The choices that earlier starts kept in a folder of this user; none if it cannot be read."""
    if folder is None:
        return {}
    try:
        with private(folder) as own:
            kept = json.loads(file_in(own, identity).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        say(f"warning: kernel sizes in {folder} cannot be read ({error}); they are timed again")
        return {}
    return kept if isinstance(kept, dict) else {}


def keep(
    folder: Path | None, identity: dict[str, Any], kept: dict, say: Callable[[str], None]
) -> None:
    """Keeps choices for later starts."""
    if folder is None:
        return
    try:
        with private(folder) as own:
            write_json(file_in(own, identity), kept)
    except OSError as error:
        say(f"warning: kernel sizes cannot be kept in {folder}: {error.strerror}")
