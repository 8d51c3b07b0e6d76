"""The command `jaxbench calibrate`: measures this machine's kernels for forecasts.

The file that it writes has the format of `forecast.tables`. It holds matmuls in bf16 and FP8,
attention forward and backward, copies, and with several GPUs collectives inside the node. With it
`jaxbench plan .. --kernels mine.csv` forecasts any row. What it does not measure still comes from
the package: grouped matmuls, Mamba-2's scan, rates that matmuls sustain, and the network between
nodes.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import track

from jaxbench.base import hardware
from jaxbench.base.errors import RecipeError
from jaxbench.base.terminal import check_folder, command, write
from jaxbench.base.versions import versions
from jaxbench.calibrate.arguments import make_parser
from jaxbench.cluster.timing import collective_kinds, repeated
from jaxbench.forecast.tables import Sizes, line, text
from jaxbench.ops import attention
from jaxbench.ops.quantized.operand import multiply
from jaxbench.ops.quantized.per_tensor import VALUES
from jaxbench.xla import flags

REPEATS = 10
"""Number of runs of a kernel in one program, so that the launch of the program matters little."""

LEAST = 0.1
"""The smallest time that is written, in microseconds."""

SECONDS = 0.05
"""We repeat a warm program for at least this long, in seconds."""

LANES = 4
"""Programs that are compiled at a time. Each may need 12 GiB of the GPU, for the largest matmul."""


@dataclass(frozen=True)
class Sample:
    """The sizes that are measured. Matmuls have all combinations of `rows` and `sizes`. Attention
    has `tokens` tokens at every length. `copied` and `sent` are bytes; for a collective they are
    the bytes of its whole buffer."""

    rows: tuple[int, ...]
    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int
    heads: int
    head_dim: int
    copied: tuple[int, ...]
    sent: tuple[int, ...]


GPU_SAMPLE = Sample(
    rows=(2048, 8192, 32768),
    sizes=(1024, 4096, 8192, 16384, 65536),
    lengths=(1024, 2048, 4096, 8192, 16384),
    tokens=16384,
    heads=16,
    head_dim=128,
    copied=(2**16, 2**20, 2**24, 2**28, 2**31),
    sent=(2**17, 2**20, 2**23, 2**26, 2**29),
)
TINY_SAMPLE = Sample(
    rows=(64,), sizes=(64, 128), lengths=(64,), tokens=128, heads=2, head_dim=16,
    copied=(2**10, 2**12), sent=(2**12, 2**13),
)  # fmt: skip
"""The sample of a rehearsal on a CPU, which only tests that everything runs."""

Array = Callable[..., jax.ShapeDtypeStruct]
"""A function of a shape and a dtype that describes an array on one GPU."""

Arguments = tuple[jax.ShapeDtypeStruct, ...]
"""Shapes, dtypes and places of a kernel's arguments."""

T = TypeVar("T")

LARGEST = 2**31
"""Maximum number of elements in the largest array of a matmul."""


@dataclass(frozen=True)
class Probe:
    """A kernel to measure: the kind, name and sizes of its line in the table, its function, and the
    shapes and dtypes of the arguments. We subtract the time of a loop over `baseline` from the time
    of a loop over `function`. With None the baseline is an empty loop."""

    kind: str
    name: str
    sizes: Sizes
    function: Callable[..., Any]
    arguments: Arguments
    baseline: Callable[..., Any] | None = None


