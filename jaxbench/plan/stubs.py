"""Stubs of CUDA's driver and runtime, built with gcc. With them libraries answer without a GPU.

While cuDNN plans a call, it asks CUDA's runtime for a GPU and loads a kernel through the driver.
The stubs let it do so: they answer for one GPU and fail every other call. Nothing ever runs. This
module imports JAX only for Transformer Engine, since JAX loads the real runtime at once.
"""

import ctypes
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jaxbench.base.errors import RecipeError
from jaxbench.base.versions import installed, jax_release

SITE = Path(sysconfig.get_paths()["purelib"])

NO_DEVICE = 100
"""`CUDA_ERROR_NO_DEVICE`."""

LOADED = "the real CUDA runtime is loaded"
"""The reason of a process that has imported JAX before the stubs."""

LOADING = """
int cuLibraryLoadData(void **library) { *library = (void *) 16; return 0; }
int cuLibraryGetKernel(void **kernel) { *kernel = (void *) 16; return 0; }
int cuKernelGetFunction(void **function) { *function = (void *) 16; return 0; }
int cuLibraryUnload(void *library) { return 0; }
"""
"""The driver's functions that load a kernel. All others fail."""

DEVICE = """
#include <string.h>
#include <cuda_runtime_api.h>
#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceCount(int *n) { *n = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *n) { *n = 0; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int n) {
  memset(p, 0, sizeof *p);
  p->major = MAJOR;
  return cudaSuccess;
}
"""
"""The part of CUDA's runtime that Transformer Engine calls while it is traced: one GPU, of the
compute capability `MAJOR`."""

RUNTIME = f"""{DEVICE}
cudaError_t cudaSetDevice(int n) {{ return cudaSuccess; }}
cudaError_t cudaGetLastError(void) {{ return cudaSuccess; }}
cudaError_t cudaRuntimeGetVersion(int *version) {{ *version = CUDART_VERSION; return cudaSuccess; }}
cudaError_t cudaDriverGetVersion(int *version) {{ *version = CUDART_VERSION; return cudaSuccess; }}
const char *cudaGetErrorString(cudaError_t error) {{ return "no GPU"; }}
"""
"""The part of CUDA's runtime that cuDNN's frontend calls. The frontend refuses GPUs that are older
than Ampere. The GPU that it plans for comes from XLA."""


def prepare(words: Sequence[str]) -> None:
    """Loads the stubs for a command line of `plan`, unless the command line asks for Transformer
    Engine, which needs the real runtime."""
    if not any("implementation=te" in word for word in words):
        load()


@cache
def load() -> str | None:
    """Loads the stubs that cuDNN needs. Returns the reason if it cannot be asked in this process,
    else None."""
    if jax_release() < (0, 11):
        return "jax before 0.11 cannot ask cuDNN for them"
    if not installed("jax_plugins.xla_cuda13"):
        return "cuDNN is not installed"
    if lacking := _lacking_tools():
        return f"asking cuDNN needs {lacking}"
    if "libcudart.so" in Path("/proc/self/maps").read_text():
        return LOADED
    try:
        build("libcuda.so.1", driver())
        build("libcudart.so.13", RUNTIME, "-DMAJOR=9")
    except RecipeError as error:
        return str(error)
    return None


def engine_missing() -> str | None:
    """The reason why Transformer Engine cannot be traced; None if it can."""
    if not installed("transformer_engine"):
        return "Transformer Engine is not installed (README: Transformer Engine)"
    return f"its stubs need {lacking}" if (lacking := _lacking_tools()) else None


@cache
def load_for_engine(capability: int) -> None:
    """Loads the stubs with which Transformer Engine can be imported and traced, for GPUs of a major
    compute capability. Its libraries link to the driver and to NCCL. Raises RecipeError."""
    if reason := engine_missing():
        raise RecipeError(f"Transformer Engine cannot be planned: {reason}")
    import jax

    jax.devices()  # JAX's plugin loads NCCL
    build("libcuda.so.1", driver() + DEVICE, f"-DMAJOR={capability}")


def _lacking_tools() -> str:
    """The tools for building stubs that are not installed."""
    return " and ".join(name for name in ("gcc", "nm") if shutil.which(name) is None)


def driver() -> str:
    """The C source of the driver's stub."""
    engine = SITE.glob("transformer_engine/wheel_lib/*.so*")
    cudnn = sorted(SITE.glob("nvidia/cudnn/lib/*.so*"))
    process = subprocess.run(
        ["nm", "-D", "--undefined-only", *cudnn, *engine], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    called = set(re.findall(r" U (cu[A-Z]\w*)", process.stdout))
    for path in cudnn:
        if "engines_runtime" in path.name:  # it loads kernels, by functions that it looks up
            names = re.findall(rb"(?<!\w)(cu[A-Z]\w+)\0", path.read_bytes())
            called |= {name.decode() for name in names}
    others = called - set(re.findall(r"int (\w+)\(", LOADING))
    failing = (f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(others))
    return "".join(failing) + LOADING


def build(soname: str, source: str, *flags: str) -> None:
    """Compiles C source to a shared library, and loads it before the real library of this name is
    loaded. Raises RecipeError."""
    with tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder, "stub.c"), Path(folder, soname)
        file.write_text(source)
        options = ["-shared", "-fPIC", f"-I{SITE}/nvidia/cu13/include", *flags]
        process = subprocess.run(
            ["gcc", *options, f"-Wl,-soname,{soname}", "-o", library, file],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if process.returncode:
            raise RecipeError(
                f"gcc cannot build a stub of {soname}: {process.stderr.splitlines()[0]}"
            )
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
