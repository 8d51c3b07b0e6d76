"""Why a run ended, where only the text of an error says so."""

import re

from jaxbench.errors import RecipeError, RunFailed

TEXTS = (
    ("memory", r"RESOURCE_EXHAUSTED|CUDA_ERROR_OUT_OF_MEMORY|out of memory|ALLOC_FAILED"),
    ("gpu", r"unhandled cuda error|CUDA_ERROR_|CUDA error|_STATUS_(EXECUTION_FAILED|INTERNAL_ERR)"),
    ("network", r"NCCL|gloo|UNAVAILABLE|DEADLINE_EXCEEDED|Connection (reset|closed|refused)"),
)  # fmt: skip
"""What the errors of XLA's runtime, of NCCL and of Gloo have in common, by cause, the first that is
found: NCCL reports a failing GPU too, and CUDA a full one. The words are those of the libraries'
own messages (`strings` of the CUDA plugin of jax 0.11, nccl.h); a peer's death reaches the others
as an error of the network."""


def cause_of(error: BaseException) -> str:
    """One of `errors.STATUS`."""
    if isinstance(error, RunFailed):
        return error.cause
    if isinstance(error, RecipeError):
        return "mistake"
    found = (cause for cause, words in TEXTS if re.search(words, str(error), re.IGNORECASE))
    return next(found, "storage" if isinstance(error, OSError) else "failed")
