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
def uncached() -> Iterator[None]:
    """Compiles what is compiled inside, whatever caches there are: a program that XLA loads has the
    default command buffers (CUDA graphs), not those of its compiler options (seen with jax 0.10.2
    on null GPUs)."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    compilation_cache.reset_cache()  # JAX decides once whether it uses one
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


@contextmanager
def program_cache(
    folder: Path | None, identity: dict[str, Any], fresh: bool = False
) -> Iterator[bool]:
    """Caches the programs compiled inside in a subfolder of `folder` for this identity, or compiles
    them afresh (`uncached`); yields whether they were cached before.

    While it autotunes, XLA waits for the results of every rank, so either all ranks find a program
    or none. The subfolder is renamed into place when the first job has compiled, and used only if
    all processes of a job see it.
    """
    if fresh:
        with uncached():
            yield False
        return
    if folder is None:
        yield False
        return
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    complete, new = folder / name, folder / f"{name}.{os.getpid()}-{time.time_ns()}"
    cached = job.all_agree("compilation cache", complete.is_dir())
    used = Path(job.broadcast("compilation cache folder", lambda: str(complete if cached else new)))
    compilation_cache.reset_cache()  # JAX decides once whether it uses one
    jax.config.update("jax_compilation_cache_dir", str(used))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    # XLA's own caches are written by every rank, and JAX would hash their paths into its key.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    yield cached
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    if jax.process_index() == 0 and not cached and used.is_dir():
        try:
            used.rename(complete)
        except OSError:  # another job was faster
            shutil.rmtree(used)
