"""A plan: the memory, collectives, kernels and step time of a run's step, compiled for absent GPUs.

`docs/design/plan.md` explains the roofline bound, `docs/design/forecast.md` the forecast.
"""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxbench import mesh
from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import Gpu, placed
from jaxbench.base.untrusted import read_json
from jaxbench.base.versions import versions
from jaxbench.forecast.guide import guide
from jaxbench.forecast.tables import Tables
from jaxbench.plan import ask_cudnn, stubs
from jaxbench.plan.absent import compile_only_devices
from jaxbench.plan.compiled_step import Step, axes_of, step_of
from jaxbench.plan.systems import Target, system
from jaxbench.recipe import flops, published, recipes
from jaxbench.recipe.build import restored
from jaxbench.recipe.settings import Run
from jaxbench.results.throughput import model_flops, throughput
from jaxbench.train.pipeline_schedule import interleaved_1f1b
from jaxbench.train.pipeline_stages import Stages
from jaxbench.train.program import compile_program, offloaded_bytes, parse_program
from jaxbench.train.program_checks import check_program
from jaxbench.train.step import abstract_state
from jaxbench.xla import flags, memory
from jaxbench.xla.hlo import Program
from jaxbench.xla.memory import Buffer

SHOWN_BUFFERS = 12

SLOP_FACTOR, SLOP = "xla_gpu_memory_limit_slop_factor", 95
"""The option for the percentage of the memory that XLA's scheduler may fill with temporaries, apart
from arguments and outputs, and its default (openxla/xla, `GetSchedulerMemoryLimit`)."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device as compiled, and the limit of a program. `peak` is what the runtime holds
    during a step, including the holes between temporaries. `host` are the bytes of host memory that
    hold one device's offloaded activations; `host_limit` is how much of its node's memory a device
    may use. `scheduled` is the limit of XLA's scheduler for temporaries, to which it gives up
    overlap."""

    arguments: int
    temporaries: int
    peak: int
    limit: int
    host: int
    host_limit: int
    scheduled: int

    @property
    def fits(self) -> bool:
        """True if the device and its host have enough memory."""
        return self.peak <= self.limit and self.host <= self.host_limit

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, gpu: Gpu, slop: int = SLOP) -> "Memory":
        """The memory of a program that is compiled for a GPU, with the option `SLOP_FACTOR`."""
        stats: Any = compiled.memory_analysis()
        arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
        outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
        return cls(
            arguments=arguments,
            temporaries=temporaries,
            peak=arguments + outputs + temporaries,
            limit=gpu.memory_limit,
            host=offloaded_bytes(compiled),
            host_limit=gpu.host_limit,
            scheduled=(gpu.allocated - arguments - outputs) * slop // 100,
        )


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes on one device of the train state and of the accumulated gradients. `gradients` is None
    in a pipeline, whose ranks gather the gradients of their own layers."""

    parameters: int
    optimizer: int
    gradients: int | None


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one device and step. `recompute_ratio` is `compiled` over `model_full`: both count
    attention without its causal mask."""

    model_full: float
    compiled: float
    recompute_ratio: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Throughput and model FLOPs utilization of a step time, with full attention counted. `mfu` is
    None if the GPU's peak is unknown."""

    tokens_per_s_per_gpu: float
    mfu: float | None


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """The pipeline of a run. `bubble` is the idle time of a rank over its busy time, `slots` the
    number of model chunks whose activations are stashed at the same time, `padding` the number of
    blocks that only fill up stages."""

    ranks: int
    virtual_stages: int
    microbatches: int
    bubble: float
    slots: int
    padding: int


@dataclass(frozen=True, kw_only=True)
class Plan(Step):
    """The plan of a row. FLOPs and bytes are per device and step.

    `fits` covers the start too, since making or restoring the state needs no more than the step's
    arguments. `flags` are the options of `train`; the program here was compiled with
    `planned_flags` as well. `without_cudnn` is the reason why cuDNN was not asked, so its
    workspaces are not counted. Keys of `rates` are `bound`, `forecast` and `published`.
    """

    recipe: str
    row: str
    gpus: int
    target: str
    fits: bool
    mesh: str
    settings: dict[str, Any]
    system: dict[str, Any]
    planned_flags: flags.Options
    flags: flags.Options
    versions: dict[str, str | None]
    parameters: int
    bytes_per_device: Memory
    state_bytes: StateBytes
    largest_buffers: list[Buffer]
    flops: Flops
    stages: Pipelined | None
    lower_s: float
    compile_s: float
    rates: dict[str, Rates]
    published: published.Row | None
    without_cudnn: str | None


def read(path: Path) -> Plan:
    """Reads the plan.json of `--dump`. Raises RecipeError if it is not a plan."""
    try:
        return restored(Plan, read_json(path))
    except OSError as error:
        raise RecipeError(f"{path}: cannot read a plan: {error.strerror}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{path}: not a plan.json of `plan --dump`: {error}") from error


