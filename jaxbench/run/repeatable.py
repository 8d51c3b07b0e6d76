"""`--check-repeatable`: whether the compiled step gives the same bits twice on these devices."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxbench.cluster import job
from jaxbench.errors import RunFailed
from jaxbench.recipe.settings import Run
from jaxbench.train.loop import run_steps

STEPS = 4
"""That are run twice: the optimizer's moments and the histories of FP8 scaling take part."""


@dataclass
class Digests:
    """A pause at the end (`train.loop.Pause`): digests of what each array of the state has on this
    process's devices, by its path."""

    found: dict[str, str] = field(default_factory=dict)

    def due(self, step: int, ending: bool) -> bool:
        """At the end only."""
        return ending

    def act(self, step: int, state: Any, ending: bool) -> None:
        """Takes the digests, with one shard at a time in the host's memory."""
        for path, array in jax.tree_util.tree_leaves_with_path(state):
            digest = hashlib.blake2b(digest_size=16)
            for shard in array.addressable_shards:
                digest.update(np.ascontiguousarray(jax.device_get(shard.data)).tobytes())
            self.found[jax.tree_util.keystr(path, simple=True, separator=".")] = digest.hexdigest()


def check(run: Run, program: Callable, say: Callable[[str], None]) -> dict[str, int]:
    """Trains some steps from the initial state, twice; returns how many, and of how many arrays the
    state is. Raises RunFailed in every process if any of them finds a bit that differs."""
    steps = min(STEPS, run.steps)
    short = replace(run, steps=steps)
    (losses, first), (others, second) = _trained(short, program), _trained(short, program)
    found = job.gather("repeatable", _difference(losses, others) or _difference(first, second))
    told = job.from_first("repeatable told", lambda: next(filter(None, found), ""))
    if told:
        raise RunFailed(f"not repeatable: {told}", "numbers")
    say(f"repeatable: {steps} steps twice, the same losses and {len(first)} arrays bit for bit")
    return {"steps": steps, "arrays": len(first)}


def _trained(run: Run, program: Callable) -> tuple[dict[str, float], dict[str, str]]:
    """(loss and gradient norm of each step, digests of the state after the last)."""
    digests = Digests()
    figures = {
        f"{name} of step {step['step']}": step[name]
        for step in run_steps(run, program, pauses=[digests])
        for name in ("loss", "grad_norm")
    }
    return figures, digests.found


def _difference(first: dict[str, Any], second: dict[str, Any]) -> str:
    """The first that differs, and how many more do; empty where nothing does."""
    names = [name for name in first if first[name] != second[name]]
    if not names:
        return ""
    name, process = names[0], jax.process_index()
    return (
        f"{name} was {first[name]}, then {second[name]} in process {process} "
        f"({len(names)} of {len(first)} differ)"
    )
