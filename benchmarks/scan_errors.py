"""Errors of each Mamba-2 implementation against the recurrence in float64: the table of
docs/design/scan.md. Pallas's kernels run in its interpreter, on a CPU.

    python benchmarks/scan_errors.py [LENGTH]
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from recurrence import RESULTS, Case, errors

from jaxbench import ssd
from jaxbench.ssd import context, pallas, xla

LENGTH = 1024


def in_fp32(log: jax.Array, left: jax.Array) -> jax.Array:
    """`context.pass_on` with decays and states in fp32."""
    return context.pass_on(log, left.astype(jnp.float32))


def main() -> None:
    """Prints the table for two groups of two heads of Nemotron-H."""
    length = int(sys.argv[1]) if len(sys.argv) > 1 else LENGTH
    case = Case(1, length, 2, ssd.Dims(heads=2, head_dim=64, state=256, eps=1e-5))
    by_xla = partial(xla.mixer, case.dims, ())
    interpreted = pallas.Tuning(interpret=True)
    by_kernels = partial(pallas.mixer, case.dims, (), tuning=interpreted)
    columns = {
        "xla, fp32": errors(by_xla, case, jnp.float32),
        "pallas, fp32": errors(by_kernels, case, jnp.float32),
        "xla": errors(by_xla, case, jnp.bfloat16),
    }
    xla.pass_on = in_fp32
    columns["xla, fp32 between chunks"] = errors(by_xla, case, jnp.bfloat16)
    columns["pallas"] = errors(by_kernels, case, jnp.bfloat16)
    print("|  | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name in RESULTS:
        print(
            f"| {name} | " + " | ".join(f"{column[name]:.1e}" for column in columns.values()) + " |"
        )


if __name__ == "__main__":
    main()
