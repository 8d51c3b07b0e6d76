"""Candidates for the grouped matmul, compiled for absent GPUs and compared with float64 on a CPU:
the tables of docs/design/experts.md.

    python benchmarks/grouped_matmuls.py [--gpus h100 b200] [--only CANDIDATE ..]

Each candidate computes the three products of `ops.grouped.Implementation` for the rows that one
device of a recipe receives: from arriving rows to permuted ones, the transpose of that, and the
gradient of the weights. Ragged dots take permuted rows, so we count the gathers before them too;
the results of all candidates are gathered afterwards. The figures come from each compiled program:
FLOPs over those that the tokens need, bytes, launches, temporaries, and the bound.

The compiler does not know the FLOPs of kernels. Ours declare those of the expected rows; for
kernels of others, `Candidate.multiplied` says them. The last table has what the kernels really
multiply, and their largest error: they run in an interpreter, where whole blocks of rows arrive and
half of the slots stay empty. Candidates that are not installed are left out
(`pip install -c constraints.txt tokamax jax-triton`).
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from one_gpu.ragged import TILES, by_lax, by_mosaic, by_tokamax, with_gathers

from jaxbench.base import hardware
from jaxbench.ops.grouped import BLOCK, NONE, Groups, group, pallas, xla
from jaxbench.ops.pallas_call import ignoring_pallas_deprecation
from jaxbench.ops.quantized.per_tensor import GRADIENTS, VALUES
from jaxbench.plan.absent import compile_only_devices, installed
from jaxbench.plan.plan import Memory
from jaxbench.recipe import recipes
from jaxbench.xla import custom_calls, flags
from jaxbench.xla.hlo import Program, Work
from jaxbench.xla.schedule import Roofline, Walk

EIGHT_RANKS = (
    "parallelism.fsdp=2", "parallelism.expert=8", "batch.microbatch=4", "execution.expert_parts=2",
    "model.experts={slots: shared, rank_capacity_factor: 1.1}",
)  # fmt: skip
ONE_SEQUENCE = "batch.microbatch=1", "execution.expert_parts=1"
SHAPES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "Qwen3 30B": ("qwen3_30b_a3b", 16, EIGHT_RANKS),
    "DeepSeek-V3": ("deepseek_v3", 1024, ONE_SEQUENCE),
}
"""Recipes, their rows and settings, in FP8: many small experts, and large ones, on eight ranks to
which tokens are sent."""

PRODUCTS = {"forward": "to_permuted", "input": "from_permuted", "weights": "weights"}

TILE = tuple(TILES[name] for name in ("block_m", "block_n", "block_k"))
"""Rows, columns and depth of the tiles of JAX's kernels."""

COUNTED: list[int] = []
"""FLOPs of each product in an interpreter."""


def by_dot(dot: Callable, product: str, a: jax.Array, b: jax.Array, groups: Groups) -> jax.Array:
    """A product by a ragged dot, with gathers before it."""
    return with_gathers(dot, PRODUCTS[product], a, b, groups)


def by_module(module: Any, product: str, a, b, groups: Groups) -> jax.Array:
    return getattr(module, PRODUCTS[product])(a, b, groups)


