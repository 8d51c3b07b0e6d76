"""Compiled programs that stay for later runs, safe for all processes of all jobs."""

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
def program_cache(folder: Path | None, identity: dict[str, Any]) -> Iterator[bool]:
    """Keeps what is compiled inside in `folder`, if there is one, for later runs of this identity;
    yields whether it was there.

    Ranks that find a program and ranks that do not must not meet: while it autotunes, XLA waits for
    the results of every rank. So an identity's folder appears whole, when its first job has
    compiled, and a job uses it only if all of its processes see it.
    """
    if folder is None:
        yield False
        return
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    whole, fresh = folder / name, folder / f"{name}.{os.getpid()}-{time.time_ns()}"
    there = job.all_agree("compilation cache", whole.is_dir())
    chosen = Path(
        job.from_first("compilation cache folder", lambda: str(whole if there else fresh))
    )
    compilation_cache.reset_cache()  # JAX decides once whether it uses one
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    # XLA's own caches are written by every rank, and their paths would be part of the key.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    yield there
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    if jax.process_index() == 0 and not there and chosen.is_dir():
        try:
            chosen.rename(whole)
        except OSError:  # another job was faster
            shutil.rmtree(chosen)
