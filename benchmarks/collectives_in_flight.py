"""Collectives that XLA's scheduler keeps in flight together, compiled for absent GPUs.

    python benchmarks/collectives_in_flight.py

Compiles two independent all-gathers beside matrix products, over the same ranks, over groups that
share one rank, and over groups that share several, and counts how many are in flight by limit
(`xla_gpu_experimental_parallel_collective_overlap_limit`). Two on separate streams that share
several ranks can deadlock, since ranks may start them in different orders (openxla/xla pull request
19026).
"""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxbench.hardware import PLANNED
from jaxbench.plan.absent import compile_only_devices

GROUPS = {
    "the same ranks": ("x", "x"), "one rank in common": ("x", "y"),
    "four ranks in common": ("x", ("x", "y")),
}  # fmt: skip
ALL = PartitionSpec(("x", "y"))


def in_flight(mesh: Mesh, axes: tuple, limit: int) -> int:
    """The most gathers between their start and their end in the schedule."""

    def gathers(first, second, third):
        gathered = [jax.lax.all_gather(x, axis, tiled=True).astype(jnp.float32).sum()
                    for x, axis in zip((first, second), axes, strict=True)]  # fmt: skip
        product = third
        for _ in range(4):
            product = product @ third
        return gathered[0] + 2 * gathered[1] + product.astype(jnp.float32).sum()

    def argument(rows: int, columns: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, ALL)
        return jax.ShapeDtypeStruct((16 * rows, columns), jnp.bfloat16, sharding=sharding)

    island = jax.shard_map(gathers, in_specs=(ALL,) * 3, out_specs=PartitionSpec(), check_vma=False)
    with jax.set_mesh(mesh):
        lowered = jax.jit(island).lower(
            argument(1024, 2048), argument(1024, 2048), argument(4096, 4096)
        )
    compiled = lowered.compile(compiler_options={
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_gather_combine_threshold_bytes": 1,
        "xla_gpu_experimental_parallel_collective_overlap_limit": limit,
    })  # fmt: skip
    edges = re.findall(r"= .* all-gather-(start|done)\(", compiled.as_text())
    return int(np.cumsum([1 if edge == "start" else -1 for edge in edges]).max())


def main() -> None:
    """Prints a line for each pair of groups."""
    jax.config.update("jax_platforms", "cpu")
    devices = np.array(compile_only_devices(PLANNED["h100"], 16)).reshape(4, 4)
    mesh = Mesh(devices, ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    for name, axes in GROUPS.items():
        most = {limit: in_flight(mesh, axes, limit) for limit in (1, 4)}
        print(f"jax {jax.__version__}, {name}: in flight by limit {most}")


if __name__ == "__main__":
    main()
