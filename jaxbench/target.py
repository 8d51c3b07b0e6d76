"""GPUs that are not there: descriptions from which XLA compiles for devices of any number.

Needs the compiler of `pip install '.[plan]'` (CUDA plugin, cuDNN, nvcc), but no GPU, driver or CUDA
installation.
"""

import jax
from jax.experimental import topologies

_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "{name}"
  driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: 18 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""

TARGETS = {
    "h100": _HOPPER.format(
        name="NVIDIA H100 80GB HBM3", memory=84942979072, bandwidth=3352320000000
    ),
    "h200": _HOPPER.format(name="NVIDIA H200", memory=151397597184, bandwidth=4800000000000),
}
"""XLA GPU target descriptions (text protos) by the name a user gives."""


def compile_only_devices(gpu: str, count: int, per_node: int = 8) -> list[jax.Device]:
    """`count` devices of a kind in `TARGETS`, `per_node` to a node, on which programs can be
    compiled but not run.

    Raises RuntimeError where the CUDA plugin is not installed.
    """
    nodes, local = max(count // per_node, 1), min(count, per_node)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGETS[gpu], topology=f"{nodes}x1x{local}"
    )
    return topology.devices
