"""Named sets of XLA options for GPUs, passed to the compiler with each program.

An option that the compiler does not know is an error there; one in the variable `XLA_FLAGS` would
abort the process, so `check_environment` looks first. docs/xla_flags.md has what each option of
`tuned` changes in a compiled program.
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
    # One reduce-scatter per gradient as soon as it is there, instead of all of a layer's at its
    # end.
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Queue several collectives: with one at a time in flight, a small gather waits until a large
    # one is done, and is then exposed.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    # By default the scheduler hides nothing more once it believes 80 % of memory to be full, by an
    # estimate far above what is then allocated. Whether a row fits is what `plan` says.
    "xla_gpu_memory_limit_slop_factor": 150,
}

PIPELINED: Options = {
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_EXPLICIT",
    "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_EXPLICIT",
    "xla_gpu_enable_while_loop_double_buffering": True,
}
"""Part of `tuned` for transformers from jax 0.11 on, the first to pipeline marked collectives
alone.

Gathers the next layer's weights, and scatters the last layer's gradients, behind the products of
this one: those that `mesh` marks. Two iterations per loop body spare the copies that the carried
weights would need.
"""

UNPIPELINED: Options = {"xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_OFF"}
"""The same for hybrids. They scan units of many layers, which hide their collectives behind each
other; a second unit would only take memory."""

UNROLLED: Options = UNPIPELINED | {"xla_gpu_experimental_parallel_collective_overlap_limit": 1}
"""The same without remat, where layers stand one after another (`ops.repeat`). The scheduler sees
all of a pass, and begins each collective early enough (docs/xla_flags.md has the times of others).
Pipelined over microbatches, all layers' weights would be gathered at the end of the pass before."""

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

SETS: dict[str, Options] = {"tuned": TUNED, "published": PUBLISHED, "default": {}}

RENAMED = {
    "xla_gpu_enable_pipelined_all_gather": "xla_gpu_pipeline_all_gather",
    "xla_gpu_enable_pipelined_reduce_scatter": "xla_gpu_pipeline_reduce_scatter",
    "xla_gpu_enable_pipelined_all_reduce": "xla_gpu_pipeline_all_reduce",
}
"""What jax 0.11 calls these, with a mode in place of a boolean."""

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
"""Options of published recipes that current compilers do not know, and what took their place."""


def options(run: Run, platform: str) -> Options:
    """Compiler options of a run, in the names of the installed jax; CPUs always take the compiler's
    defaults. Raises RecipeError for an unknown set or a change that cannot be read."""
    name, *changes = run.execution.xla_flags.replace(" ", "").split(",")
    if name not in SETS:
        raise RecipeError(f"execution.xla_flags: {name!r} is none of {', '.join(SETS)}")
    changed = dict(_flag(change) for change in changes)
    if platform != "gpu":
        return {}
    chosen = dict(SETS[name])
    if _release() >= (0, 11):
        for old, new in RENAMED.items():
            if chosen.pop(old, False):
                chosen[new] = "COLLECTIVE_PIPELINING_MODE_ON"
        if name == "tuned":
            if run.unrolled:
                chosen |= UNROLLED
            else:
                chosen |= UNPIPELINED if "M" in run.model.pattern else PIPELINED
    return chosen | changed


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
    """Why the compiler does not know an option, and what to use in its place."""
    flag = flag.lstrip("-").partition("=")[0]
    if flag in REMOVED:
        return f"{flag} was removed from XLA; use {REMOVED[flag]}"
    if flag in RENAMED:
        return f"{flag} was renamed to {RENAMED[flag]} in jax 0.11"
    return f"the installed compiler does not know {flag}"


@cache
def check_environment(flags: str) -> None:
    """Raises RecipeError when `flags`, the value of `XLA_FLAGS`, would abort this process.

    The compiler itself reads them, in a process of its own that may die of it (0.25 s).
    """
    if not flags:
        return
    code = "from jaxlib import xla_client; xla_client.make_cpu_client()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        unknown = re.findall(r"--xla\w+", done.stderr.partition("XLA_FLAGS")[2])
        reasons = "; ".join(dict.fromkeys(map(explain, unknown))) or "the compiler refuses it"
        raise RecipeError(f"XLA_FLAGS: {reasons}")
