"""How a process of a job ends: with one line, and without waiting for processes that are lost."""

import contextlib
import os
import sys
from typing import NoReturn

import jax

from jaxbench.base.errors import STATUS, cause_of
from jaxbench.jax_internals import coordination_client


def tell(message: str) -> None:
    """Writes a line that begins with the rank to the launcher (`launch/run.sh`), for
    `launch/verdict.py`. It uses srun's own connection, because the file system of the results may
    be what fails. Does nothing without a launcher."""
    if descriptor := os.environ.get("JAXBENCH_MESSAGES"):
        line = f"{os.environ.get('JAXBENCH_RANK')}: {' '.join(message.split())[:1000]}\n"
        with contextlib.suppress(OSError):
            os.write(int(descriptor), line.encode())


def refuse(error: Exception, wait: bool) -> int:
    """Ends with an error in one line. Returns the exit status (`leave`)."""
    text = f"error: {' '.join(str(error).split())}"
    tell(text)
    with contextlib.suppress(OSError):  # the log may be on the file system that fails
        print(text, file=sys.stderr)
    return leave(STATUS[cause_of(error)], wait)


def leave(code: int, wait: bool) -> int:
    """Returns the exit status, or exits here. Without `wait`, a process exits here if it is one of
    several or has GPUs. In an orderly exit JAX would wait for the other processes, which wait in
    collectives for this one, and for its GPUs, which wait for the one that failed."""
    if not wait and (coordination_client() is not None or jax.default_backend() == "gpu"):
        exit_now(code)
    return code


def exit_now(code: int) -> NoReturn:
    """Ends the process. First flushes what was printed, if it can be written."""
    try:
        sys.stdout.flush()
    finally:
        os._exit(code)
