"""Checkpoints of a run, saved and restored by Orbax: sharded, asynchronous, complete or invisible.

A state is stored as its arrays, named by their path in the pytree, beside the recipe it belongs to.
A checkpoint is a folder named by the number of completed steps; Orbax writes it under another name
and renames it when every process is done.
"""

import asyncio
import contextlib
import functools
import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from jaxbench.cluster.causes import cause_of
from jaxbench.errors import RecipeError, RunFailed

FOLDER = "checkpoints"
"""Where a run keeps its checkpoints, inside its own folder."""

STATE, RECIPE = "state", "recipe"
"""The items of a checkpoint: the arrays, and what they are the state of."""


def steps(folder: Path) -> list[int]:
    """Completed steps of the complete checkpoints in a folder, in order."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in found if _complete(path))


def _complete(path: Path) -> bool:
    named = path.name.isdigit() and (path / RECIPE).is_dir()
    return named and ocp.utils.is_checkpoint_finalized(epath.Path(path))


def find(path: Path) -> Path:
    """The checkpoint that a user names: its own folder, or the last one of a run or of a folder of
    checkpoints.

    Raises RecipeError where there is none.
    """
    if _complete(path):
        return path
    for folder in (path / FOLDER, path):
        if there := steps(folder):
            return folder / str(there[-1])
    raise RecipeError(f"{path} holds no complete checkpoint")


def check(path: Path, recipe: dict[str, Any]) -> None:
    """Raises RecipeError unless the checkpoint `path` is of the recipe's model."""
    try:
        theirs = json.loads((path / RECIPE / "metadata").read_text())["model"]
    except (OSError, ValueError, LookupError) as error:
        raise RecipeError(f"{path} is no checkpoint of jaxbench: it holds no recipe") from error
    ours = recipe["model"]
    differing = [key for key in ours if key in theirs and theirs[key] != ours[key]]
    if differing:
        text = ", ".join(f"{key} {theirs[key]} instead of {ours[key]}" for key in differing)
        raise RecipeError(f"{path} is of another model: {text}")


class Checkpoints:
    """Saves the state of one run into `<folder>/checkpoints`, and keeps the last ones.

    The run begins after `start` steps, which are saved somewhere or are none. `every` is the number
    of steps between saves; None saves at the end only. `say` takes the
    published log lines. `saved` has one entry per save: completed steps, bytes, the seconds for
    which training stood still, the seconds until the checkpoint was complete, and the rate in GB/s.
    """

    def __init__(
        self,
        folder: Path,
        recipe: dict[str, Any],
        start: int,
        every: int | None,
        keep: int,
        say: Callable[[str], None],
    ):
        self.saved: list[dict[str, Any]] = []
        self._recipe, self._every, self._say = recipe, every, say
        self._folder = folder.absolute() / FOLDER
        self._started = 0.0
        self._last = start
        self._lock = threading.Lock()
        with _reported(f"{self._folder} cannot be used"):
            self._manager = ocp.CheckpointManager(
                epath.Path(self._folder),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=keep,
                    cleanup_tmp_directories=True,
                    async_options=ocp.AsyncOptions(post_finalization_callback=self._completed),
                ),
            )

    def due(self, step: int, ending: bool) -> bool:
        """Whether the state after `step` steps is to be saved."""
        periodic = self._every is not None and step % self._every == 0
        return step != self._last and (periodic or ending)

    def act(self, step: int, state: Any, ending: bool) -> None:
        """Saves the state after `step` steps; returns when it is copied from the devices, or when
        it is complete if the run is `ending`."""
        self.wait()
        arrays = _named(state)
        self._started = time.time()
        start = time.perf_counter()
        with _reported(f"the checkpoint of step {step} was not saved{self._good()}"):
            self.saved.append({"step": step, "bytes": sum(x.nbytes for x in arrays.values())})
            items = ocp.args.Composite(**{
                STATE: ocp.args.StandardSave(arrays), RECIPE: ocp.args.JsonSave(self._recipe)
            })  # fmt: skip
            with jax.transfer_guard("allow"):
                self._manager.save(step, args=items, force=True)
            self._last = step
            self._report(blocking_s=time.perf_counter() - start)
        if ending:
            self.wait()

    def wait(self) -> None:
        """Waits for the save that is under way. Raises RunFailed if it failed."""
        with _reported(f"the checkpoint of step {self._last} was not saved{self._good()}"):
            try:
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
            except Exception:
                # What was written of it may fill the disk that the record is to be written to.
                for part in self._folder.glob(f"{self._last}.*-tmp*"):
                    shutil.rmtree(part, ignore_errors=True)
                raise

    def _report(self, **figures: float) -> None:
        """Adds to the last entry; called from Orbax's thread too, while the record is written."""
        with self._lock:
            self.saved[-1] = self.saved[-1] | figures

    def _completed(self) -> None:
        entry, seconds = self.saved[-1], time.time() - self._started
        self._report(save_s=seconds, gb_per_s=entry["bytes"] / 1e9 / seconds)
        self._say(
            f"Global Checkpoint Save : Rank: {jax.process_index()} : "
            f"Iteration: {entry['step'] - 1} : Start time: {self._started:.3f}s : "
            f"Save duration: {seconds:.3f}s"
        )

    def _good(self) -> str:
        good = [s for s in steps(self._folder) if s != self._last]
        return f"; the last good one is of step {good[-1]}" if good else "; there is no other"


