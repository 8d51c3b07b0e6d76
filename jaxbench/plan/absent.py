"""Absent GPUs: devices that one can only compile for, in any number.

They need the compiler of `pip install '.[plan]'` (CUDA plugin, cuDNN, nvcc), but no GPU, driver or
CUDA installation.
"""

import jax
from jax.experimental import topologies

from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import Gpu, placed
from jaxbench.base.versions import installed

INSTALL = "pip install -c constraints.txt -e '.[plan]'"


def check_compiler() -> None:
    """Raises RecipeError if the compiler for GPUs is not installed."""
    if not installed("jax_plugins.xla_cuda13"):
        raise RecipeError(f"plan needs the compiler for GPUs: {INSTALL}")


def compile_only_devices(gpu: Gpu, count: int) -> list[jax.Device]:
    """`count` devices in full nodes, or in a part of one node. Programs can be compiled for them,
    but not run. XLA's topology is NVLink domains x nodes per domain x GPUs per node. Raises
    RecipeError."""
    check_compiler()
    domain, local = placed(gpu, count).domain, min(count, gpu.node)
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=gpu.description,
        topology=f"{count // domain}x{domain // local}x{local}",
    )
    return topology.devices
