"""What making the state holds on a device, and takes to compile, for absent H100s.

    python benchmarks/initial_state.py llama2_70b_bf16:64 llama31_405b_bf16:512

Prints a line for each row: the peak of the program that makes the state beside the state itself,
which a step has as its arguments. A row whose peak is larger would need more to begin than to run.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxbench import mesh
from jaxbench.hardware import H100
from jaxbench.plan.absent import compile_only_devices
from jaxbench.recipe import recipes
from jaxbench.train.step import init_state


def main() -> None:
    """Compiles each row's initial state."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+", metavar="RECIPE:GPUS")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    for row in args.rows:
        name, _, gpus = row.partition(":")
        run = recipes.resolve(recipes.load(name), int(gpus))
        with jax.set_mesh(mesh.make_mesh(run.mesh_shape, compile_only_devices(H100, run.gpus))):
            began = time.perf_counter()
            held = jax.jit(partial(init_state, run)).lower().compile().memory_analysis()
        took = time.perf_counter() - began
        peak, state = (
            size / 2**30 for size in (held.peak_memory_in_bytes, held.output_size_in_bytes)
        )
        print(f"{row}: peak {peak:.2f} GiB, state {state:.2f} GiB, {took:.1f} s", flush=True)


if __name__ == "__main__":
    main()