def make_plan(run: Run, target: Target, dump: Path | None = None) -> Plan:
    """Compiles one step of the run for absent GPUs and describes it.

    The scheduled program is written to `dump`. Raises RecipeError if the GPUs do not fill nodes,
    and RunFailed if the program is not what the recipe asks for.
    """
    tables, gpu = target.tables(), placed(target.gpu, run.gpus)
    described, asking = ask_cudnn.for_compiler(gpu)
    absent = mesh.make_mesh(run.mesh_shape, compile_only_devices(described, run.gpus))
    with jax.set_mesh(absent), tempfile.TemporaryDirectory() as tmp:
        dumping = {"xla_dump_to": tmp, "xla_dump_hlo_as_text": True}
        try:
            compiled, lower_s, compile_s = compile_program(
                run, flags.PLANNED | asking | dumping, guide
            )
        except jax.errors.JaxRuntimeError as error:
            raise ask_cudnn.refusal(error, gpu) or error from error
        check_program(compiled, run)
        live_ranges = max(Path(tmp).glob("*live-range.txt")).read_text()  # from the last program
        state = state_bytes(run)
    if dump is not None:
        (dump / "program.hlo.txt").write_text(compiled.as_text())
    program, options = parse_program(compiled, run), flags.options(run, "gpu")
    return describe(
        run,
        gpu,
        tables,
        program,
        bytes_per_device=Memory.of(compiled, gpu, int(options.get(SLOP_FACTOR, SLOP))),
        state_bytes=state,
        largest_buffers=memory.largest(program, live_ranges, SHOWN_BUFFERS),
        lower_s=lower_s,
        compile_s=compile_s,
        planned_flags=flags.PLANNED | asking,
        without_cudnn=stubs.load(),
    )


def describe(run: Run, gpu: Gpu, tables: Tables, program: Program, **sizes: Any) -> Plan:
    """The plan of a run's program, compiled for a placed GPU. `sizes` are fields of the plan that
    the program's text does not have."""
    step = step_of(program, gpu, tables, lambda c: axes_of(c, run.mesh_shape))
    times = {"bound": step.bound_step_s, "forecast": step.forecast_step_s}
    rates = {name: rates_of(run, gpu, seconds) for name, seconds in times.items()}
    if row := published.lookup(run, gpu):
        rates["published"] = rates_of(run, row.gpu, row.step_time_s)
    return Plan(
        **vars(step),
        **sizes,
        recipe=run.recipe,
        row=run.row,
        gpus=run.gpus,
        target=gpu.name.lower(),
        fits=sizes["bytes_per_device"].fits,
        mesh=run.mesh_text(),
        settings=recipes.describe(run),
        system=system(gpu),
        flags=flags.options(run, "gpu"),
        versions=versions(),
        parameters=flops.parameters(run.model)["total"],
        flops=compiled_flops(run, program),
        stages=stages(run),
        rates=rates,
        published=row,
    )


def state_bytes(run: Run) -> StateBytes:
    """`StateBytes` on the current mesh."""
    state = abstract_state(run)

    def local(tree: Any, width: int = 0) -> int:
        total = 0
        for x in jax.tree.leaves(tree):
            shape = x.sharding.shard_shape(x.shape) if x.shape else x.shape
            total += (width or x.dtype.itemsize) * math.prod(shape)
        return total

    pipelined = run.parallelism.pipeline > 1
    return StateBytes(
        parameters=local(state.model),
        optimizer=local(state.optimizer),
        gradients=None if pipelined else local(state.model, run.gradient_bytes),
    )


def stages(run: Run) -> Pipelined | None:
    """The pipeline of a run; None without one."""
    ranks, virtual_stages = run.parallelism.pipeline, run.parallelism.virtual_stages
    if ranks == 1:
        return None
    return Pipelined(
        ranks=ranks,
        virtual_stages=virtual_stages,
        microbatches=run.accumulation,
        bubble=run.bubble,
        slots=interleaved_1f1b(ranks, virtual_stages, run.accumulation).slots,
        padding=Stages.of(run).padding,
    )


def compiled_flops(run: Run, program: Program) -> Flops:
    """FLOPs of a compiled program and of its model."""
    share = run.batch.global_batch / run.gpus
    full, compiled = model_flops(run, "full") * share, sum(program.flops().values())
    return Flops(
        model_full=full,
        compiled=compiled,
        recompute_ratio=compiled / full,
    )


def rates_of(run: Run, gpu: Gpu, seconds: float) -> Rates:
    """`Rates` of a step time on a GPU."""
    rates = throughput(run, seconds, gpu.tflops.get(run.precision.dtype))
    return Rates(tokens_per_s_per_gpu=rates["tokens_per_s_per_gpu"], mfu=rates["mfu"]["full"])


def parts(plan: Plan) -> dict[str, float]:
    """The parts of the forecast step in seconds. Matmuls are split into `products`, the matmuls of
    the model, into `recompute`, and into the `bubble` of a pipeline.

    Idle ranks of a pipeline compute too, on stale data, so the bubble is a share of all matmuls.
    `recompute` is the rest of the matmuls beyond the model's FLOPs, including the matmuls of
    padding. We assume that a FLOP takes equally long in every dtype.
    """
    others = dict(plan.forecast.parts_s)
    total, idle = others.pop("products", 0.0), plan.stages.bubble if plan.stages else 0.0
    products = total / max(1.0, plan.flops.recompute_ratio)
    bubble = min(total * idle / (1 + idle), total - products)
    recompute = total - products - bubble
    return {"products": products, "recompute": recompute, "bubble": bubble, **others}
