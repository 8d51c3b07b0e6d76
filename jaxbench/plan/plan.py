"""A plan: what one step of a run needs, sends and executes on GPUs that are not there.

`docs/plan.md` explains the model behind the step-time bound.
"""

import json
import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from jaxbench import mesh
from jaxbench.errors import RecipeError
from jaxbench.forecast.forecast import Forecast, forecast
from jaxbench.forecast.tables import load
from jaxbench.hardware import Gpu
from jaxbench.plan.absent import compile_only_devices, placed
from jaxbench.plan.traffic import Traffic, axes_of, traffic
from jaxbench.recipe import flops, published, recipes
from jaxbench.recipe.settings import Run
from jaxbench.recipe.throughput import model_flops, throughput
from jaxbench.train.pipeline import held_gradients
from jaxbench.train.program import RULES, check_program, compile_program
from jaxbench.train.stages import Stages
from jaxbench.train.step import abstract_state
from jaxbench.train.timetable import timetable
from jaxbench.versions import versions
from jaxbench.xla import flags, memory, schedule
from jaxbench.xla.hlo import Program
from jaxbench.xla.memory import Buffer

SHOWN_BUFFERS = 12
SHOWN_KERNELS = 10


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device."""

    arguments: int
    temporaries: int
    peak: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes on one device of the train state, by part, and of the gradients that a step sums up."""

    parameters: int
    optimizer: int
    gradients: int


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one device and step: the model's in two conventions, and those compiled.

    `recompute_ratio` is compiled over `model_full`, since compiled attention is counted unmasked.
    """

    model_causal: float
    model_full: float
    compiled: float
    recompute_ratio: float


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Runs per step of matrix products by dtype, and of fused attention, forward and backward."""

    gemm_bf16: int
    gemm_fp8: int
    attention: int