@contextmanager
def interpreted() -> Iterator[None]:
    """Our kernels, which Pallas interprets on a CPU, count their products."""
    add_product = pallas.add_product

    def counted(total: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        jax.debug.callback(partial(COUNTED.append, 2 * a.size * b.shape[1]))
        return add_product(total, a, b)

    with mock.patch.object(pallas, "add_product", counted):
        yield


@contextmanager
def mosaic_interpreted(m: int, n: int, k: int) -> Iterator[None]:
    """Mosaic's kernels in its interpreter (jax 0.11), which counts products of this size."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    launch, product = mosaic_gpu.kernel, gpu_callbacks.wgmma

    def counted(**operands):
        COUNTED.append(2 * m * n * k)
        return product(**operands)

    def kernel(*args, **keywords):
        interpret = mosaic_gpu.InterpretGPUParams()  # type: ignore[attr-defined]  # of jax 0.11
        return launch(*args, **keywords | {"interpret": interpret})

    with (
        mock.patch.object(mosaic_gpu, "kernel", kernel),
        mock.patch.object(gpu_callbacks, "wgmma", counted),
    ):
        yield


@dataclass(frozen=True)
class Candidate:
    """An implementation of `products(product, a, b, groups)`. `on_cpu` is the context in which it
    runs on a CPU, None if it cannot. `multiplied(product, groups, rows, capability)` are the rows
    that kernels of others multiply if the groups have `rows`. `needs` has to be installed.
    `options` are compiler options besides the recipe's."""

    products: Callable
    on_cpu: Callable | None = None
    multiplied: Callable = lambda product, groups, rows, capability: rows
    needs: str = "jax"
    options: dict[str, Any] = field(default_factory=dict)


def slots(product: str, groups: Groups, rows: int, capability: int) -> int:
    """Rows that JAX's Mosaic kernels multiply: the tiles of all slots, and one for each border."""
    tile = BLOCK if capability < 10 else 2 * BLOCK
    tiles = -(-groups.row.size // tile) + groups.ends.size - 1
    return rows if product == "weights" else tiles * tile


CUDNN = {"xla_gpu_experimental_use_ragged_dot_fusion": True}
CANDIDATES = {
    "xla": Candidate(partial(by_module, xla), nullcontext),
    "pallas": Candidate(partial(by_module, pallas), interpreted),
    "lax.ragged_dot": Candidate(partial(by_dot, by_lax), nullcontext),
    "lax.ragged_dot by cuDNN": Candidate(partial(by_dot, by_lax), options=CUDNN),
    "JAX's Mosaic kernels": Candidate(
        partial(by_dot, by_mosaic), partial(mosaic_interpreted, *TILE), slots
    ),
    "tokamax's Mosaic kernels": Candidate(
        partial(by_dot, partial(by_tokamax, "mosaic_gpu")),
        partial(mosaic_interpreted, 64, 64, 128), needs="tokamax",
    ),
    "tokamax's Triton kernels": Candidate(
        partial(by_dot, partial(by_tokamax, "triton")), needs="jax_triton"
    ),
}  # fmt: skip


@contextmanager
def seen(device: Any) -> Iterator[None]:
    """Shows this device instead of those that are here, since kernels of others ask for its
    kind."""
    with (
        mock.patch("jax.devices", return_value=[device]),
        mock.patch("jax.local_devices", return_value=[device]),
        mock.patch("jax.extend.backend.get_default_device", return_value=device),
    ):
        yield


def compiled(name: str, gpu_name: str, shape: str, dtype: str, product: str) -> dict[str, float]:
    """Figures of one product, from its compiled program."""
    candidate, gpu, (recipe, row, settings) = (
        CANDIDATES[name],
        hardware.PLANNED[gpu_name],
        SHAPES[shape],
    )
    overrides = recipes.parse_overrides(list(settings))
    run = recipes.resolve(recipes.load(f"{recipe}_fp8"), row, overrides=overrides)
    experts, ranks = run.model.experts, run.parallelism.expert
    tokens = run.microbatch * run.batch.sequence_length // run.execution.expert_parts
    received = jax.ShapeDtypeStruct((ranks, experts.count // ranks), jnp.int32)
    sent, rows = experts.rank_slots(tokens, ranks), tokens * experts.top_k
    groups = jax.eval_shape(partial(group, slots=sent, expected=rows), received)

    values, gradients = (jnp.bfloat16,) * 2 if dtype == "bf16" else (VALUES, GRADIENTS)
    d, n = run.model.embed, 2 * experts.ffn
    x = jax.ShapeDtypeStruct((ranks * sent, d), values)
    y = jax.ShapeDtypeStruct((groups.row.size, n), gradients)
    w = jax.ShapeDtypeStruct((groups.ends.size, d, n), values)
    operands = {"forward": (x, w), "input": (y, w), "weights": (x, y)}[product]
    (device,) = compile_only_devices(gpu, 1)
    with (
        seen(device),
        ignoring_pallas_deprecation(),
        jax.set_mesh(mesh := Mesh([device], ("gpu",))),
    ):
        placed = NamedSharding(mesh, PartitionSpec())
        arguments = jax.tree.map(lambda s: s.update(sharding=placed), (*operands, groups))
        lowered = jax.jit(partial(candidate.products, product)).lower(*arguments)
    executable = lowered.compile(compiler_options=flags.options(run, "gpu") | candidate.options)

    flops, kind = 2 * rows * d * n, "bf16" if dtype == "bf16" else "f8e4m3fn"
    multiplied = 2 * candidate.multiplied(product, groups, rows, gpu.capability[0]) * d * n
    targets = ("mosaic_gpu_v2", "triton_kernel_call_ffi")
    rules = dict.fromkeys(targets, lambda i, scope: Work("product", kind, multiplied))
    walk = Walk(Program.parse(executable.as_text(), custom_calls.RULES | rules))
    schedule = walk.under(Roofline(gpu))
    return {
        "FLOPs": sum(walk.program.flops().values()) / flops,
        "GB": sum(kernel.bytes * runs for _, kernel, runs in walk.kernels()) / 1e9,
        "launches": schedule.launches,
        "GiB": Memory.of(executable, gpu).temporaries / 2**30,
        "bound ms": schedule.step_s * 1e3,
    }


def on_cpu(name: str, product: str) -> dict[str, float]:
    """The largest error over the largest element, and FLOPs over those of the rows."""
    COUNTED.clear()
    candidate, size = CANDIDATES[name], 128
    groups = group(jnp.array([[128, 0, 0], [128, 0, 256]]), 448, expected=512)
    place = np.asarray(groups.place)
    filled = np.flatnonzero(place != NONE)
    permuted = place[filled]
    of = np.asarray(groups.group)[permuted // BLOCK]
    random = np.random.default_rng(0)
    x, y = np.full((place.size, size), np.nan), np.zeros((groups.row.size, size))
    x[filled], y[permuted] = random.normal(size=(2, filled.size, size))
    x, y, w = (jnp.asarray(a, jnp.bfloat16) for a in (x, y, random.normal(size=(3, size, size))))
    x64, y64, w64 = (np.asarray(a, np.float64) for a in (x[filled], y[permuted], w))
    sums = np.stack([x64[of == e].T @ y64[of == e] for e in range(3)])
    a, b, rows, exact = {
        "forward": (x, w, permuted, np.einsum("RD,RDN->RN", x64, w64[of])),
        "input": (y, w, permuted, np.einsum("RN,RDN->RD", y64, w64[of])),
        "weights": (x, y, slice(None), sums),
    }[product]
    device = SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0", core_count=4
    )
    with candidate.on_cpu(), seen(device):
        actual = np.asarray(jax.jit(partial(candidate.products, product))(a, b, groups), np.float64)
    jax.effects_barrier()
    counted = {"FLOPs": sum(COUNTED) / (2 * filled.size * size * size)} if COUNTED else {}
    return {"error": float(np.abs(actual[rows] - exact).max() / np.abs(exact).max()), **counted}


class Worker:
    """A process that computes, replaced after an error, since XLA may abort."""

    pool: ProcessPoolExecutor | None = None

    def __call__(self, function: Callable, *args: str) -> dict[str, float] | str:
        """The result, or one line about what failed, from the compiler's log if it has one."""
        with tempfile.NamedTemporaryFile("r", errors="replace") as log:
            spawn = get_context("spawn")
            self.pool = self.pool or ProcessPoolExecutor(1, spawn)
            try:
                return self.pool.submit(logged, log.name, function, *args).result()
            except Exception as error:
                self.pool = self.pool.shutdown()
                lines = f"{error}".strip().splitlines() or [""]
                found = re.search(r"(?:error *|Check failed|Fatal Error.*): .*", log.read())
                first = found.group() if found else lines[-1 if "Traceback" in lines[0] else 0]
                return f"{type(error).__name__}: {first}"


def logged(log: str, function: Callable, *args: str) -> dict[str, float]:
    """The result, with stderr, also the compiler's, written to a file."""
    os.dup2(os.open(log, os.O_WRONLY), 2)
    return function(*args)


def table(names: list[str], keys: dict[str, str], function: Callable, *args: str) -> None:
    """Prints a row for each candidate, with figures of the three products, and what failed."""
    print("|  | " + " | ".join(keys) + " |\n" + "|---" * (len(keys) + 1) + "|")
    failed = []
    for name in names:
        results: list = []
        if not installed(CANDIDATES[name].needs):
            failed.append(f"{name}: not installed")
        elif function is on_cpu and CANDIDATES[name].on_cpu is None:
            failed.append(f"{name}: no interpreter")
        else:
            worker = Worker()  # of its own: Mosaic's ptxas fails after jax-triton's
            results = [worker(function, name, *args, product) for product in PRODUCTS]
        cells = (
            " / ".join(format(r[key], form) if key in r else "-" for r in results)
            for key, form in keys.items()
        )
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        pairs = zip(PRODUCTS, results, strict=False)
        failed += [f"{name}, {product}: {r}" for product, r in pairs if isinstance(r, str)]
    print("", *failed, sep="\n")


def main() -> None:
    """Prints a table for each shape, dtype and GPU, and that of the CPU."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", nargs="+", default=["h100", "b200"])
    parser.add_argument("--only", nargs="+", default=list(CANDIDATES), metavar="CANDIDATE")
    arguments = parser.parse_args()
    if found := find_spec("nvidia"):  # jax-triton takes the first ptxas, which has to be new
        os.environ["PATH"] = f"{found.submodule_search_locations[0]}/cu13/bin:{os.environ['PATH']}"
    print(f"jax {jax.__version__}; each figure: {' / '.join(PRODUCTS)}")
    keys = {"FLOPs": ".2f", "GB": ".2f", "launches": "d", "GiB": ".2f", "bound ms": ".2f"}
    for shape in SHAPES:
        for dtype in ("bf16", "fp8"):
            for gpu in arguments.gpus:
                print(f"\n{shape}, {dtype}, {gpu}\n")
                table(arguments.only, keys, compiled, gpu, shape, dtype)
    print("\nOn a CPU, bf16\n")
    table(arguments.only, {"error": ".0e", "FLOPs": ".2f"}, on_cpu)


if __name__ == "__main__":
    main()
