"""Persistent compilation cache, safe for all processes of all jobs."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxbench.cluster import job


@contextmanager
def cache_in(folder: Path | None) -> Iterator[None]:
    """Lets JAX cache what is compiled inside in a folder, or nowhere."""
    before = jax.config.values["jax_compilation_cache_dir"]
    compilation_cache.reset_cache()  # JAX decides once whether it uses one
    jax.config.update("jax_compilation_cache_dir", folder and str(folder))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


@contextmanager
def program_cache(folder: Path | None, identity: dict[str, Any]) -> Iterator[bool]:
    """Caches the programs compiled inside in a subfolder of `folder` for this identity; yields
    whether they were cached before.

    While it autotunes, XLA waits for the results of every rank, so either all ranks find a program
    or none. The subfolder is renamed into place when the first job has compiled, and used only if
    all processes of a job see it.
    """
    if folder is None:
        yield False
        return
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    complete, new = folder / name, folder / f"{name}.{os.getpid()}-{time.time_ns()}"
    cached = job.all_agree("compilation cache", complete.is_dir())
    used = Path(job.broadcast("compilation cache folder", lambda: str(complete if cached else new)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    # XLA's own caches are written by every rank, and JAX would hash their paths into its key.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    with cache_in(used):
        yield cached
    if jax.process_index() == 0 and not cached and used.is_dir():
        try:
            used.rename(complete)
        except OSError:  # another job was faster
            shutil.rmtree(used)


def cache_identity(record: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record on which compiled programs depend; they choose a cache folder, in
    which JAX's own key is finer."""
    devices = {k: v for k, v in record["hardware"].items() if k != "host"}
    versions = {k: v for k, v in record["versions"].items() if k != "commit"}
    return {"hardware": devices, "versions": versions} | {k: record[k] for k in ("recipe", "flags")}
