"""Compiles rows for H100s that are not there, and prints what one device holds, executes and sends
per step.

    python benchmarks/compile_rows.py                            # the rows a peer was compiled for
    python benchmarks/compile_rows.py llama31_8b_bf16:8 [KEY=VALUE ..]

Columns: peak GiB by the compiler; matrix products (`gemm`) and products plus fused attention
(`all`) over model FLOPs, attention counted unmasked on both sides; ring bytes sent (`wire`);
kernels of fused attention, forward and backward.
"""

import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from jaxbench import hlo, mesh, metrics, recipes, target
from jaxbench.config import RecipeError, Run
from jaxbench.train import compile_program

PEER_ROWS = """
llama2_70b_bf16:64
llama2_70b_bf16:64 execution.remat=full
llama2_70b_bf16:512
llama2_70b_bf16:2048
llama31_8b_bf16:8 batch.global_batch=8
llama31_8b_bf16:8
llama31_70b_bf16:64 batch.global_batch=64
llama31_70b_bf16:64
llama31_405b_bf16:512 parallelism.fsdp=512 parallelism.context=1 batch.global_batch=512 \
    execution.remat=full
llama31_405b_bf16:512 parallelism.fsdp=64 parallelism.context=1 parallelism.tensor=8 \
    batch.microbatch=4 execution.remat=full
llama31_405b_bf16:512
"""
"""Published rows, and what was compiled of a peer: its meshes, its remat, one pass per step."""


def compile_row(run: Run) -> dict:
    """Figures of one row's program."""
    with jax.set_mesh(
        mesh.make_mesh(run.mesh_shape, target.compile_only_devices("h100", run.gpus))
    ):
        compiled, lower_s, compile_s = compile_program(run)
    program = hlo.Program.parse(compiled.as_text())
    model = metrics.model_flops(run, "full") * run.batch.global_batch / run.gpus
    gemm, attention = sum(program.gemm_flops().values()), program.attention_flops()
    calls = program.custom_calls()
    return {
        "lower s": f"{lower_s:.1f}",
        "compile s": f"{compile_s:.1f}",
        "peak GiB": f"{compiled.memory_analysis().peak_memory_in_bytes / 2**30:.1f}",
        "gemm": f"{gemm / model:.4f}",
        "all": f"{(gemm + attention) / model:.4f}",
        "wire GiB": f"{sum(c.wire_bytes for c in program.collectives()) / 2**30:.0f}",
        "attention": "+".join(str(calls[name]) for name in hlo.ATTENTION_CALLS),
    }


def main(arguments: list[str]) -> None:
    """Compiles the rows and prints a table in markdown."""
    header = None
    rows = [arguments] if arguments else [line.split() for line in PEER_ROWS.strip().splitlines()]
    for row, *overrides in rows:
        name, _, gpus = row.partition(":")
        recipe = recipes.load(recipes.config_folder() / f"{name}.yaml")
        run = recipes.resolve(recipe, int(gpus), overrides=recipes.parse_overrides(overrides))
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
