"""A persistent compilation cache that is safe for all processes of all jobs of one user. It keeps
programs, and what XLA found when it autotuned their kernels."""

import contextlib
import hashlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxbench.base.files import private
from jaxbench.cluster import job
from jaxbench.jax_internals import KEEPS_AUTOTUNING

WRITE_FAILED = "Error writing persistent compilation cache entry"
"""The beginning of JAX's warning (jax/_src/compiler.py)."""


@dataclass(frozen=True)
class Cached:
    """What a cache has before anything is compiled.

    `program` says whether it has the program. `autotuned` is the number of autotuning results,
    counted in the first process; None if none are kept. `options` are the compiler options that
    keep them.
    """

    program: bool = False
    autotuned: int | None = None
    options: dict[str, str] = field(default_factory=dict)


@contextmanager
def cache_in(folder: Path | None) -> Iterator[None]:
    """Lets JAX cache what is compiled inside this context in a folder; with None, nowhere."""
    before = jax.config.values["jax_compilation_cache_dir"]
    compilation_cache.reset_cache()  # JAX decides once whether it uses one
    jax.config.update("jax_compilation_cache_dir", folder and str(folder))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


@contextmanager
def program_cache(
    folder: Path | None,
    identity: dict[str, Any],
    say: Callable[[str], None],
    autotuning: dict[str, Any] | None = None,
) -> Iterator[Cached]:
    """Caches the programs compiled inside this context, in a subfolder of `folder` for this
    identity. Yields what was cached before. A folder is not used if it is not this user's alone,
    since its programs are machine code, or if it cannot be read; `say` reports both.

    While XLA autotunes, it waits for the results of every rank, so either all ranks find a program
    or none does. The subfolder is renamed into place when the first job has compiled, and is used
    only if all processes of a job see it.

    A result of autotuning belongs to a single kernel, so all programs with the identity
    `autotuning` share the results. XLA divides the kernels among the ranks, and each rank keeps
    what it found. JAX's own setting would keep only the results of rank 0, and of one program.
    """
    if folder is None:
        yield Cached()
        return
    name = name_of(identity)
    with contextlib.ExitStack() as stack:
        own: Path | None = None
        cached, problem, kept = False, None, Cached()
        try:
            own = stack.enter_context(private(folder))
            cached = (own / name).is_dir()
            if autotuning and KEEPS_AUTOTUNING:
                kept = _autotuned(own / f"autotuned-{name_of(autotuning)}")
        except OSError as error:
            problem = f"{folder} cannot be this user's compilation cache: {error.strerror}"
        found = job.all_gather("compilation cache", (cached, problem))
        if problems := [text for _, text in found if text]:
            say(f"warning: {problems[0]}; the program is compiled again and is not kept")
            own, kept = None, Cached()
        cached = not problems and all(seen for seen, _ in found)
        new = f"{name}.{os.getpid()}-{time.time_ns()}"
        used = job.broadcast("compilation cache folder", lambda: name if cached else new)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        with cache_in(own and own / used), _failed_writes() as failed:
            yield replace(kept, program=cached)
        if jax.process_index() == 0 and own and not cached and (own / used).is_dir():
            with contextlib.suppress(OSError):  # another job was faster
                if not failed:  # no later start could read a part of a program
                    (own / used).rename(own / name)
            shutil.rmtree(own / used, ignore_errors=True)


@contextmanager
def _failed_writes() -> Iterator[list[str]]:
    """Yields a list that has, after this context, JAX's warnings that it could not write into its
    cache. All warnings are shown then."""
    failed: list[str] = []
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield failed
    finally:
        texts = (str(warning.message) for warning in caught)
        failed += [text for text in texts if text.startswith(WRITE_FAILED)]
        for w in caught:
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)


def name_of(identity: dict[str, Any]) -> str:
    """The name of the folder for an identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _autotuned(folder: Path) -> Cached:
    """The autotuning results in a folder. Makes the folder if there is none."""
    folder.mkdir(mode=0o700, exist_ok=True)
    first = jax.process_index() == 0
    count = sum(path.is_file() for path in folder.rglob("*")) if first else 0
    options = {
        "xla_gpu_per_fusion_autotune_cache_dir": str(folder),
        "xla_gpu_experimental_autotune_cache_mode": "AUTOTUNE_CACHE_MODE_UPDATE",
    }
    return Cached(autotuned=count, options=options)


def cache_identity(record: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record on which compiled programs depend. They choose a cache folder; inside
    it JAX's own key is finer."""
    devices = {k: v for k, v in record["hardware"].items() if k != "host"}
    versions = {k: v for k, v in record["versions"].items() if k != "commit"}
    sizes = {name: choice["sizes"] for name, choice in record.get("kernel_sizes", {}).items()}
    identity = {"hardware": devices, "versions": versions, "kernel_sizes": sizes}
    return identity | {k: record[k] for k in ("recipe", "flags")}


def autotuning_identity(record: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record on which autotuning results depend. XLA's own key has the kernel and
    the GPU."""
    ours = "jaxbench", "commit", "source", "python"
    versions = {k: v for k, v in record["versions"].items() if k not in ours}
    hardware = {k: record["hardware"][k] for k in ("device", "runtime")}
    return {"hardware": hardware, "versions": versions}


def autotuning_notice(cached: Cached) -> str:
    """Says before compiling what autotuning will cost, as far as we know."""
    if cached.autotuned:
        return f"autotuning: {cached.autotuned} results of earlier starts are used again"
    if cached.options:
        kept = "later starts use the results"
    elif KEEPS_AUTOTUNING:
        kept = "the results are not kept (--compilation-cache FOLDER keeps them)"
    else:
        kept = "the results are not kept (needs jax 0.11.2)"
    return (
        "autotuning: XLA times variants of its kernels on the GPUs, which a plan does not do; "
        f"{kept}"
    )
