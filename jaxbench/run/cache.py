"""Persistent compilation cache, safe for all processes of all jobs of one user."""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxbench.cluster import job
from jaxbench.files import private


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
def program_cache(
    folder: Path | None, identity: dict[str, Any], say: Callable[[str], None]
) -> Iterator[bool]:
    """Caches the programs compiled inside in a subfolder of `folder` for this identity; yields
    whether they were cached before. A folder that is not this user's alone is not used, since its
    programs are machine code; nor is an unreadable one. Both are said.

    While it autotunes, XLA waits for the results of every rank, so either all ranks find a program
    or none. The subfolder is renamed into place when the first job has compiled, and used only if
    all processes of a job see it.
    """
    if folder is None:
        yield False
        return
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    with contextlib.ExitStack() as stack:
        own: Path | None = None
        cached, problem = False, None
        try:
            own = stack.enter_context(private(folder))
            cached = (own / name).is_dir()
        except OSError as error:
            problem = f"{folder} is no compilation cache for this user: {error.strerror}"
        found = job.all_gather("compilation cache", (cached, problem))
        if problems := [text for _, text in found if text]:
            say(f"warning: {problems[0]}; the program is compiled anew and not kept")
            own = None
        cached = not problems and all(seen for seen, _ in found)
        new = f"{name}.{os.getpid()}-{time.time_ns()}"
        used = job.broadcast("compilation cache folder", lambda: name if cached else new)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        # XLA's own caches are written by every rank, and JAX would hash their paths into its key.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        with cache_in(own and own / used):
            yield cached
        if jax.process_index() == 0 and own and not cached and (own / used).is_dir():
            try:
                (own / used).rename(own / name)
            except OSError:  # another job was faster
                shutil.rmtree(own / used, ignore_errors=True)


def cache_identity(record: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record on which compiled programs depend; they choose a cache folder, in
    which JAX's own key is finer."""
    devices = {k: v for k, v in record["hardware"].items() if k != "host"}
    versions = {k: v for k, v in record["versions"].items() if k != "commit"}
    return {"hardware": devices, "versions": versions} | {k: record[k] for k in ("recipe", "flags")}
