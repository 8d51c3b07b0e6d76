"""A stub of the CUDA driver: with it Transformer Engine is imported and traced without a GPU.

Transformer Engine's libraries link to the driver and to NCCL, and tracing asks the CUDA runtime for
the number of GPUs and their compute capability. The stub, built with gcc, answers for one GPU and
fails every other call: traced programs are compiled for absent GPUs and never run.
"""

import ctypes
import re
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import jax

from jaxbench.errors import RecipeError
from jaxbench.versions import installed

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
    """The reason why the stub cannot be built; None if it can."""
    if not installed("transformer_engine"):
        return "Transformer Engine is not installed (README: Transformer Engine)"
    absent = [name for name in ("gcc", "nm") if shutil.which(name) is None]
    return f"it needs {' and '.join(absent)}" if absent else None


@cache
def load_stub(capability: int) -> None:
    """Builds the stub for a major compute capability and loads it into this process. Raises
    RecipeError."""
    if reason := missing():
        raise RecipeError(f"Transformer Engine cannot be planned: {reason}")
    site = Path(sysconfig.get_paths()["purelib"])
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "driver.c"), Path(folder, "libcuda.so.1")
        failing = (f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in _driver_calls(site))
        source.write_text("".join(failing) + RUNTIME)
        flags = [f"-I{site}/nvidia/cu13/include", f"-DMAJOR={capability}"]
        command = ["gcc", "-shared", "-fPIC", *flags, f"-Wl,-soname,{library.name}", "-o"]
        process = subprocess.run([*command, library, source], capture_output=True, text=True)
        if process.returncode:
            raise RecipeError(
                f"Transformer Engine cannot be planned: {process.stderr.splitlines()[0]}"
            )
        jax.devices()  # JAX's plugin loads NCCL
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _driver_calls(site: Path) -> list[str]:
    """Driver functions that the libraries need."""
    folders = ("nvidia/cudnn/lib", "transformer_engine/wheel_lib")
    libraries = [path for folder in folders for path in site.glob(f"{folder}/*.so*")]
    process = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=False
    )
    return sorted(set(re.findall(r" U (cu[A-Z]\w*)", process.stdout)))
