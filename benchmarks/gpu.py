"""Checks and measures everything on one GPU in one call, and prints a table last.

    python benchmarks/gpu.py [--steps 12] [--only attention,products,rows]
    python benchmarks/gpu.py --compile-only     # no GPU: compile all of it for an absent H100

Checks cuDNN attention, forward and backward, against plain fp32 attention at real shapes. Measures
products at the recipes' shapes with their gradients, in bf16 and in FP8 by each implementation, and
the step of every recipe's row for one GPU.
Run from the source tree; nothing is installed.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbench import hardware, mesh
from jaxbench.models.layers import Weight
from jaxbench.ops import dense, fp8
from jaxbench.ops.attention import attend
from jaxbench.plan.absent import compile_only_devices
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Precision, Run
from jaxbench.recipe.throughput import throughput
from jaxbench.run import devices, summary
from jaxbench.train.loop import run_steps
from jaxbench.train.program import check_program, compile_program
from jaxbench.versions import versions

SEQUENCE = {"batch": 1, "length": 4096, "heads": 16, "kv_heads": 4, "head_dim": 128}


def one_gpu_runs(steps: int = 1) -> list[Run]:
    """The row `1` of every recipe."""
    return [recipes.resolve(recipe, 1, steps=steps) for recipe in recipes.load_all()]


def seconds(function, *arguments, repeats: int = 20) -> float:
    """Mean seconds of a call, after two that are not counted."""
    for _ in range(2):
        jax.block_until_ready(function(*arguments))
    start = time.perf_counter()
    results = [function(*arguments) for _ in range(repeats)]
    jax.block_until_ready(results)
    return (time.perf_counter() - start) / repeats


def attention_with_gradients(kernel: str, dtype):
    """(query, key, value, cotangent) to (output, gradients) with one implementation."""

    def run(*arrays):
        q, k, v, cotangent = (x.astype(dtype) for x in arrays)
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, kernel), q, k, v)
        return out, vjp(cotangent)

    return jax.jit(run)


def attention_inputs():
    """Random bf16 query, key, value and cotangent."""
    s = SEQUENCE
    heads = (s["heads"], s["kv_heads"], s["kv_heads"], s["heads"])
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(k, (s["batch"], s["length"], n, s["head_dim"]), jnp.bfloat16)
        for k, n in zip(keys, heads, strict=True)
    ]


def check_attention() -> list[tuple[str, ...]]:
    """Largest error of cuDNN's bf16 results over the largest exact value; bf16 rounds to 2^-8."""
    arrays = attention_inputs()
    fused = attention_with_gradients("cudnn", jnp.bfloat16)
    exact = attention_with_gradients("xla", jnp.float32)
    rows = []
    actual, expected = jax.tree.leaves(fused(*arrays)), jax.tree.leaves(exact(*arrays))
    for name, a, e in zip(("output", "d query", "d key", "d value"), actual, expected, strict=True):
        error = float(jnp.max(jnp.abs(a.astype(jnp.float32) - e)) / jnp.max(jnp.abs(e)))
        rows.append((f"attention {name}", "ok" if error < 2**-6 else "WRONG", f"error {error:.1e}"))
    return rows


def product_shapes(run: Run) -> dict[str, tuple[int, int, int]]:
    """(tokens, inputs, outputs) of each product of a layer."""
    m, tokens = run.model, run.microbatch * run.batch.sequence_length
    return {
        "qkv": (tokens, m.embed, (m.heads + 2 * m.kv_heads) * m.head_dim),
        "out": (tokens, m.heads * m.head_dim, m.embed),
        "gate_up": (tokens, m.embed, 2 * m.ffn),
        "down": (tokens, m.ffn, m.embed),
    }


def fp8_implementations() -> list[str]:
    """Those that can run on this machine."""
    best = fp8.choose(Precision(), jax.default_backend())
    return ["xla"] if best == "xla" else ["xla", best]


class OneProduct(nnx.Module):
    """A unit with a single weight."""

    def __init__(self, kernel):
        self.w = Weight(kernel, fp8=True)


def product_with_gradients(implementation: str | None):
    """(x, w, dy) to (y, dx, dw) of one product, in bf16 (None) or in FP8 under delayed scaling."""

    def run(x, w, dy):
        if implementation is None:
            y, vjp = jax.vjp(lambda x, w: dense.dot("BSD,DF->BSF", x, w, "batch seq ffn"), x, w)
            return y, vjp(dy)
        precision = Precision(dtype="fp8", amax_history=4, implementation=implementation)
        histories = [jnp.full((1, 1, 3, 4), 6.0)]
        stack = OneProduct(w[None])
        scaled = fp8.scale([stack], histories, precision)

        def product(x, stack, observed):
            (observing,) = fp8.observing(scaled, observed)
            unit = fp8.attach(*jax.tree.map(lambda leaf: leaf[0], (stack, observing)))
            return dense.dot("BSD,DF->BSF", x, unit.w, "batch seq ffn")

        y, vjp = jax.vjp(product, x, stack, fp8.unobserved(histories))
        return y, vjp(dy)

    return jax.jit(run)


