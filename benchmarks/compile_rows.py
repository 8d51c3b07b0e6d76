"""Compiles the rows that a peer was compiled for, and prints one line of `jaxbench.plan` for each.

    python benchmarks/compile_rows.py
    python benchmarks/compile_rows.py llama31_8b_bf16:8 [KEY=VALUE ..]

Columns: peak GiB by the compiler; products and fused attention over model FLOPs, attention counted
unmasked on both sides (`all`); ring bytes sent (`wire`), and those with no product or attention
beside them (`uncovered`); the roofline's exposed and whole seconds (docs/plan.md).
"""

import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from jaxbench.errors import RecipeError
from jaxbench.hardware import H100
from jaxbench.plan.plan import make_plan
from jaxbench.planning.command import resolve
from jaxbench.recipe.settings import Run

PEER_ROWS = """
llama2_70b_bf16:64
llama2_70b_bf16:64 execution.remat=full
llama2_70b_bf16:512 execution.remat=query,key,value,attention,residual:4
llama2_70b_bf16:2048 execution.remat=query,key,value,attention,residual:4
llama2_70b_fp8:64
llama2_70b_fp8:512 execution.remat=query,key,value,attention,residual:4
llama31_8b_bf16:8 batch.global_batch=8 execution.remat=query,key,value,attention,residual,gate,up
llama31_8b_fp8:8 batch.global_batch=8 execution.remat=query,key,value,attention
llama31_70b_bf16:64 batch.global_batch=64
llama31_405b_bf16:512 parallelism.fsdp=512 parallelism.context=1 batch.global_batch=512 \
    execution.remat=full
llama31_405b_bf16:512 parallelism.fsdp=64 parallelism.context=1 parallelism.tensor=8 \
    batch.microbatch=4 execution.remat=full
grok1_314b_bf16:512 execution.remat=full
grok1_314b_bf16:512
"""
"""What was compiled of a peer: its meshes, about its remat, one pass per step."""


def compile_row(run: Run) -> dict:
    """Figures of one row's program."""
    found = make_plan(run, H100)
    return {
        "compile s": f"{found.compile_s:.0f}",
        "peak GiB": f"{found.bytes_per_device.peak / 2**30:.1f}",
        "all": f"{found.flops.recompute_ratio:.3f}",
        "wire GiB": f"{found.wire_bytes / 2**30:.0f}",
        "uncovered GiB": f"{found.uncovered_wire_bytes / 2**30:.0f}",
        "exposed s": f"{found.bound_parts_s.exposed:.3f}",
        "bound s": f"{found.bound_step_s:.3f}",
        "launches": str(found.launches),
    }


def main(arguments: list[str]) -> None:
    """Compiles the rows and prints a table in markdown."""
    header = None
    rows = [arguments] if arguments else [line.split() for line in PEER_ROWS.strip().splitlines()]
    for row, *overrides in rows:
        name, _, gpus = row.partition(":")
        run, _ = resolve(name, int(gpus), overrides)
        figures = {"row": " ".join([row, *overrides]), **compile_row(run)}
        if header is None:
            header = f"| {' | '.join(figures)} |\n|{'---|' * len(figures)}"
            print(f"jax {jax.__version__}, {time.strftime('%Y-%m-%d')}\n\n{header}")
        print(f"| {' | '.join(figures.values())} |", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RecipeError as error:
        sys.exit(f"error: {error}")
