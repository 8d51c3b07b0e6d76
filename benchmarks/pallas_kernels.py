"""Compiles every Pallas kernel for absent GPUs, and asks ptxas what it became: writes
`docs/reference/kernels.md`.

    python benchmarks/pallas_kernels.py [--write] [--only CASE ..]

Needs jax 0.10: XLA of 0.11 writes PTX only together with the code after every pass, in minutes.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402
from one_gpu.tiles import MODELS  # noqa: E402
from tables import table  # noqa: E402

from jaxbench import mesh  # noqa: E402
from jaxbench.base import hardware  # noqa: E402
from jaxbench.base.scopes import TRITON  # noqa: E402
from jaxbench.ops import ssd  # noqa: E402
from jaxbench.ops.grouped import pallas, scaled  # noqa: E402
from jaxbench.ops.grouped.groups import BLOCK, Groups, group  # noqa: E402
from jaxbench.ops.kernel_sizes import Choices, using  # noqa: E402
from jaxbench.ops.pallas_call import ignoring_pallas_deprecation  # noqa: E402
from jaxbench.ops.quantized import kernels  # noqa: E402
from jaxbench.ops.quantized.block_formats import FORMATS, Blocks  # noqa: E402
from jaxbench.ops.quantized.per_tensor import GRADIENTS, VALUES  # noqa: E402
from jaxbench.ops.ssd import pallas as ssd_kernels  # noqa: E402
from jaxbench.plan.absent import compile_only_devices  # noqa: E402
from jaxbench.recipe import recipes  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "kernels.md"

GPUS = "h100", "b200", "gb300"
"""One GPU of each architecture."""

MAMBA = "nemotronh_56b", "nemotron3_nano_30b_a3b", "nemotron3_super_120b_a12b"

REGISTERS, THREADS, PROGRAMS, SHARED, TENSOR_COLUMNS = 65536, 2048, 32, 233472, 512
"""What a multiprocessor has."""

RESERVED = 1024
"""Bytes of shared memory that a program takes besides its own."""

HEADER = (
    "kernel", "at the sizes of", "architecture", "registers", "spilled bytes, stored / loaded",
    "stack", "shared KiB", "threads", "programs", "tensor cores",
)  # fmt: skip

TEXT = """# Pallas kernels as compiled

`python benchmarks/pallas_kernels.py --write` made this page, without a GPU, with jax {version}.
XLA compiles each kernel at the sizes of a recipe's row, for one device.
The device has all groups of a Mamba-2 mixer, or the experts that expert parallelism leaves it.
ptxas says what the kernel's PTX becomes.

- **Registers** are those of a thread, 255 at most.
  What does not fit is **spilled** to local memory, and costs stores and loads where it is used.
  ptxas counts the bytes of these instructions once, not how often they run.
- **Programs** is how many run at once on a multiprocessor.
  Registers, shared memory, threads and Blackwell's tensor memory set it.
  Where only one runs, nothing hides the time that it waits for memory or at barriers.
- **Tensor cores** has the instruction with the types of its operands.
  `wgmma` is Hopper's and `tcgen05` is Blackwell's; `mma.sync` is older than both, and slower.
- sm_90a is an H100 or H200, sm_100a a B200 or GB200, sm_103a a B300 or GB300.

