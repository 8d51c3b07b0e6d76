"""A CUDA driver that does nothing, so that Transformer Engine can be imported and traced where
there is no GPU.

Its libraries are linked to the driver's and to NCCL, and while it is traced it asks the runtime for
the number of GPUs and their compute capability. The library made here, with a C compiler, answers
these three questions for one GPU, and fails every other call. What is traced so is compiled for
absent GPUs, and never run.
"""

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import jax

from jaxbench.errors import RecipeError

NO_DEVICE = 100
"""`CUDA_ERROR_NO_DEVICE`."""

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
    """Why no such driver can be made here; None if one can."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed (README: Transformer Engine)"
    absent = [name for name in ("gcc", "nm") if shutil.which(name) is None]
    return f"it needs {' and '.join(absent)}" if absent else None


@cache
def pretend(capability: int) -> None:
    """Loads the library into this process, which has no driver, for a GPU of a major compute
    capability. Raises RecipeError where it cannot be made."""
    if reason := missing():
        raise RecipeError(f"Transformer Engine cannot be planned: {reason}")
    site = Path(sysconfig.get_paths()["purelib"])
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "driver.c"), Path(folder, "libcuda.so.1")
        failing = (f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in _driver_calls(site))
        source.write_text("".join(failing) + RUNTIME)
        given = [f"-I{site}/nvidia/cu13/include", f"-DMAJOR={capability}"]
        command = ["gcc", "-shared", "-fPIC", *given, f"-Wl,-soname,{library.name}", "-o"]
        done = subprocess.run([*command, library, source], capture_output=True, text=True)
        if done.returncode:
            raise RecipeError(
                f"Transformer Engine cannot be planned: {done.stderr.splitlines()[0]}"
            )
        jax.devices()  # JAX's plugin loads NCCL
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _driver_calls(site: Path) -> list[str]:
    """The driver's functions that the libraries are linked to."""
    libraries = [
        *site.glob("nvidia/cudnn/lib/*.so*"),
        *site.glob("transformer_engine/wheel_lib/*.so*"),
    ]
    done = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=False
    )
    return sorted(set(re.findall(r" U (cu[A-Z]\w*)", done.stdout)))
