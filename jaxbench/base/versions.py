"""The identity of this program: the versions and the commit that decide what is computed."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import subprocess
from pathlib import Path

import jaxbench

PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy",
    "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13", "nvidia-nccl-cu13",
    "nvidia-cublas", "nvidia-cuda-nvcc", "transformer-engine",
)  # fmt: skip

DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> dict[str, str | None]:
    """Versions of jaxbench, its commit and a digest of its source, Python, the driver, and the
    packages that decide what is compiled and how fast it runs."""
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "jaxbench": jaxbench.__version__,
        "commit": commit(),
        "source": source(),
        "python": platform.python_version(),
        **packages,
        "driver": driver(),
    }


def jax_release() -> tuple[int, ...]:
    """The first two numbers of the version of JAX."""
    return tuple(int(part) for part in importlib.metadata.version("jax").split(".")[:2])


def installed(module: str) -> bool:
    """True if a module can be imported. `find_spec` itself raises if the parent package is
    absent."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def driver() -> str | None:
    """The version of the NVIDIA driver; None if there is no driver."""
    try:
        version = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text())
    except OSError:
        return None
    return version and version.group()


def source() -> str:
    """A digest of this package's own modules and tables."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("measured/*.csv")]):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str | None:
    """The git commit of the source tree, with `+` if files differ from it; None outside a git
    checkout."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", folder, *arguments], capture_output=True, text=True, check=True
        ).stdout

    try:
        return git("rev-parse", "HEAD").strip() + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
