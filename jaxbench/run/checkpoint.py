"""Checkpoints of a run, saved and restored by Orbax: sharded, asynchronous, atomic.

A checkpoint is a folder named by the number of completed steps. It holds the arrays of the train
state, named by their path in the pytree, and the recipe. Orbax writes it under another name, and
renames it when every process is done.
"""

import asyncio
import contextlib
import functools
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint.multihost import get_barrier_sync_fn

from jaxbench.base.errors import RunFailed, cause_of
from jaxbench.base.hardware import is_null
from jaxbench.cluster import job
from jaxbench.cluster.watchdog import Watchdog
from jaxbench.run.records import Recorder
from jaxbench.run.saved_checkpoints import FOLDER, RECIPE, STATE, steps

SAVE_S = 4 * 3600
"""The longest time for a save in the background. The state of 405B has 4.9 TB, for which the 20
minutes that Orbax gives are too short on many file systems; the watchdog ends a save that hangs."""


class Checkpoints:
    """A pause (`train.loop.Pause`) that saves the state into `<folder>/checkpoints`.

    The run starts after `start` steps. A save is due every `every` steps (None: never) and at the
    end. The last `keep` checkpoints stay. The recorder and the watchdog learn of each save. `saved`
    has one entry per save: completed steps, bytes, seconds for which training waited, seconds until
    the checkpoint was complete, and the rate in GB/s.
    """

    def __init__(
        self,
        folder: Path,
        start: int,
        every: int | None,
        keep: int,
        recorder: Recorder,
        watchdog: Watchdog,
    ):
        self.saved: list[dict[str, Any]] = []
        self._every, self._recorder, self._watchdog = every, recorder, watchdog
        self._folder = folder.absolute() / FOLDER
        self._started = 0.0
        self._last = start
        self._lock = threading.Lock()
        if jax.process_index() == 0:
            _set_aside(self._folder, start)
        job.meet("before the first save")
        with _one_line(f"{self._folder} cannot be used"):
            self._manager = ocp.CheckpointManager(
                epath.Path(self._folder),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=keep,
                    cleanup_tmp_directories=True,
                    async_options=ocp.AsyncOptions(
                        post_finalization_callback=self._completed,
                        barrier_sync_fn=_unless_failed(get_barrier_sync_fn()),
                        timeout_secs=SAVE_S,
                    ),
                ),
            )

    def due(self, step: int, ending: bool) -> bool:
        """Returns whether the state after `step` steps has to be saved."""
        periodic = self._every is not None and step % self._every == 0
        return step != self._last and (periodic or ending)

    def act(self, step: int, state: Any, ending: bool) -> None:
        """Saves the state after `step` steps. Returns when the state is copied from the devices,
        or, at the end of training, when the checkpoint is complete."""
        self._recorder.phase("saving", f"the state after {step} steps")
        self._watchdog.phase = "saving"
        self.wait()
        arrays = _by_path(state)
        self._started, start = time.time(), time.perf_counter()
        with self._saving(step):
            self.saved.append({"step": step, "bytes": sum(x.nbytes for x in arrays.values())})
            recipe = ocp.args.JsonSave(self._recorder.record["recipe"])
            items = ocp.args.Composite(**{STATE: ocp.args.StandardSave(arrays), RECIPE: recipe})
            self._manager.save(step, args=items, force=True)
            self._last = step
            self._report(blocking_s=time.perf_counter() - start)
        if ending:
            self.wait()
        self._watchdog.phase = "training"
        self._recorder.add(checkpoints=self.saved)

    def wait(self) -> None:
        """Waits for the save that is under way. Raises RunFailed if it failed."""
        with self._saving(self._last):
            try:
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
            except Exception:
                # The incomplete checkpoint may fill the disk, which the record needs.
                for part in self._folder.glob(f"{self._last}.*-tmp*"):
                    shutil.rmtree(part, ignore_errors=True)
                raise

    def _saving(self, step: int) -> contextlib.AbstractContextManager[None]:
        return _one_line(
            f"the checkpoint of step {step} was not saved", partial(self._others, step)
        )

    def _report(self, **figures: float) -> None:
        """Adds to the last entry; called from Orbax's thread too, while the record is written."""
        with self._lock:
            self.saved[-1] = self.saved[-1] | figures

    def _completed(self) -> None:
        entry, seconds = self.saved[-1], time.time() - self._started
        self._report(save_s=seconds, gb_per_s=entry["bytes"] / 1e9 / seconds)
        self._recorder.say(
            f"Global Checkpoint Save : Rank: {jax.process_index()} : "
            f"Iteration: {entry['step'] - 1} : Start time: {self._started:.3f}s : "
            f"Save duration: {seconds:.3f}s"
        )

    def _others(self, failed: int) -> str:
        """The last complete checkpoint, for the message of a failed one."""
        try:
            complete = [step for step in steps(self._folder) if step != failed]
        except OSError:
            return ""
        return f"; the last good one has step {complete[-1]}" if complete else "; there is no other"


