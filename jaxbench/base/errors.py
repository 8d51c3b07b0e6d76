"""Errors that end a command, in one line each: for the terminal, for run.json and for launchers."""

from __future__ import annotations  # Python 3.7

import difflib
import re
from collections.abc import Iterable

STATUS = {
    "failed": 1,  # anything else; a restart would not help
    "mistake": 2,  # a user's
    "numbers": 3,  # an implausible loss, gradient or rate
    "memory": 4,  # no more memory on a device
    "storage": 5,  # files that cannot be read or written
    "gpu": 6,  # a GPU that fails
    "network": 7,  # another process, or the network to it, is lost
    "lost": 8,  # another process is lost
    "hang": 9,  # no progress within the watchdog's time limit
}
"""Exit status by cause of a failure; launchers tell causes apart by it. `launch/verdict.py` imports
this with Pythons from 3.7 on."""


class RecipeError(ValueError):
    """A user's mistake, in a recipe, in a setting or on the command line: what is wrong, and what
    is expected."""


class RunFailed(RuntimeError):
    """The run cannot give a valid result; `cause` is one of `STATUS`."""

    def __init__(self, message: str, cause: str = "failed"):
        super().__init__(message)
        self.cause = cause


PATTERNS = (
    ("memory", r"RESOURCE_EXHAUSTED|CUDA_ERROR_OUT_OF_MEMORY|out of memory|ALLOC_FAILED"),
    ("gpu", r"unhandled cuda error|CUDA_ERROR_|CUDA error|_STATUS_(EXECUTION_FAILED|INTERNAL_ERR)"),
    ("network", r"NCCL|gloo|UNAVAILABLE|DEADLINE_EXCEEDED|Connection (reset|closed|refused)"),
)  # fmt: skip
"""Causes, and patterns for errors of XLA's runtime, NCCL and Gloo. The first match counts, since
NCCL also reports failing GPUs, and CUDA a lack of memory. The texts are from the libraries
(`strings` of the CUDA plugin of jax 0.11, nccl.h). The other processes see a process that dies as a
network error."""


def cause_of(error: BaseException) -> str:
    """The cause of an error, a key of `STATUS`."""
    if isinstance(error, RunFailed):
        return error.cause
    if isinstance(error, RecipeError):
        return "mistake"
    for cause, pattern in PATTERNS:
        if re.search(pattern, str(error), re.IGNORECASE):
            return cause
    return "storage" if isinstance(error, OSError) else "failed"


def listed(texts: Iterable[str], most: int, separator: str = ", ") -> str:
    """The first `most` of some texts, and how many more there are."""
    texts = list(texts)
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def meant(text: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message about a `text` that is none of the names: which name may be meant. Empty
    if none is as similar as `cutoff` (0 to 1)."""
    close = difflib.get_close_matches(text, list(names), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def counted(number: int | None, noun: str = "GPU") -> str:
    """A number of GPUs or of other things, in the singular for one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
