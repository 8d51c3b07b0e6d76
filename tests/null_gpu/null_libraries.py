"""The null libraries, built with g++ from `driver/` for the installed CUDA plugin of JAX, and for
Transformer Engine where it is installed.

Functions that these may call and that no source defines are stubs that return 0, and are counted as
`stub <name>`.
"""

import fcntl
import hashlib
import re
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "driver"
SITE = Path(sysconfig.get_paths()["purelib"])
PLUGIN = SITE / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"
ENGINE = sorted((SITE / "transformer_engine" / "wheel_lib").glob("*.so"))
"""Libraries of Transformer Engine, which loads cuRAND too."""
if ENGINE:
    ENGINE.append(SITE / "nvidia" / "cu13" / "lib" / "libcurand.so.10")
DRIVER = "libcuda.so.1"

LIBRARIES = {
    DRIVER: (
        ("settings", "devices", "faults", "memory", "copies", "streams", "kernels", "graphs"),
        r"cu[A-Z]\w*",
    ),
    "libcudart.so.13": (("runtime",), r"cuda[A-Z]\w*|__cuda\w+"),
    "libcublas.so.13": (("blas",), r"cublas(?!Lt)\w+"),
    "libcublasLt.so.13": ((), r"cublasLt\w+"),
    "libcudnn.so.9": (("cudnn",), r"cudnn[A-Z]\w*"),
    "libcufft.so.12": ((), r"cufft[A-Z]\w*"),
    "libcusparse.so.12": ((), r"cusparse[A-Z]\w*"),
    "libcusolver.so.12": ((), r"cusolver\w+"),
    "libcupti.so.13": (("cupti",), r"cupti[A-Z]\w*"),
    "libnccl.so.2": (("nccl", "clique"), r"nccl[A-Z]\w*"),
    "libnvidia-ml.so.1": (("nvml",), r"nvml[A-Z]\w*"),
    "libnvshmem_host.so.3": ((), r"nvshmem\w+"),
}
"""By soname: sources, and the names of functions that belong to it. A library without sources has
its functions, but for stubs, in `MATHEMATICS`, which it links to."""

MATHEMATICS = "libcublas.so.13"

FLAGS = (
    "-std=c++17", "-O1", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror",
    "-isystem", str(SITE / "nvidia/cu13/include"), "-isystem", str(SITE / "nvidia/cudnn/include"),
)  # fmt: skip


def libraries() -> list[Path]:
    """The built libraries, the driver first. They are kept for later runs in the system's folder
    for temporary files; one process builds, others wait. Raises CalledProcessError after printing
    what the compiler said."""
    sources = sorted(SOURCES.iterdir())
    contents = [path.read_bytes() for path in (*sources, Path(__file__))]
    states = [(path, path.stat()) for path in (PLUGIN, *ENGINE)]
    built_for = " ".join(f"{path} {state.st_size} {state.st_mtime}" for path, state in states)
    key = hashlib.sha256(b"".join(contents) + built_for.encode())
    folder = Path(tempfile.gettempdir()) / f"null-gpu-{key.hexdigest()[:16]}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            build(folder)
            (folder / "complete").touch()
    return [folder / soname for soname in LIBRARIES]


def build(folder: Path) -> None:
    """Builds all libraries into a folder."""
    stems = [stem for sources, _ in LIBRARIES.values() for stem in sources]
    with ThreadPoolExecutor() as pool:
        called = pool.submit(functions, PLUGIN, *(SITE / "jax_cuda13_plugin").glob("*.so"))
        for _ in pool.map(lambda stem: compile_source(folder, stem), stems):
            pass
    objects = {stem: folder / f"{stem}.o" for stem in stems}
    used = set(re.findall(r" U (\w+)", run("nm", "-D", "-u", *ENGINE))) if ENGINE else set()
    missing = (called.result() | used) - functions(*objects.values())
    for soname, (sources, pattern) in LIBRARIES.items():
        stubs = folder / f"{soname}.c"
        stubs.write_text(
            "void null_gpu_stub(const char *);\n"
            + "".join(
                f'long {name}(void) {{ null_gpu_stub("{name}"); return 0; }}\n'
                for name in sorted(missing)
                if re.fullmatch(pattern, name)
            )
        )
        linked = [objects[stem] for stem in sources]
        if soname != DRIVER:
            linked += [folder / DRIVER, "-Wl,--no-as-needed,-rpath,$ORIGIN"]
        if not sources:
            linked += [folder / MATHEMATICS]
        run("gcc", "-w", "-fPIC", "-c", stubs, "-o", stubs.with_suffix(".o"))
        run("g++", "-shared", "-pthread", f"-Wl,-soname,{soname}", "-o", folder / soname,
            stubs.with_suffix(".o"), *linked)  # fmt: skip


def compile_source(folder: Path, stem: str) -> None:
    """Compiles a source to an object in the folder."""
    run("g++", *FLAGS, "-c", SOURCES / f"{stem}.cpp", "-o", folder / f"{stem}.o")


def functions(*binaries: Path) -> set[str]:
    """Names of functions that binaries define or use."""
    lines = run("nm", *binaries).splitlines()
    return {line.split()[-1] for line in lines if re.search(r" [tTU] ", line)}


def run(*command: str | Path) -> str:
    """Runs a command and returns what it printed. Raises CalledProcessError."""
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        print(process.stderr)
        process.check_returncode()
    return process.stdout


if __name__ == "__main__":
    print(*libraries(), sep=":")
