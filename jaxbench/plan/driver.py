"""Transformer Engine without a GPU: we import and trace it with stubs of CUDA (`plan.stubs`).

Its libraries link to the driver and to NCCL, and tracing asks the CUDA runtime for the number of
GPUs and their compute capability. Traced programs are compiled for absent GPUs and never run.
"""

import shutil
from functools import cache

import jax

from jaxbench.base.errors import RecipeError
from jaxbench.base.versions import installed
from jaxbench.plan import stubs

RUNTIME = """
#include <string.h>
#include <cuda_runtime_api.h>
cudaError_t cudaGetDeviceCount(int *n) { *n = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *n) { *n = 0; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int n) {
  memset(p, 0, sizeof *p); p->major = MAJOR; return cudaSuccess;
}
"""


def missing() -> str | None:
    """The reason why Transformer Engine cannot be traced; None if it can."""
    if not installed("transformer_engine"):
        return "Transformer Engine is not installed (README: Transformer Engine)"
    absent = [name for name in ("gcc", "nm") if shutil.which(name) is None]
    return f"its stubs need {' and '.join(absent)}" if absent else None


@cache
def load_stub(capability: int) -> None:
    """Loads the stubs for a major compute capability into this process, for Transformer Engine.
    Raises RecipeError."""
    if reason := missing():
        raise RecipeError(f"Transformer Engine cannot be planned: {reason}")
    jax.devices()  # JAX's plugin loads NCCL
    stubs.build("libcuda.so.1", stubs.driver() + RUNTIME, f"-DMAJOR={capability}")
