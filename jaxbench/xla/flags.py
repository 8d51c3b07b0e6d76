"""Named sets of XLA options for GPUs, passed to the compiler with each program.

The compiler reports an unknown option as an error; an unknown one in the variable `XLA_FLAGS`
aborts the process, so `check_environment` tries it first. docs/reference/xla_flags.md describes the
effect of each option of `tuned` on a compiled program.
"""

import re
import subprocess
import sys
from functools import cache
from importlib.metadata import version

from jaxbench.errors import RecipeError
from jaxbench.recipe.settings import Run

Options = dict[str, bool | int | str]

TUNED: Options = {
    # Matrix products by cuBLASLt: autotuning them against Triton needs the GPU at compile time and
    # varies from run to run.
    "xla_gpu_enable_triton_gemm": False,
    # Fusing the slice that stacks a saved activation with the product that makes it runs that
    # product twice.
    "xla_gpu_enable_dynamic_slice_fusion": False,
    # Without it a layer's input is copied before a product adds to it.
    "xla_gpu_copy_insertion_use_region_analysis": True,
    # Remat is the recipe's choice; the compiler's own pass would gather weights a second time.
    "xla_disable_hlo_passes": "rematerialization",
    # A reduce-scatter for each gradient as soon as it is computed, instead of one for all
    # gradients at the end of a layer.
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Queue several collectives: with one at a time in flight, a small gather waits until a large
    # one is done, and is then exposed.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    # By default the scheduler hides nothing more once it believes 80 % of memory to be full, by an
    # estimate far above what is then allocated. `plan` tells whether a row fits.
    "xla_gpu_memory_limit_slop_factor": 150,
}

PIPELINED: Options = {
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_EXPLICIT",
    "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_EXPLICIT",
    "xla_gpu_enable_while_loop_double_buffering": True,
}
"""Part of `tuned` for transformers from jax 0.11 on, the first to pipeline only the collectives
that are marked (by `mesh`).

Gathers of the next layer's weights and scatters of the previous layer's gradients overlap the
matrix products of this layer. Two iterations per loop body avoid copies of the carried weights.
"""

GUIDED: Options = TUNED | {"xla_gpu_experimental_parallel_collective_overlap_limit": 8}
"""`tuned` for programs that are compiled again with a profile of the forecast's own times
(`forecast.guide`), so that the scheduler knows how long collectives and copies take, and queues
more of them."""

UNPIPELINED: Options = {"xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_OFF"}
"""Replaces `PIPELINED` for hybrids. They scan blocks of many layers, which hide each other's
collectives; a second block per loop body would only take memory."""

UNROLLED: Options = UNPIPELINED | {"xla_gpu_experimental_parallel_collective_overlap_limit": 1}
"""Replaces `PIPELINED` without remat, where layers are unrolled (`ops.blocks`). The scheduler sees
the whole pass, and starts each collective early enough (docs/reference/xla_flags.md has the times
of other choices). Pipelined over microbatches, all layers' weights would be gathered at the end of
the previous microbatch."""

IN_FP8: Options = {"xla_gpu_dot_merger_threshold_mb": 0}
"""Part of `tuned` in FP8. XLA merges small products that share an operand, and does not recognise
the merged one as a product in FP8."""

PUBLISHED: Options = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_highest_priority_async_stream": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": 2147483648,
    "xla_gpu_all_gather_combine_threshold_bytes": 2147483648,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 33554432,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
    "xla_gpu_enable_all_gather_combine_by_dim": False,
    "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
    "xla_gpu_enable_command_buffer": "",
    "xla_disable_hlo_passes": "rematerialization",
}
"""The flags of the published Llama 2 runs (MaxText, DGX Cloud Benchmarking 25.01, bf16, fewer than
64 nodes), in the names of jax 0.10; the fp8 runs had smaller thresholds."""

SETS: dict[str, Options] = {
    "tuned": TUNED, "guided": GUIDED, "published": PUBLISHED, "default": {},
}  # fmt: skip

OURS = "tuned", "guided"
"""The sets that are completed by what the program is: pipelined or not, in FP8 or not."""

PGLE = "xla_gpu_pgle_profile_file_or_directory_path"
"""The option that names a profile's file."""