def restore(path: Path, like: Any, say: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
    """The state of the checkpoint `path` on the current mesh, and what loading took.

    `like` is the abstract state: shapes, dtypes, shardings. The mesh and the processes may be
    others than those that saved it. Raises RunFailed for one that holds other arrays or cannot be
    read.
    """
    started, start = time.time(), time.perf_counter()
    wanted, folder = _abstract(like), epath.Path(path.absolute())
    handlers = {STATE: ocp.StandardCheckpointHandler(), RECIPE: ocp.JsonCheckpointHandler()}
    with (
        _reported(f"{path} cannot be restored"),
        jax.transfer_guard("allow"),
        ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as reader,
    ):
        _same_arrays(path, reader.metadata(folder).item_metadata[STATE].tree, wanted)
        items = ocp.args.Composite(**{STATE: ocp.args.StandardRestore(wanted)})
        arrays = jax.block_until_ready(reader.restore(folder, items)[STATE])
    seconds = time.perf_counter() - start
    size = sum(x.nbytes for x in arrays.values())
    say(
        f"Global Checkpoint Load : Rank : {jax.process_index()} : Start time : {started:.3f}s : "
        f"Time spent in load_checkpoint: {seconds:.3f}s"
    )
    loaded = {"path": str(path), "step": int(path.name), "bytes": size, "load_s": seconds}
    state = jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])
    return state, loaded | {"gb_per_s": size / 1e9 / seconds}


def _named(tree: Any) -> dict[str, Any]:
    """The leaves by their path, in the order of the tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def _abstract(like: Any) -> dict[str, jax.ShapeDtypeStruct]:
    mesh = jax.sharding.get_mesh()

    def leaf(x):
        spec = x.sharding.spec if x.sharding is not None else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return {name: leaf(x) for name, x in _named(like).items()}


def _same_arrays(path: Path, theirs: Any, ours: dict[str, jax.ShapeDtypeStruct]) -> None:
    found = {name: (tuple(x.shape), jax.numpy.dtype(x.dtype)) for name, x in theirs.items()}
    wanted = {name: (x.shape, x.dtype) for name, x in ours.items()}
    differing = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    if differing:
        raise RunFailed(
            f"{path} holds another state: {len(differing)} arrays differ, the first is "
            f"{differing[0]}"
        )


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Turns what Orbax and the file system raise into a line that begins with `what`."""
    _hush()
    try:
        yield
    except RunFailed:
        raise
    except Exception as error:  # Orbax, TensorStore and the system each raise their own
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = " ".join(str(cause).split()) or type(cause).__name__
        if len(reason) > 400:
            reason = f"{reason[:200]} ... {reason[-200:]}"
        found = cause_of(cause)  # a save waits for the devices, and so for the other processes
        raise RunFailed(
            f"{what}: {reason}", found if found in ("gpu", "network") else "storage"
        ) from error


@functools.cache
def _hush() -> None:
    """Orbax logs a page about what it raises too. It closes its event loop at the first array that
    fails, and drops the others' coroutines: Python would print another page about each."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(left: Any) -> None:
        dropped = asyncio.iscoroutine(left.object)
        if not dropped and str(left.exc_value) != "Event loop is closed":
            before(left)

    sys.unraisablehook = hook
