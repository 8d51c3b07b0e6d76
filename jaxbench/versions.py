"""Which program this is: the versions and the commit that decide what is computed."""

import hashlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import jaxbench

PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "numpy",
    "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "nvidia-cublas",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Versions of jaxbench, its commit, Python, and the packages that decide what is compiled."""
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return {
        "jaxbench": jaxbench.__version__,
        "commit": commit(),
        "source": source(),
        "python": platform.python_version(),
        **{name: installed[name] for name in PACKAGES if name in installed},
    }


def source() -> str:
    """A digest of this package's own modules."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str | None:
    """Git commit of the source tree, with `+` when files differ from it; None outside a git
    checkout."""
    folder = Path(__file__).parents[1]
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