def probes(sample: Sample, kernel: str, gpus: Sequence[jax.Device]) -> Iterator[Probe]:
    """Everything that is measured on some GPUs of a node. `kernel` names the kernel that computes
    attention."""
    array = partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(gpus[0]))
    yield from products(sample, array)
    yield from attentions(sample, kernel, array)
    for size in sample.copied:
        yield Probe("memory", "any", (size,), jnp.negative, (array((size // 4,), jnp.bfloat16),))
    for count in (2, 4, 8):
        if count <= len(gpus):
            yield from collectives(sample, gpus[:count])


def products(sample: Sample, array: Array) -> Iterator[Probe]:
    """Matmuls of [m, k] and [n, k], the layout that FP8 matmuls need, with a bf16 result."""
    combined = [(m, n, k) for m in sample.rows for n in sample.sizes for k in sample.sizes]
    for m, n, k in combined:
        if max(m * n, m * k, n * k) > LARGEST:
            continue
        x, w = (m, k), (n, k)
        in_bf16 = array(x, jnp.bfloat16), array(w, jnp.bfloat16)
        yield Probe("product", "bf16", (m, n, k), partial(jnp.einsum, "mk,nk->mn"), in_bf16)
        inverse = array((), jnp.bfloat16)
        in_fp8 = array(x, VALUES), inverse, array(w, VALUES), inverse
        yield Probe("product", "fp8", (m, n, k), partial(multiply, "mk,nk->mn"), in_fp8)


def attentions(sample: Sample, kernel: str, array: Array) -> Iterator[Probe]:
    """Causal attention, forward and backward. The time of the backward pass is the time of both
    passes minus the time of the forward pass."""
    attend = attention.IMPLEMENTATIONS[kernel].call

    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attend(query, key, value, query.shape[-1] ** -0.5)

    def backward(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        out, vjp = jax.vjp(call, query, key, value)
        return vjp(out)

    for length in sample.lengths:
        batch, width = sample.tokens // length, sample.head_dim
        sizes = (batch, sample.heads, length, width, width)
        shape = (batch, length, sample.heads, width)
        arrays = (array(shape, jnp.bfloat16),) * 3
        yield Probe("attention", "forward", sizes, call, arrays)
        yield Probe("attention", "backward", sizes, backward, arrays, baseline=call)


def collectives(sample: Sample, gpus: Sequence[jax.Device]) -> Iterator[Probe]:
    """Collectives among some GPUs, on arrays in bf16."""
    n, split = len(gpus), jax.P("gpus")
    mesh = jax.make_mesh((n,), ("gpus",), devices=gpus)
    for name, (function, buffers) in collective_kinds(n).items():
        on_all = jax.shard_map(
            function, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
        )
        for size in sample.sent:
            operand = jax.ShapeDtypeStruct(
                (buffers * size // 2,), jnp.bfloat16, sharding=jax.NamedSharding(mesh, split)
            )
            yield Probe("collective", name, (n, size), on_all, (operand,))


def compiled(function: Callable[..., Any], arguments: Arguments) -> jax.stages.Compiled:
    """The program that repeats a kernel. It is compiled with the options of a training step."""
    (platform,) = {d.platform for a in arguments for d in a.sharding.device_set}
    options: Any = flags.TUNED if platform == "gpu" else {}
    return jax.jit(repeated(function, REPEATS)).lower(*arguments).compile(options)


def measure(every: Sequence[Probe]) -> list[float]:
    """Microseconds of one run of each kernel, without the time of the loop around it. We compile
    all programs before we time one, several at a time: XLA times candidates of matmuls while it
    compiles."""

    def programs(probe: Probe) -> list[jax.stages.Compiled]:
        functions = filter(None, (probe.function, probe.baseline))
        return [compiled(function, probe.arguments) for function in functions]

    with ThreadPoolExecutor(LANES) as pool:
        work = [pool.submit(programs, probe) for probe in every]
        compiled_programs = [done.result() for done in shown(work)]
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    nothing = (jax.ShapeDtypeStruct((1,), jnp.bfloat16, sharding=device),)
    empty_loop = _microseconds(compiled(lambda x: x, nothing), nothing)

    def own(probe: Probe, programs: list[jax.stages.Compiled]) -> float:
        took, *baseline = (_microseconds(program, probe.arguments) for program in programs)
        return max(took - (baseline[0] if baseline else empty_loop), LEAST)

    return [own(*pair) for pair in shown(list(zip(every, compiled_programs, strict=True)))]


def shown(items: Sequence[T]) -> Iterable[T]:
    """Iterates over some items. A terminal shows how far it is."""
    console = Console(stderr=True)
    return track(items, "measuring", console=console, disable=not console.is_terminal)


def _microseconds(program: jax.stages.Compiled, arguments: Arguments) -> float:
    keys = jax.random.split(jax.random.key(0), len(arguments))
    values = [
        jax.device_put(jax.random.normal(key, a.shape, jnp.bfloat16).astype(a.dtype), a.sharding)
        for key, a in zip(keys, arguments, strict=True)
    ]
    jax.block_until_ready(program(*values))
    best, ends = float("inf"), time.perf_counter() + SECONDS
    while True:
        start = time.perf_counter()
        jax.block_until_ready(program(*values))
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > ends:
            return best / REPEATS * 1e6


def table(gpu: str, device: str, lines: list[str]) -> str:
    """The text of the file."""
    here = ", ".join(f"{name} {value}" for name, value in versions().items() if value)
    kinds = dict.fromkeys(line.partition(",")[0] for line in lines)
    comments = [*(f"{kind}: measured on {device}" for kind in kinds), f"with {here}"]
    return text(gpu, comments, lines)


@command
def main(argv: Sequence[str] | None) -> int:
    """Runs the command: measures, and writes the file."""
    args = make_parser().parse_args(argv)
    check_folder(args.output)
    if args.rehearse:
        jax.config.update("jax_platforms", "cpu")
    devices = jax.local_devices()
    device = devices[0].device_kind
    if hardware.is_null(device):
        raise RecipeError(f"{device}: {hardware.NULL}")
    gpu = hardware.identify(device)
    if not args.rehearse and gpu not in hardware.PLANNED.values():
        known = ", ".join(hardware.PLANNED)
        raise RecipeError(f"{device} is not a GPU that plan knows; expected one of {known}")
    sample, kernel = (TINY_SAMPLE, "xla") if args.rehearse else (GPU_SAMPLE, "cudnn")
    planned = list(probes(sample, kernel, devices))
    took = measure(planned)
    lines = [line(p.kind, p.name, p.sizes, us) for p, us in zip(planned, took, strict=True)]
    write(table(gpu.name.lower() if gpu else "cpu", device, lines), args.output)
    print(f"measured {len(lines)} kernels of {device}; for jaxbench plan --kernels {args.output}")
    return 0
