"""Classifies failures by the texts of their errors."""

import re

from jaxbench.base.errors import RecipeError, RunFailed

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
    """The cause of an error, a key of `base.errors.STATUS`."""
    if isinstance(error, RunFailed):
        return error.cause
    if isinstance(error, RecipeError):
        return "mistake"
    for cause, pattern in PATTERNS:
        if re.search(pattern, str(error), re.IGNORECASE):
            return cause
    return "storage" if isinstance(error, OSError) else "failed"