def _set_aside(folder: Path, start: int) -> None:
    """Renames checkpoints after step `start`. They could not be read, and the run will reach their
    steps again."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.isdecimal() and int(path.name) > start:
            path.rename(folder / f"unreadable-{path.name}-{time.time_ns()}")


def _unless_failed(barrier: Callable[..., None]) -> Callable[..., None]:
    """A barrier of Orbax at which a process does not wait if its own save failed. The other
    processes wait for its part of the checkpoint, so they would keep it there for as long
    as a save may take."""

    def wait(*, key: str, timeout_ms: int) -> None:
        if sys.exc_info()[0] is None:
            barrier(key=key, timeout_ms=timeout_ms)

    return wait


def restore(path: Path, like: Any, say: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
    """Returns the state of a checkpoint on the current mesh, and the record's `restored`.

    `like` is the abstract state: shapes, dtypes, shardings. Mesh and process count may differ from
    those that saved it. Raises RunFailed for a checkpoint with other arrays, for an unreadable one,
    and for one whose step is not the number of its folder.
    """
    started, start = time.time(), time.perf_counter()
    abstract, folder = _abstract(like), epath.Path(path.absolute() / STATE)
    # No `Checkpointer`: at its barrier the others would wait for a process that fails.
    with (
        _one_line(f"{path} cannot be restored"),
        contextlib.closing(ocp.StandardCheckpointHandler()) as reader,
    ):
        _check_arrays(path, reader.metadata(folder).tree, abstract)
        restored = reader.restore(folder, args=ocp.args.StandardRestore(abstract))
        arrays = jax.block_until_ready(restored)
        number, step = int(path.name), arrays["step"]
        if int(step) != number:
            if not is_null(jax.devices()[0].device_kind):  # a null GPU counts no steps
                raise RunFailed(
                    f"{path} has the state after {step} steps, so its folder was renamed"
                )
            arrays["step"] = jax.device_put(step.dtype.type(number), step.sharding)
    seconds = time.perf_counter() - start
    size = sum(x.nbytes for x in arrays.values())
    say(
        f"Global Checkpoint Load : Rank : {jax.process_index()} : Start time : {started:.3f}s : "
        f"Time spent in load_checkpoint: {seconds:.3f}s"
    )
    state = jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in abstract])
    return state, {
        "path": str(path), "step": number, "bytes": size, "load_s": seconds,
        "gb_per_s": size / 1e9 / seconds,
    }  # fmt: skip


def _by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their path, in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def _abstract(like: Any) -> dict[str, jax.ShapeDtypeStruct]:
    mesh = jax.sharding.get_mesh()

    def leaf(x):
        spec = x.sharding.spec if x.sharding is not None else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return {name: leaf(x) for name, x in _by_path(like).items()}


def _check_arrays(path: Path, saved: Any, abstract: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Raises RunFailed unless a checkpoint has the arrays of the abstract state."""
    shapes = [
        {name: (tuple(x.shape), jax.numpy.dtype(x.dtype)) for name, x in arrays.items()}
        for arrays in (saved, abstract)
    ]
    names = {**shapes[0], **shapes[1]}
    differing = [name for name in names if shapes[0].get(name) != shapes[1].get(name)]
    if differing:
        raise RunFailed(
            f"{path} has another state: {len(differing)} arrays differ, the first is {differing[0]}"
        )


@contextlib.contextmanager
def _one_line(what: str, hint: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turns an error of Orbax or the file system into a RunFailed of one line: what failed, a hint
    and the reason. Allows transfers, since Orbax also makes some to agree with the other
    processes."""
    _silence()
    try:
        with jax.transfer_guard("allow"):
            yield
    except RunFailed:
        raise
    except Exception as error:  # Orbax, TensorStore and the system each raise their own
        origin: BaseException = error
        while origin.__cause__ is not None:
            origin = origin.__cause__
        reason = " ".join(str(origin).split()) or type(origin).__name__
        if len(reason) > 400:
            reason = f"{reason[:200]} ... {reason[-200:]}"
        cause = cause_of(origin)  # a save waits for the devices, and so for other processes
        cause = cause if cause in ("gpu", "network") else "storage"
        raise RunFailed(f"{what}{hint()}: {reason}", cause) from error


@functools.cache
def _silence() -> None:
    """Suppresses long messages about errors that are raised anyway: Orbax logs one, and Python
    prints one for each coroutine that Orbax drops when an array fails."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    default = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        dropped = asyncio.iscoroutine(unraisable.object)
        if not dropped and str(unraisable.exc_value) != "Event loop is closed":
            default(unraisable)

    sys.unraisablehook = hook
