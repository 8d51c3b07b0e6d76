"""GPUs that are not there: devices of any number, for which XLA compiles.

Needs the compiler of `pip install '.[plan]'` (CUDA plugin, cuDNN, nvcc), but no GPU, driver or CUDA
installation.
"""

import importlib.util

import jax
from jax.experimental import topologies

from jaxbench.errors import RecipeError
from jaxbench.hardware import Gpu

INSTALL = "pip install -c constraints.txt -e '.[plan]'"


def check_compiler() -> None:
    """Raises RecipeError where the compiler for GPUs is not installed."""
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        raise RecipeError(f"plan needs the compiler for GPUs: {INSTALL}")


def compile_only_devices(gpu: Gpu, count: int) -> list[jax.Device]:
    """`count` devices in full nodes, or in a part of one, on which programs can be compiled but not
    run. Raises RecipeError where they fill no nodes."""
    nodes, local = max(count // gpu.node, 1), min(count, gpu.node)
    if nodes * local != count:
        raise RecipeError(f"{count} GPUs do not fill nodes of {gpu.node}")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=gpu.description, topology=f"{nodes}x1x{local}"
    )
    return topology.devices
