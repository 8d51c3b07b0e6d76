"""`--check-repeatable`: compares two runs of a few steps bit by bit."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxbench.base.errors import RunFailed
from jaxbench.cluster import job
from jaxbench.recipe.settings import Run
from jaxbench.train.loop import run_steps

TRAINED = 4
"""Steps of each run: enough that optimizer moments and FP8 scaling histories take effect."""


class Digests(dict[str, str]):
    """A pause (`train.loop.Pause`) at the end of training that computes a digest of each array of
    the state, as far as this process holds it. Keys are the paths in the pytree."""

    def due(self, step: int, ending: bool) -> bool:
        return ending

    def act(self, step: int, state: Any, ending: bool) -> None:
        """Computes the digests, with one shard at a time in host memory."""
        for path, array in jax.tree_util.tree_leaves_with_path(state):
            digest = hashlib.blake2b(digest_size=16)
            for shard in array.addressable_shards:
                digest.update(np.ascontiguousarray(jax.device_get(shard.data)).tobytes())
            self[jax.tree_util.keystr(path, simple=True, separator=".")] = digest.hexdigest()


def check(run: Run, program: Callable, say: Callable[[str], None]) -> dict[str, int]:
    """Trains a few steps from the initial state, twice. Returns the numbers of steps and arrays.

    Raises RunFailed in every process if losses, gradient norms or the state differ in any of them.
    """
    short = replace(run, steps=min(TRAINED, run.steps))
    (figures, state), (others, second) = _train(short, program), _train(short, program)
    differences = job.gather("repeatable", _compare(figures, others) or _compare(state, second))
    difference = job.broadcast("difference", lambda: next(filter(None, differences), ""))
    if difference:
        raise RunFailed(f"not repeatable: {difference}", "numbers")
    say(f"repeatable: {short.steps} steps twice gave bitwise equal losses and {len(state)} arrays")
    return {"steps": short.steps, "arrays": len(state)}


def _train(run: Run, program: Callable) -> tuple[dict[str, float], Digests]:
    """The loss and gradient norm of each step, and the digests of the state after the last step."""
    digests = Digests()
    figures = {
        f"{name} of step {step['step']}": step[name]
        for step in run_steps(run, program, pauses=[digests])
        for name in ("loss", "grad_norm")
    }
    return figures, digests


def _compare(first: dict[str, Any], second: dict[str, Any]) -> str:
    """The first difference and the number of differences; empty if there is none."""
    names = [name for name in first if first[name] != second[name]]
    if not names:
        return ""
    name = names[0]
    return (
        f"{name} was {first[name]}, then {second[name]} in process {jax.process_index()} "
        f"({len(names)} of {len(first)} differ)"
    )
