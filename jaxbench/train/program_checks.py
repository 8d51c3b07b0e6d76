"""What computes a run: whether its platform can, what the record says, and whether the compiled
program does it."""

from typing import Any

import jaxlib

from jaxbench import mesh
from jaxbench.base.errors import RecipeError, RunFailed
from jaxbench.base.hardware import PLANNED, Capability, Gpu
from jaxbench.models.context import choose_kernels
from jaxbench.models.decoder import prediction_segment, segments
from jaxbench.ops import attention, grouped, quantized, ssd
from jaxbench.ops.implementations import Task
from jaxbench.ops.layer_stack import can_offload
from jaxbench.recipe.mixers import AnyAttentionConfig, ExpertsConfig, MambaConfig
from jaxbench.recipe.settings import Run
from jaxbench.train.program import device_kind, forecast_gpu, parse_program
from jaxbench.train.step import abstract_state
from jaxbench.xla import custom_calls, flags
from jaxbench.xla.hlo import Program


def check_run(run: Run, platform: str, gpu: Gpu | None = None) -> None:
    """Raises RecipeError if the platform, or the GPU if it is known, cannot do what the run asks
    for."""
    if gpu and not gpu.multiplies(dtype := run.precision.dtype):
        others = ", ".join(name for name, of in PLANNED.items() if of.multiplies(dtype))
        raise RecipeError(f"precision.dtype = {dtype}: {gpu.name} does not support it; {others} do")
    # Each of these raises RecipeError.
    flags.options(run, platform)
    flags.check_changes(run)
    quantized.choose(run.precision, platform)
    choose_kernels(run.execution, _task(run, platform, gpu.capability if gpu else None))


def describe_kernels(run: Run) -> dict[str, str]:
    """For the record: what computes attention, Mamba-2, dropless experts and matmuls on the current
    mesh, and the activations that wait in the host's memory."""
    platform = mesh.platform()
    task = _task(run, platform, mesh.capability())
    chosen = choose_kernels(run.execution, task)
    by = {"attention": chosen.attention}
    if run.model.each(MambaConfig):
        by["Mamba-2"] = _mamba(run, chosen.ssd, task)
    if run.model.dropless:
        by["dropless experts"] = chosen.grouped_matmul
    if run.execution.offload != "none":
        by["offload"] = (
            run.execution.offload
            if can_offload()
            else f"none (needs jaxlib 0.11.2; {jaxlib.__version__} misreads host memory)"
        )
    if flags.guided(run) and platform == "gpu":
        unknown = f"XLA's estimates (no forecast of {run.gpus} x {device_kind()})"
        by["schedule"] = "guided by the forecast" if forecast_gpu(run) else unknown
    return by | {"products": _matmuls(run, platform)}


def _task(run: Run, platform: str, capability: Capability | None) -> Task:
    length = run.batch.sequence_length
    return Task(run.model, run.precision.dtype, length, platform, capability)


def _mamba(run: Run, name: str, task: Task) -> str:
    """The implementation of Mamba-2. On a GPU it also says why the one that `auto` prefers was not
    taken."""
    if run.execution.ssd != "auto" or task.platform != "gpu":
        return name
    first, implementation = next(iter(ssd.IMPLEMENTATIONS.items()))
    refused = implementation.why_not(task)
    return f"{name} ({first} {refused})" if refused else name


def _matmuls(run: Run, platform: str) -> str:
    dtype = run.precision.dtype
    if not run.precision.quantized:
        return dtype
    if platform != "gpu":
        return f"{dtype}, emulated in {'bf16' if dtype == 'fp8' else 'fp32'}"
    by = quantized.choose(run.precision, platform)
    if by == "te" and run.model.each(ExpertsConfig):
        return f"{dtype} by te, but by xla for experts"
    return f"{dtype} by {by}"


def check_program(compiled: Any, run: Run) -> None:
    """Raises RunFailed if the compiled program is not the requested one. It needs the current
    mesh."""
    model, platform = run.model, mesh.platform()
    chosen = choose_kernels(run.execution, _task(run, platform, mesh.capability()))

    # A model that is cut to a few layers may have none of a kind that its family has.
    def has(kind: Any) -> bool:
        return any(isinstance(mixer, kind) for mixer in (*model.mixers, *model.predicting))

    of_experts = model.dropless and has(ExpertsConfig)
    requested = (
        ("fused attention", has(AnyAttentionConfig), attention.IMPLEMENTATIONS[chosen.attention]),
        ("a fused Mamba-2 scan", has(MambaConfig), ssd.IMPLEMENTATIONS[chosen.ssd]),
        ("grouped matmuls", of_experts, grouped.IMPLEMENTATIONS[chosen.grouped_matmul]),
    )
    expected = [(what, t) for what, present, kernel in requested if present for t in kernel.calls]
    is_quantized = run.precision.quantized and platform == "gpu"
    if not (expected or is_quantized):
        return
    program = parse_program(compiled, run)
    calls = program.custom_calls()
    for what, target in expected:
        if not calls[target]:
            raise RunFailed(f"{what} was asked for, but the compiled program has no {target}")
    if is_quantized:
        _check_quantized(program, run)


def _check_quantized(program: Program, run: Run) -> None:
    implementation = quantized.IMPLEMENTATIONS[quantized.choose(run.precision, mesh.platform())]
    dtype, mode = run.precision.dtype, implementation.mode(run.precision)
    if mode and (modes := custom_calls.scaling_modes(program)) != {mode}:
        what = f"{dtype} in {run.precision.scaling} scaling" if dtype == "fp8" else dtype
        raise RunFailed(
            f"Transformer Engine was called with the scaling modes {sorted(map(str, modes))}; "
            f"expected {mode}, for {what}"
        )
    compiled = custom_calls.quantized_matmuls(program, dtype)
    in_fp8 = dtype == run.precision.gather == "fp8"
    hint = "; precision.gather=bf16 may help" if in_fp8 else ""
    for name, expected in _expected_matmuls(run).items():
        runs, others = compiled[name, True], compiled[name, False]
        if runs < expected or others:
            raise RunFailed(
                f"{dtype.upper()} was asked for, but matmul {name} runs {runs} times in it and "
                f"{others} times in other formats; expected at least {expected} and 0{hint}"
            )


def _expected_matmuls(run: Run) -> dict[str, int]:
    """How often a device multiplies by each quantized weight in a step, without recomputation: the
    forward matmul and both gradients, in each block, microbatch and part of the experts."""
    applied = segments(run.model, run.execution, run.precision)
    if run.model.prediction:
        further = prediction_segment(run.model, run.execution, run.precision)
        applied += run.model.prediction.depth * [further]
    expected = {}
    for stack, block in enumerate(abstract_state(run).model.stacks):
        for path, weight in quantized.quantized_weights(block).items():
            if quantized.in_bf16(path, run.precision):
                continue
            layer = int(path.split(".")[1])
            blocks = sum(
                segment.repeats.stop - segment.repeats.start
                for segment in applied
                if segment.stack == stack and layer not in segment.bf16
            )
            parts = run.execution.expert_parts if quantized.is_of_experts(weight) else 1
            runs = 3 * blocks * run.accumulation * parts // run.parallelism.pipeline
            expected[quantized.name_in_model(stack, path)] = runs
    return expected
