"""Absent GPUs: compile-only devices, in any number.

They need the compiler of `pip install '.[plan]'` (CUDA plugin, cuDNN, nvcc), but no GPU, driver or
CUDA installation.
"""

import jax
from jax.experimental import topologies

from jaxbench.errors import RecipeError
from jaxbench.hardware import Gpu, placed
from jaxbench.versions import installed

INSTALL = "pip install -c constraints.txt -e '.[plan]'"


def check_compiler() -> None:
    """Raises RecipeError if the compiler for GPUs is not installed."""
    if not installed("jax_plugins.xla_cuda13"):
        raise RecipeError(f"plan needs the compiler for GPUs: {INSTALL}")


def compile_only_devices(gpu: Gpu, count: int) -> list[jax.Device]:
    """`count` devices for which programs can be compiled but not run, in full nodes or a part of
    one. XLA's topology is NVLink domains x nodes of each x GPUs of each. Raises RecipeError."""
    check_compiler()
    domain, local = placed(gpu, count).domain, min(count, gpu.node)
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=gpu.description,
        topology=f"{count // domain}x{domain // local}x{local}",
    )
    return topology.devices
