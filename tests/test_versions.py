"""The record has the version of all that decides speed."""

import re
from types import SimpleNamespace

import jax
import pytest
from commands import ROOT

from jaxbench.base import versions
from jaxbench.cluster import devices

NEEDED = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformer_engine",
    "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13", "nvidia-nccl-cu13",
    "nvidia-cublas", "nvidia-cuda-nvcc",
)  # fmt: skip
"""As `constraints.txt` spells them: what computes and communicates, and ptxas."""


def install(folder, name, version):
    """Describes a package as pip does."""
    own = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    own.mkdir(parents=True)
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_of_two_versions_of_a_package_the_one_that_is_imported_is_recorded(tmp_path, monkeypatch):
    """As in a virtual environment that also sees the packages of the system."""
    for version in (1, 2):
        install(tmp_path / str(version), "numpy", version)
    monkeypatch.setattr("sys.path", [str(tmp_path / "1"), str(tmp_path / "2")])
    assert versions.versions()["numpy"] == "1"


def test_every_package_that_decides_speed_is_recorded(tmp_path, monkeypatch):
    pinned = re.findall(r"(?m)^([\w.-]+)==", (ROOT / "constraints.txt").read_text())
    assert set(NEEDED) <= set(pinned)
    for number, name in enumerate(NEEDED):
        install(tmp_path, name, number)
    monkeypatch.setattr("sys.path", [str(tmp_path)])  # and nothing else is installed
    found = versions.versions()
    for number, name in enumerate(NEEDED):
        assert found[name.replace("_", "-")] == str(number)
    assert {"jaxbench", "commit", "source", "python", "driver"} <= found.keys()


@pytest.mark.parametrize(
    "said",
    [
        "NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:14:30 UTC 2025",
        "NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@host)",
    ],
)
def test_the_driver_by_its_own_words(said, tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "DRIVER", tmp_path / "version")
    assert versions.versions()["driver"] is None
    (tmp_path / "version").write_text(f"NVRM version: {said}\nGCC version:  gcc version 12.2.0\n")
    assert versions.versions()["driver"] == "580.65.06"


def test_every_line_of_the_runtime_s_version_is_recorded(monkeypatch):
    """CUDA's is on the second."""
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    device = SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H100", client=client, memory_stats=lambda: None
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert devices.hardware()["runtime"] == "PJRT C API; cuda 13000"