@dataclass(frozen=True, kw_only=True)
class OtherKernels:
    """Kernels that are neither products nor attention, by the JAX operation they stem from: seconds
    of the bound, and launches, per step."""

    source: str
    seconds: float
    launches: int


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Seconds of the bound: products and attention, other kernels, waiting for collectives."""

    compute: float
    memory: float
    exposed: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What follows from a step time; model FLOPs utilisation with attention counted in full, None
    where no peak is known."""

    tokens_per_s_per_gpu: float
    mfu: float | None


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """How a step goes through a pipeline. `bubble` is the time for which a rank is idle over that
    for which it works, `slots` are as many chunks of layers as ever wait for their backward pass,
    and `padding` are layers that are computed without being there."""

    ranks: int
    virtual_stages: int
    microbatches: int
    bubble: float
    slots: int
    padding: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything about one row; FLOPs and bytes are per device and step. `fits` is true of the
    beginning too: making or restoring the state holds the step's arguments, and nothing beside
    them. `rates` are those of the bound, the forecast and the published step time."""

    recipe: str
    row: str
    gpus: int
    target: str
    fits: bool
    mesh: str
    settings: dict[str, Any]
    system: dict[str, Any]
    flags: flags.Options
    versions: dict[str, str | None]
    parameters: int
    bytes_per_device: Memory
    state_bytes: StateBytes
    largest_buffers: list[Buffer]
    flops: Flops
    collectives: list[Traffic]
    wire_bytes: int
    uncovered_wire_bytes: int
    kernels: Kernels
    stages: Pipelined | None
    launches: int
    other_kernels: list[OtherKernels]
    lower_s: float
    compile_s: float
    bound_parts_s: Bound
    bound_step_s: float
    forecast_step_s: float
    forecast: Forecast
    rates: dict[str, Rates]
    published: dict[str, Any] | None


NESTED = {
    "bytes_per_device": Memory, "state_bytes": StateBytes, "flops": Flops, "kernels": Kernels,
    "bound_parts_s": Bound, "stages": Pipelined, "forecast": Forecast,
}  # fmt: skip
LISTS = {"largest_buffers": Buffer, "collectives": Traffic, "other_kernels": OtherKernels}


def read(path: Path) -> Plan:
    """A plan that `--dump` left. Raises RecipeError where it is none."""
    try:
        values = json.loads(path.read_text())
        nested = {name: cls(**values[name]) for name, cls in NESTED.items() if values[name]}
        lists = {name: [cls(**v) for v in values[name]] for name, cls in LISTS.items()}
        rates = {name: Rates(**v) for name, v in values["rates"].items()}
        return Plan(**(values | nested | lists | {"rates": rates}))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RecipeError(f"{path}: cannot read a plan: {error}") from error


def make_plan(run: Run, gpu: Gpu, dump: Path | None = None, kernels: Path | None = None) -> Plan:
    """Compiles one step of the run for absent GPUs, and describes it. The scheduled program is kept
    in `dump`; `kernels` are measurements that come before the package's (`forecast.tables`)."""
    tables = load(gpu.name.lower(), kernels)
    gpu = placed(gpu, run.gpus)
    devices = compile_only_devices(gpu, run.gpus)
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape, devices)):
        compiled, live_ranges, lower_s, compile_s = compile_with_ranges(run)
        state = state_bytes(run)
    text = compiled.as_text()
    if dump is not None:
        (dump / "program.hlo.txt").write_text(text)
    program, stats = Program.parse(text, RULES), compiled.memory_analysis()
    walk = schedule.Walk(program)
    timeline = walk.under(schedule.Roofline(gpu))
    expected = forecast(walk, gpu, tables, lambda c: axes_of(c, run))
    row = published.lookup(run, gpu)
    bytes_per_device = Memory(
        arguments=stats.argument_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
        limit=gpu.memory_limit,
    )
    return Plan(
        recipe=run.recipe,
        row=run.row,
        gpus=run.gpus,
        target=gpu.name.lower(),
        fits=bytes_per_device.peak <= gpu.memory_limit,
        mesh=run.mesh_text(),
        settings=recipes.describe(run),
        system=system(gpu),
        flags=flags.options(run, "gpu"),
        versions=versions(),
        parameters=flops.parameters(run.model)["total"],
        bytes_per_device=bytes_per_device,
        state_bytes=state,
        largest_buffers=memory.largest(program, live_ranges, SHOWN_BUFFERS),
        flops=executed(run, program),
        collectives=traffic(run, gpu, timeline),
        wire_bytes=sum(t.collective.wire_bytes for t in timeline.transfers),
        uncovered_wire_bytes=timeline.uncovered_bytes,
        kernels=executed_kernels(program),
        stages=stages(run),
        launches=timeline.kernels,
        other_kernels=other_kernels(walk, gpu),
        lower_s=lower_s,
        compile_s=compile_s,
        bound_parts_s=Bound(
            compute=timeline.parts["compute"],
            memory=timeline.parts["memory"],
            exposed=timeline.exposed_s,
        ),
        bound_step_s=timeline.step_s,
        forecast_step_s=expected.step_s,
        forecast=expected,
        rates=rates(run, gpu, timeline.step_s, expected.step_s, row),
        published=asdict(row) if row else None,
    )


def compile_with_ranges(run: Run) -> tuple[Any, str, float, float]:
    """(executable, when its buffers live, seconds to lower, seconds to compile) on the current
    mesh, checked to be what was asked for."""
    with tempfile.TemporaryDirectory() as tmp:
        options = {"xla_dump_to": tmp, "xla_dump_hlo_as_text": True}
        compiled, lower_s, compile_s = compile_program(run, options)
        check_program(compiled, run)
        live_ranges = next(Path(tmp).glob("*live-range.txt")).read_text()
    return compiled, live_ranges, lower_s, compile_s