def measure_products() -> list[tuple[str, ...]]:
    """TFLOP/s of a product with both gradients at the shapes of every recipe, quantization
    included, and the ratio to bf16."""
    rows = []
    shapes = {shape for run in one_gpu_runs() for shape in product_shapes(run).values()}
    for m, k, n in sorted(shapes):
        keys = jax.random.split(jax.random.key(0), 3)
        dims = ((1, m, k), (k, n), (1, m, n))
        arrays = [jax.random.normal(*a, jnp.bfloat16) for a in zip(keys, dims, strict=True)]
        times = {
            name or "bf16": seconds(product_with_gradients(name), *arrays)
            for name in (None, *fp8_implementations())
        }
        rates = {name: 3 * 2 * m * k * n / t / 1e12 for name, t in times.items()}
        rows.append((
            f"product {m} x {k} x {n} with gradients",
            ", ".join(f"{name} {rate:.0f} TFLOP/s" for name, rate in rates.items()),
            ", ".join(f"{name} / bf16 {rate / rates['bf16']:.2f}" for name, rate in rates.items()),
        ))  # fmt: skip
    return rows


def measure_rows(steps: int) -> list[tuple[str, ...]]:
    """Step time, rates and memory of every recipe's row for one GPU."""
    rows = []
    for run in one_gpu_runs(steps):
        with jax.set_mesh(mesh.make_mesh(run.mesh_shape)):
            compiled, _, compile_s = compile_program(run)
            check_program(compiled, run)
            done = list(run_steps(run, compiled))
        times = summary.spread([s["step_time_s"] for s in done[len(done) // 2 :]])
        peak = hardware.peak_tflops(jax.devices()[0].device_kind, run.precision.dtype)
        rates = throughput(run, times["mean"], peak)
        mfu = {c: f"{100 * value:.1f} %" for c, value in rates["mfu"].items() if value}
        rows.append((
            f"{run.recipe} row 1, {run.model.layers} layers",
            f"{times['mean']:.4f} s +- {times['std']:.4f}, {rates['tokens_per_s']:.0f} tokens/s",
            f"MFU causal {mfu['causal']}, full {mfu['full']}; peak "
            f"{done[-1]['peak_memory_bytes'] / 2**30:.1f} GiB; loss {done[0]['loss']:.3f} to "
            f"{done[-1]['loss']:.3f}; compiled in {compile_s:.0f} s",
        ))  # fmt: skip
    return rows


def compile_everything() -> list[tuple[str, ...]]:
    """The same programs compiled for one absent H100."""
    device = compile_only_devices(hardware.H100, 1)
    rows = []
    for run in one_gpu_runs():
        with jax.set_mesh(mesh.make_mesh(run.mesh_shape, device)):
            compiled, _, compile_s = compile_program(run)
            check_program(compiled, run)
        peak = compiled.memory_analysis().peak_memory_in_bytes / 2**30
        rows.append((f"{run.recipe} row 1", f"compiled in {compile_s:.1f} s", f"{peak:.1f} GiB"))
    with jax.set_mesh(mesh.make_mesh((1,) * 6, device)):
        inputs = jax.eval_shape(attention_inputs)
        for name, dtype in (("cudnn", jnp.bfloat16), ("xla", jnp.float32)):
            attention_with_gradients(name, dtype).lower(*inputs).compile()
            rows.append((f"attention {name}", "compiled", ""))
        x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 4096, 8192), (8192, 10240)))
        dy = jax.ShapeDtypeStruct((1, 4096, 10240), jnp.bfloat16)
        for name in (None, "xla"):
            product_with_gradients(name).lower(x, w, dy).compile()
            rows.append((f"product {name or 'bf16'}", "compiled", ""))
    return rows


def main() -> None:
    """Runs the chosen parts and prints their tables at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="attention,products,rows")
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    if args.compile_only:
        jax.config.update("jax_platforms", "cpu")
        rows = compile_everything()
    else:
        with jax.set_mesh(mesh.make_mesh((1,) * 6)):
            rows = check_attention() if "attention" in args.only else []
        rows += measure_products() if "products" in args.only else []
        rows += measure_rows(args.steps) if "rows" in args.only else []
    print(f"\n{devices.hardware()}\n{versions()}\n")
    print("| what | result | |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
