"""GPUs that are not there: devices of any number, for which XLA compiles.

Needs the compiler of `pip install '.[plan]'` (CUDA plugin, cuDNN, nvcc), but no GPU, driver or CUDA
installation.
"""

import importlib.util
from dataclasses import replace

import jax
from jax.experimental import topologies

from jaxbench.errors import RecipeError
from jaxbench.hardware import Gpu

INSTALL = "pip install -c constraints.txt -e '.[plan]'"


def check_compiler() -> None:
    """Raises RecipeError where the compiler for GPUs is not installed."""
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        raise RecipeError(f"plan needs the compiler for GPUs: {INSTALL}")


def placed(gpu: Gpu, count: int) -> Gpu:
    """The GPU with as large a `domain` as a job of `count` GPUs takes of it (`Gpu.spread`). Raises
    RecipeError where they fill no nodes."""
    spread = gpu.spread(count)
    if spread is None:
        near = " and ".join(map(str, gpu.nearest(count)))
        raise RecipeError(
            f"{count} GPUs do not fill nodes of {gpu.node} in NVLink domains of {gpu.domain}; the "
            f"nearest that do: {near}"
        )
    _, nodes, devices = spread
    return replace(gpu, domain=nodes * devices)


def compile_only_devices(gpu: Gpu, count: int) -> list[jax.Device]:
    """`count` devices on which programs can be compiled but not run, in full nodes or in a part of
    one. Raises RecipeError where they fill no nodes.

    XLA is told of NVLink domains (its slices), their nodes, and the GPUs of each.
    """
    domains = count // placed(gpu, count).domain
    local = min(count, gpu.node)
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=gpu.description,
        topology=f"{domains}x{count // (domains * local)}x{local}",
    )
    return topology.devices