def system(gpu: Gpu) -> dict[str, Any]:
    """What a plan depends on of the GPUs and their links."""
    names = ("device", "memory", "bandwidth", "nvlink", "nic", "node", "domain")
    return {name: getattr(gpu, name) for name in names}


def state_bytes(run: Run) -> StateBytes:
    """`StateBytes` on the current mesh."""
    state = abstract_state(run)

    def local(tree: Any, width: int = 0) -> int:
        total = 0
        for x in jax.tree.leaves(tree):
            shape = x.sharding.shard_shape(x.shape) if x.shape else x.shape
            total += (width or x.dtype.itemsize) * math.prod(shape)
        return total

    gradients = local(state.model, run.gradient_bytes)
    if run.parallelism.pipeline > 1:
        gradients = run.gradient_bytes * held_gradients(state.model, run)
    return StateBytes(
        parameters=local(state.model), optimizer=local(state.optimizer), gradients=gradients
    )


def stages(run: Run) -> Pipelined | None:
    """`Pipelined` of a run; None without a pipeline."""
    ranks, chunks = run.parallelism.pipeline, run.parallelism.virtual_stages
    if ranks == 1:
        return None
    return Pipelined(
        ranks=ranks,
        virtual_stages=chunks,
        microbatches=run.accumulation,
        bubble=(ranks - 1) / (chunks * run.accumulation),
        slots=timetable(ranks, chunks, run.accumulation).slots,
        padding=Stages.of(run).padding,
    )


def executed(run: Run, program: Program) -> Flops:
    """`Flops` of a program."""
    share = run.batch.global_batch / run.gpus
    full = model_flops(run, "full") * share
    compiled = sum(program.flops().values())
    return Flops(
        model_causal=model_flops(run, "causal") * share,
        model_full=full,
        compiled=compiled,
        recompute_ratio=compiled / full,
    )


def executed_kernels(program: Program) -> Kernels:
    """`Kernels` of a program."""
    runs = {"fp8": 0, "bf16": 0, "attention": 0}
    for work, times, _ in program.works():
        dtype = "fp8" if work.dtype.startswith("f8") else work.dtype
        name = dtype if work.kind == "product" else work.kind
        runs[name] = runs.get(name, 0) + times
    return Kernels(gemm_bf16=runs["bf16"], gemm_fp8=runs["fp8"], attention=runs["attention"])


def other_kernels(walk: schedule.Walk, gpu: Gpu) -> list[OtherKernels]:
    """The largest `OtherKernels` of a program, by their seconds."""
    roofline = schedule.Roofline(gpu)
    found: dict[str, tuple[float, int]] = {}
    for _, kernel, runs in walk.kernels():
        if not any(work.kind in ("product", "attention") for work in kernel.works):
            source = memory.readable(kernel.source, "without a name")
            seconds, launches = found.get(source, (0.0, 0))
            seconds += sum(roofline.kernel(kernel).values()) * runs
            found[source] = seconds, launches + runs
    each = [
        OtherKernels(source=source, seconds=seconds, launches=launches)
        for source, (seconds, launches) in found.items()
    ]
    return sorted(each, key=lambda kernels: -kernels.seconds)[:SHOWN_KERNELS]


def rates(
    run: Run, gpu: Gpu, bound_s: float, forecast_s: float, row: published.Row | None
) -> dict[str, Rates]:
    """`Rates` by what they are of; the published ones on the GPU of their row."""
    found = {"bound": rates_of(run, gpu, bound_s), "forecast": rates_of(run, gpu, forecast_s)}
    return found | ({"published": rates_of(run, row.gpu, row.step_time_s)} if row else {})


def rates_of(run: Run, gpu: Gpu, seconds: float) -> Rates:
    """`Rates` of a step time."""
    found = throughput(run, seconds, gpu.tflops.get(run.precision.dtype))
    return Rates(tokens_per_s_per_gpu=found["tokens_per_s_per_gpu"], mfu=found["mfu"]["full"])