[Mamba-2](../design/scan.md#registers) says why its kernels spill, and what was changed.
`tests/test_kernel_report.py` compares this page with new compilations.
`tests/ops/test_offsets.py` checks that no offset of an element overflows.

{table}"""


@dataclass(frozen=True)
class Case:
    """A function of arrays of these types that calls kernels, for GPUs that multiply in a dtype."""

    name: str
    dtype: str
    function: Callable[..., Any]
    arrays: tuple[Any, ...]


@dataclass(frozen=True, order=True)
class Kernel:
    """What a kernel became on an architecture."""

    name: str
    case: str
    architecture: str
    registers: int
    stored: int
    loaded: int
    stack: int
    shared: int
    threads: int
    tensor: str
    tensor_columns: int = 0

    @property
    def programs(self) -> int:
        """Programs on a multiprocessor. A warp's registers are given out in units of 256."""
        warps = self.threads // 32
        per_warp = -(-self.registers * 32 // 256) * 256
        limits = [
            REGISTERS // (per_warp * warps), THREADS // self.threads, PROGRAMS,
            SHARED // (self.shared + RESERVED),
        ]  # fmt: skip
        if self.tensor_columns:
            limits.append(TENSOR_COLUMNS // self.tensor_columns)
        return min(limits)

    def cells(self) -> tuple[str, ...]:
        return (
            f"`{self.name}`", self.case, self.architecture, str(self.registers),
            f"{self.stored} / {self.loaded}" if self.stored or self.loaded else "0",
            str(self.stack), f"{self.shared / 1024:.0f}", str(self.threads), str(self.programs),
            self.tensor,
        )  # fmt: skip


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def on_device(function: Callable) -> Callable:
    """A function of the arrays of the mesh's one device."""
    return lambda *arrays: mesh.on_each_device(function, PartitionSpec())(*arrays)


def cases() -> Iterator[Case]:
    """Every kernel at the sizes of recipes."""
    for model in MAMBA:
        yield mixer(model)
    for model in MODELS:
        for dtype, values, gradients in (
            ("bf16", jnp.bfloat16, jnp.bfloat16), ("fp8", VALUES, GRADIENTS)
        ):  # fmt: skip
            yield grouped(model, dtype, values, gradients)
    for dtype in FORMATS:
        yield block_scaled("deepseek_v3", dtype)


def mixer(model: str) -> Case:
    """A mixer between its projections, with gradients, on one sequence."""
    run = recipes.resolve(recipes.load(f"{model}_bf16"), 1)
    cfg = run.model.mamba
    assert cfg is not None
    groups, heads, length = cfg.groups, cfg.heads // cfg.groups, run.batch.sequence_length
    dims = ssd.Dims(heads, cfg.head_dim, cfg.state, run.model.norm_eps)
    of_heads = array(jnp.float32, groups, heads)
    parameters = ssd.Parameters(
        array(jnp.float32, groups, 4, dims.channels), array(jnp.float32, groups, dims.channels),
        of_heads, of_heads, of_heads, array(jnp.float32, groups, dims.inner),
    )  # fmt: skip

    def run_both(projected, parameters, cotangent):
        mix = on_device(partial(ssd_kernels.mixer, dims))
        out, vjp = jax.vjp(mix, projected, parameters)
        return out, vjp(cotangent)

    projected, out = (
        array(jnp.bfloat16, 1, length, groups, columns) for columns in (dims.columns, dims.inner)
    )
    return Case(model, "bf16", run_both, (projected, parameters, out))


def experts(model: str) -> tuple[int, int, int, int]:
    """(experts on a device, rows, features of arriving and of permuted rows)."""
    count, rows = MODELS[model]
    cfg = recipes.resolve(recipes.load(f"{model}_bf16"), 1).model
    assert cfg.experts is not None
    return count, rows, cfg.embed, 2 * cfg.experts.ffn


def of_experts(counts: jax.Array, rows: int) -> Groups:
    return group(counts, rows, rows)


def grouped(model: str, dtype: str, values: Any, gradients: Any) -> Case:
    """The three grouped matmuls of a model's experts."""
    count, rows, inputs, outputs = experts(model)
    permuted = (rows + count * (BLOCK - 1)) // BLOCK * BLOCK

    def multiply(x, w, dy, counts):
        groups, scale = of_experts(counts, rows), jnp.ones(1) if dtype == "fp8" else None
        return (
            pallas.to_permuted(x, w, groups, scale), pallas.from_permuted(dy, w, groups, scale),
            pallas.weights(x, dy, groups, scale),
        )  # fmt: skip

    arrays = (
        array(values, rows, inputs), array(values, count, inputs, outputs),
        array(gradients, permuted, outputs), array(jnp.int32, 1, count),
    )  # fmt: skip
    return Case(f"{model}, {dtype}", dtype, on_device(multiply), arrays)


def block_scaled(model: str, dtype: str) -> Case:
    """Quantization of rows, and the grouped matmuls of a model's experts, in blocks."""
    count, rows, inputs, outputs = experts(model)
    permuted, of = (rows + count * (BLOCK - 1)) // BLOCK * BLOCK, FORMATS[dtype]

    def blocks(*shape: int) -> Blocks:
        *outer, last = shape
        values, scales = array(of.values, *shape), array(of.scales, *outer, last // of.size)
        return Blocks(values, scales, array(jnp.float32) if dtype == "nvfp4" else None)

    def multiply(x, seeds, by_row, w, first, last, counts):
        groups = of_experts(counts, rows)
        both = (
            kernels.quantize_mxfp8(x)
            if dtype == "mxfp8"
            else kernels.quantize_nvfp4(x, seeds, True)
        )
        by_weight = scaled.by_weight(by_row, w, "first", groups)
        return both, by_weight, scaled.of_weight(first, last, groups)

    arrays = (
        array(jnp.bfloat16, 1, rows, inputs), array(jnp.uint32, 2), blocks(1, permuted, inputs),
        blocks(count, outputs, inputs), blocks(1, inputs, permuted), blocks(1, outputs, permuted),
        array(jnp.int32, 1, count),
    )  # fmt: skip
    return Case(f"{model}, {dtype}", dtype, on_device(multiply), arrays)


def compiled(case: Case, gpu: hardware.Gpu) -> Iterator[Kernel]:
    """The Pallas kernels of a case on a GPU."""
    on = mesh.make_mesh((1,) * len(mesh.AXES), compile_only_devices(gpu, 1))
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(on), ignoring_pallas_deprecation():
        program = jax.jit(case.function).lower(*case.arrays).compile({"xla_dump_to": folder})
        calls = rf'="{re.escape(TRITON)}".*, name = "(\w+)", num_stages'
        ours = set(re.findall(calls, program.as_text()))
        launches = "".join(p.read_text() for p in Path(folder).glob("*thunk_sequence.txt"))
        shared = {
            name: int(size)
            for name, size in re.findall(r"kCustomKernel .*\] (\S+) grid.*memory: (\d+)", launches)
        }
        for path in sorted(Path(folder).glob("*.ptx")):
            ptx = path.read_text()
            name = entry(ptx)
            if plain(name) in ours:
                yield assembled(plain(name), case.name, ptx, path, shared[name])


def entry(ptx: str) -> str:
    """The name of the first kernel of a PTX file; a Pallas kernel has a file of its own."""
    found = re.search(r"\.entry (\w+)", ptx)
    return found[1] if found else ""


def plain(name: str) -> str:
    """The name of a kernel without the number that XLA gives to its second variant."""
    return re.sub(r"__\d+$", "", name)


def assembled(name: str, case: str, ptx: str, path: Path, shared: int) -> Kernel:
    """What ptxas says of a kernel."""
    (architecture,) = re.findall(r"^\.target (\w+)", ptx, re.M)
    said = subprocess.run(
        [ptxas(), "-v", f"-arch={architecture}", "-o", os.devnull, path],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    (stack, stored, loaded), *_ = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said
    )
    (registers,) = re.findall(r"Used (\d+) registers", said)
    (threads,) = re.findall(r"\.reqntid (\d+)", ptx)
    (columns,) = re.findall(r"tcgen05\.alloc\.\S+ \[[^]]*\], (\d+)", ptx) or ("0",)
    return Kernel(
        name, case, architecture, int(registers), int(stored), int(loaded), int(stack), shared,
        int(threads), tensor_instructions(ptx), int(columns),
    )  # fmt: skip


def tensor_instructions(ptx: str) -> str:
    """The tensor core instructions of a kernel with their types; `none` without one."""
    found = re.findall(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)(\.\S+)", ptx)
    kinds = {(name, re.sub(r"\.(sync|aligned|row|col|cta_group::1|m\d+n\d+k\d+)\b", "", of))
             for name, of in found}  # fmt: skip
    return ", ".join(f"`{name}{of}`" for name, of in sorted(kinds)) or "none"


def ptxas() -> Path:
    """The assembler in nvidia-cuda-nvcc."""
    spec = find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    found = (p for place in places or () for p in Path(place).glob("*/bin/ptxas"))
    return next(found)


def report(only: tuple[str, ...] = (), gpus: tuple[str, ...] = GPUS) -> list[Kernel]:
    """All kernels of the cases. If a kernel is compiled both with and without further results, this
    is the variant that spills most."""
    found: dict[tuple[str, ...], Kernel] = {}
    for case in cases():
        for gpu in (hardware.PLANNED[name] for name in gpus):
            if (only and case.name not in only) or not gpu.multiplies(case.dtype):
                continue
            for kernel in compiled(case, gpu):
                key = kernel.name, kernel.case, kernel.architecture
                found[key] = max(kernel, found.get(key, kernel), key=lambda k: (k.stored, k))
    return sorted(found.values())


def candidates(only: tuple[str, ...]) -> Iterator[str]:
    """A line for each of the sizes among which `train --tune-kernels` chooses, for the first GPU
    that multiplies in a case's format."""
    for case in cases():
        gpu = next(g for g in (hardware.PLANNED[name] for name in GPUS) if g.multiplies(case.dtype))
        if only and case.name not in only:
            continue
        on = mesh.make_mesh((1,) * len(mesh.AXES), compile_only_devices(gpu, 1))
        with using(choices := Choices()), jax.set_mesh(on):
            jax.jit(case.function).trace(*case.arrays)
        sizes = {name: asked.candidates for name, asked in choices.asked.items()}
        for number in range(max(map(len, sizes.values()), default=0)):
            chosen = {name: of[number] for name, of in sizes.items() if number < len(of)}
            words = [f"{name.split()[0]}: {of}" for name, of in chosen.items()]
            try:
                with using(Choices(chosen)):
                    found = sorted(compiled(case, gpu))
            except jax.errors.JaxRuntimeError as error:
                yield f"{case.name}, {words}: {str(error).splitlines()[0]}"
                continue
            yield from (" | ".join(kernel.cells()) for kernel in found)
            yield from words


def rows(found: list[Kernel]) -> list[tuple[str, ...]]:
    """Cells of the table; architectures that differ in nothing share a row."""
    same: dict[Kernel, list[str]] = {}
    for kernel in found:
        same.setdefault(replace(kernel, architecture=""), []).append(kernel.architecture)
    return [replace(k, architecture=", ".join(on)).cells() for k, on in same.items()]


def page(found: list[Kernel]) -> str:
    return TEXT.format(version=jax.__version__, table="\n".join(table(HEADER, rows(found))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="cases by name")
    parser.add_argument(
        "--candidates", action="store_true",
        help="print every candidate of train --tune-kernels instead",
    )  # fmt: skip
    args = parser.parse_args()
    if args.candidates:
        for line in candidates(tuple(args.only)):
            print(line, flush=True)
        return
    found = report(tuple(args.only))
    if not found:
        sys.exit("no PTX of a Pallas kernel was dumped; expected jax 0.10 and a known --only CASE")
    text = page(found)
    PAGE.write_text(text) if args.write else print(text, end="")


if __name__ == "__main__":
    main()