RENAMED = {
    "xla_gpu_enable_pipelined_all_gather": "xla_gpu_pipeline_all_gather",
    "xla_gpu_enable_pipelined_reduce_scatter": "xla_gpu_pipeline_reduce_scatter",
    "xla_gpu_enable_pipelined_all_reduce": "xla_gpu_pipeline_all_reduce",
}
"""New names in jax 0.11, which take a mode instead of a boolean."""

REMOVED = {
    "xla_gpu_graph_level": "xla_gpu_enable_command_buffer='' (off)",
    "xla_gpu_enable_triton_softmax_fusion": "nothing: always on",
    "xla_gpu_enable_custom_fusions": "nothing",
    "xla_gpu_lhs_enable_gpu_async_tracker": "nothing: always on",
    "xla_gpu_enable_pipelined_collectives": "xla_gpu_pipeline_all_gather and its siblings",
    "xla_gpu_enable_nccl_per_stream_comms": "nothing",
    "xla_gpu_enable_async_collectives": "xla_gpu_disable_async_collectives",
    "xla_gpu_enable_async_all_gather": "xla_gpu_disable_async_collectives",
    "xla_gpu_enable_async_reduce_scatter": "xla_gpu_disable_async_collectives",
    "xla_gpu_enable_async_all_reduce": "xla_gpu_disable_async_collectives",
}
"""Options of published recipes that current compilers do not know, and their replacements."""


def options(run: Run, platform: str) -> Options:
    """Compiler options of a run, in the names of the installed jax; none on CPUs. Raises
    RecipeError for an unknown set or a change that cannot be parsed."""
    name, *changes = _parts(run)
    if name not in SETS:
        raise RecipeError(f"execution.xla_flags: {name!r} is none of {', '.join(SETS)}")
    overrides = dict(_flag(change) for change in changes)
    if platform != "gpu":
        return {}
    selected = dict(SETS[name])
    if _release() >= (0, 11):
        for old, new in RENAMED.items():
            if selected.pop(old, False):
                selected[new] = "COLLECTIVE_PIPELINING_MODE_ON"
        if name in OURS:
            if run.unrolled:
                selected |= UNROLLED
            else:
                selected |= UNPIPELINED if run.model.mamba else PIPELINED
    if name in OURS and run.precision.dtype == "fp8":
        selected |= IN_FP8
    return selected | overrides


def guided(run: Run) -> bool:
    """True for a run whose program is scheduled by the forecast's times."""
    return _parts(run)[0] == "guided"


def _parts(run: Run) -> list[str]:
    """The name of a run's set, and the changes to it."""
    return run.execution.xla_flags.replace(" ", "").split(",")


def _flag(text: str) -> tuple[str, bool | int | str]:
    """`xla_gpu_some_flag=false` as a name and a value."""
    name, equals, value = text.partition("=")
    if not (equals and name.startswith("xla_")):
        raise RecipeError(f"execution.xla_flags: cannot read {text!r}; expected xla_..=value")
    if value in ("true", "false"):
        return name, value == "true"
    return name, int(value) if re.fullmatch(r"-?\d+", value) else value


def _release() -> tuple[int, ...]:
    return tuple(int(part) for part in version("jax").split(".")[:2])


def explain(flag: str) -> str:
    """The reason why the compiler does not know an option, and its replacement."""
    flag = flag.lstrip("-").partition("=")[0]
    if flag in REMOVED:
        return f"{flag} was removed from XLA; use {REMOVED[flag]}"
    if flag in RENAMED:
        return f"{flag} was renamed to {RENAMED[flag]} in jax 0.11"
    return f"the installed compiler does not know {flag}"


@cache
def check_environment(flags: str) -> None:
    """Raises RecipeError when `flags`, the value of `XLA_FLAGS`, would abort this process: the
    compiler parses them in a subprocess first (0.25 s)."""
    if not flags:
        return
    code = "from jaxlib import xla_client; xla_client.make_cpu_client()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        unknown = re.findall(r"--xla\w+", done.stderr.partition("XLA_FLAGS")[2])
        reasons = "; ".join(dict.fromkeys(map(explain, unknown))) or "the compiler refuses it"
        raise RecipeError(f"XLA_FLAGS: {reasons}")
