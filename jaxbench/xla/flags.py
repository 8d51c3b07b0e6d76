"""Named sets of XLA options for GPUs, which we pass to the compiler with each program.

The compiler reports an unknown option as an error. An unknown option in the variable `XLA_FLAGS`
aborts the process, so `check` tries the variable first. What the variable says takes precedence
over the set of the recipe. docs/reference/xla_flags.md describes the effect of each option of
`tuned` on a compiled program.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from jaxbench.base.errors import RecipeError, meant
from jaxbench.base.versions import jax_release
from jaxbench.recipe.settings import Run
from jaxbench.xla.hlo import Concurrency

Options = dict[str, bool | int | str]

IN_FLIGHT = "xla_gpu_experimental_parallel_collective_overlap_limit"
"""The option that limits how many asynchronous collectives may be in flight at a time."""

TUNED: Options = {
    # Matmuls by cuBLASLt: autotuning them against Triton needs the GPU at compile time, and it
    # varies from run to run.
    "xla_gpu_enable_triton_gemm": False,
    # If the slice that stacks a saved activation is fused with the matmul that makes it, that
    # matmul runs twice.
    "xla_gpu_enable_dynamic_slice_fusion": False,
    # Without it a layer's input is copied before a matmul adds to it.
    "xla_gpu_copy_insertion_use_region_analysis": True,
    # Remat is the recipe's choice; the compiler's own pass would gather weights a second time.
    "xla_disable_hlo_passes": "rematerialization",
    # A reduce-scatter for each gradient as soon as it is computed, instead of one for all
    # gradients at the end of a layer. `_combined` has the exception.
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Queue several collectives: with one at a time in flight, a small gather waits until a large
    # one is done, and is then exposed.
    IN_FLIGHT: 4,
    # By default the scheduler hides nothing more once it estimates that temporaries fill 95 % of
    # what arguments and outputs leave. Its estimate is far above what is then allocated. `plan`
    # shows whether a row fits.
    "xla_gpu_memory_limit_slop_factor": 150,
}

PIPELINED: Options = {
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_EXPLICIT",
    "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_EXPLICIT",
    "xla_gpu_enable_while_loop_double_buffering": True,
}
"""Part of `tuned` for transformers from jax 0.11 on, the first version that pipelines only the
collectives that are marked (by `mesh`).

Gathers of the next layer's weights and scatters of the previous layer's gradients overlap the
matmuls of this layer. Two iterations per loop body avoid copies of the carried weights.
"""

SCATTERED, GATHERED = 2**25, 2**24
"""Bytes per rank up to which `_combined` joins reduce-scatters and all-gathers. A layer of Llama 2
70B has 27 MB on each of 64 ranks. Longer messages hide their latency; joining would only delay
them."""

GUIDED: Options = TUNED | {IN_FLIGHT: 8}
"""`tuned` for programs that are compiled again with a profile of the forecast's own times
(`forecast.guide`). The scheduler then knows how long collectives and copies take, so it may queue
more of them."""

UNPIPELINED: Options = {"xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_OFF"}
"""Replaces `PIPELINED` for hybrids. They scan blocks of many layers, which hide each other's
collectives. A second block per loop body would only take memory."""

UNROLLED: Options = UNPIPELINED | {IN_FLIGHT: 1}
"""Replaces `PIPELINED` without remat, when layers are unrolled (`ops.layer_stack`). The scheduler
sees the whole pass, and starts each collective early enough (docs/reference/xla_flags.md has the
times of other choices). With pipelining over microbatches, all layers' weights would be gathered at
the end of the previous microbatch."""

IN_FP8: Options = {"xla_gpu_dot_merger_threshold_mb": 0}
"""Part of `tuned` in FP8. XLA merges small matmuls that share an operand, and does not recognise
the merged matmul as one in FP8."""

PINNING: Options = {
    "xla_gpu_executable_terminate_timeout_seconds": 600,
    "xla_gpu_first_collective_call_terminate_timeout_seconds": 600,
}
"""Part of every set for runs that offload. In the first step each device pins its host memory while
the other devices of its process wait for it. By default XLA would end the process after half a
minute."""

WITHOUT_GRAPHS: Options = {"xla_gpu_enable_command_buffer": ""}
"""Part of every set for runs that offload and whose layers have no collectives. XLA makes one CUDA
graph of such a layer, in which everything runs one after the other, asynchronous copies too
(openxla/xla pull request 48900). On an H100 the copies of Llama 2 70B's row 1 then took 137 of
466 ms. With a collective between their start and their end, copies stay outside of graphs."""

PLANNED: Options = {"xla_gpu_autotune_level": 0}
"""Options that a plan compiles with besides the options of `train`. There is no GPU to time kernels
on. Matmuls get workspaces as large as autotuned ones have on a GPU; the compiler's default for an
absent GPU would be 4 MiB."""

SETS: dict[str, Options] = {"tuned": TUNED, "guided": GUIDED, "default": {}}

OURS = "tuned", "guided"
"""The sets to which we add options that fit the program: pipelined or not, in FP8 or not."""

SPLITTING = "xla_gpu_enable_nccl_comm_splitting"
"""The flag with which XLA splits communicators from that of all GPUs. It is on by default. Split
communicators share resources, so NCCL runs their collectives one after another, whatever their
streams (docs/reference/xla_flags.md, *Collectives in flight*). XLA reads it only from `XLA_FLAGS`.
"""

MULTI_STREAMING = "xla_gpu_experimental_enable_collective_multi_streaming"
"""The option that gives asynchronous collectives several streams. It has an effect only without
`SPLITTING`."""

PGLE = "xla_gpu_pgle_profile_file_or_directory_path"
"""The option that names the file of a profile."""

KNOWN = {name for options in (*SETS.values(), PIPELINED, IN_FP8, PINNING) for name in options}
KNOWN |= {MULTI_STREAMING, SPLITTING}

REMOVED = {
    "xla_gpu_graph_level": "use xla_gpu_enable_command_buffer='' (off)",
    "xla_gpu_enable_triton_softmax_fusion": "leave it out, since it is always on",
    "xla_gpu_enable_custom_fusions": "leave it out",
    "xla_gpu_lhs_enable_gpu_async_tracker": "leave it out, since it is always on",
    "xla_gpu_enable_pipelined_all_gather": "use xla_gpu_pipeline_all_gather",
    "xla_gpu_enable_pipelined_reduce_scatter": "use xla_gpu_pipeline_reduce_scatter",
    "xla_gpu_enable_pipelined_all_reduce": "use xla_gpu_pipeline_all_reduce",
    "xla_gpu_enable_pipelined_collectives": "use xla_gpu_pipeline_all_gather and its siblings",
    "xla_gpu_enable_nccl_per_stream_comms": "leave it out",
    "xla_gpu_enable_async_collectives": "use xla_gpu_disable_async_collectives",
    "xla_gpu_enable_async_all_gather": "use xla_gpu_disable_async_collectives",
    "xla_gpu_enable_async_reduce_scatter": "use xla_gpu_disable_async_collectives",
    "xla_gpu_enable_async_all_reduce": "use xla_gpu_disable_async_collectives",
}
"""Options of published recipes that current compilers do not know, and what replaces them."""


MODE = "COLLECTIVE_PIPELINING_MODE_"
"""The values of some options begin with this, and `XLA_FLAGS` may leave it out."""


def options(run: Run, platform: str) -> Options:
    """The compiler options of a run, by their names in the installed jax; none on CPUs. Raises
    RecipeError for an unknown set, for a change that cannot be parsed, and for a change that
    contradicts `XLA_FLAGS`."""
    selected, overrides = _selected(run)
    if platform != "gpu":
        return {}
    return selected | _user_values(selected | overrides, overrides) | overrides


def overruled(run: Run, platform: str) -> list[str]:
    """A line for each option of the recipe's set that `XLA_FLAGS` replaces."""
    selected, _ = _selected(run)
    return [
        f"XLA_FLAGS: {name} is {value!r}, not {selected[name]!r} as in the recipe's set"
        for name, value in options(run, platform).items()
        if name in selected and name in values_in(variable()) and selected[name] != value
    ]


def _selected(run: Run) -> tuple[Options, Options]:
    """The options of a run's set on GPUs, and the changes to it."""
    name, *changes = _parts(run)
    if any(change.startswith(f"{SPLITTING}=") for change in changes):
        raise RecipeError(
            f"execution.xla_flags: XLA reads {SPLITTING} only from the variable XLA_FLAGS; "
            f"set XLA_FLAGS=--{SPLITTING}=false"
        )
    if name not in SETS:
        raise RecipeError(f"execution.xla_flags: {name!r} is none of {', '.join(SETS)}")
    overrides = dict(_flag(change) for change in changes)
    selected = dict(SETS[name])
    if name in OURS and jax_release() >= (0, 11):
        if run.unrolled:
            selected |= UNROLLED
        elif run.model.mamba:
            selected |= UNPIPELINED
        else:
            selected |= PIPELINED
            if name == "guided":
                selected |= _combined(run)
    if name in OURS and run.precision.dtype == "fp8":
        selected |= IN_FP8
    if run.execution.offload != "none":
        selected |= PINNING
        parts = run.parallelism
        if parts.fsdp * parts.tensor * parts.expert * parts.context == 1:
            selected |= WITHOUT_GRAPHS
    return selected, overrides


def _combined(run: Run) -> Options:
    """Options of `guided` that join the collectives of a pipelined layer, so a large ring's latency
    counts about once per layer. They overlap with another layer anyway, so nothing waits for the
    last gradient. With a second axis, its small collectives would wait for the large ones. With
    XLA's own estimates of times, the scheduler would expose some of the large ones
    (docs/reference/xla_flags.md)."""
    fsdp = run.parallelism.fsdp
    if fsdp == 1 or run.parallelism.ranks > fsdp:
        return {}
    return {
        "xla_gpu_reduce_scatter_combine_threshold_bytes": SCATTERED,  # of the result
        "xla_gpu_all_gather_combine_threshold_bytes": GATHERED * fsdp,
    }


def _user_values(ours: Options, overrides: Options) -> Options:
    """The values that `XLA_FLAGS` has for options that we pass to the compiler. We pass these
    values, since an option that is passed takes precedence over the variable."""
    values: Options = {}
    for name, text in values_in(variable()).items():
        if name not in ours and name != PGLE:
            continue
        old = ours.get(name, "")
        if isinstance(old, bool):
            values[name] = text.lower() not in ("false", "0")
        elif isinstance(old, int):
            values[name] = int(text)
        else:
            short = str(old).startswith(MODE) and not text.upper().startswith(MODE)
            values[name] = MODE + text.upper() if short else text
        if name in overrides and values[name] != old:
            raise RecipeError(
                f"XLA_FLAGS has {name}={text}, but execution.xla_flags has {name}={old}: keep one"
            )
    return values


def concurrent(run: Run) -> Concurrency:
    """Which collectives of a run do not wait for earlier ones on other links (`Concurrency`)."""
    given = values_in(variable())
    if given.get(SPLITTING, "true") not in ("false", "0"):
        return "none"
    chosen = options(run, "gpu").get(MULTI_STREAMING, given.get(MULTI_STREAMING, False))
    if chosen in (True, "", "true", "1"):
        return "all"
    # jax 0.10 puts synchronous collectives on the stream of the others if several may be in flight.
    return "synchronous" if jax_release() >= (0, 11) else "none"


def guided(run: Run) -> bool:
    """True if the forecast's times schedule the program of a run."""
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


def explain(flag: str) -> str:
    """The reason why the compiler does not know an option, and its replacement."""
    if flag in REMOVED:
        return f"{flag} was removed from XLA; {REMOVED[flag]}"
    return f"the installed compiler does not know {flag}{meant(flag, KNOWN)}"


TOKEN = re.compile(r"""\s*--(?P<name>[\w-]+)(?:=(?:"([^"]*)"|'([^']*)'|([^\s"']*)))?(?=\s|$)""")
"""A flag of `XLA_FLAGS`. If a word does not begin with `-`, XLA silently drops it and everything
after it."""


@cache
def values_in(text: str) -> dict[str, str]:
    """The flags in a value of `XLA_FLAGS`, without quotes. The value of a flag without one is
    empty."""
    return {flag["name"]: next(filter(None, flag.groups()[1:]), "") for flag in _flags(text)}


def _flags(text: str) -> Iterator[re.Match]:
    """The flags in a value of `XLA_FLAGS`, or in the file that it names. Raises RecipeError for
    anything that is not a flag."""
    if text and not text.lstrip().startswith("--"):
        try:
            text = Path(text).read_text()
        except (OSError, ValueError) as error:
            raise RecipeError(
                f"XLA_FLAGS={text}: neither a file nor flags; expected --xla_name=value"
            ) from error
    name, at = "", 0
    while rest := text[at:].split():
        if (match := TOKEN.match(text, at)) is None:
            like = "--xla_name=value" if rest[0][0] in "-=" else f"--{name}={rest[0]}"
            raise RecipeError(
                f"XLA_FLAGS: {rest[0]!r} is not a flag; expected {like}, separated by spaces"
            )
        yield match
        name, at = match["name"], match.end()


def variable() -> str:
    """The value of `XLA_FLAGS`."""
    return os.environ.get("XLA_FLAGS", "")


@cache
def check(text: str, where: str = "XLA_FLAGS") -> None:
    """Raises RecipeError for flags, in the form of `XLA_FLAGS`, that would abort this process. The
    compiler parses them in a subprocess first (0.25 s). If it refuses them, it parses each one
    alone to find the bad ones."""
    flags = list(_flags(text))
    if not flags or _refusal(text) is None:
        return
    reasons = []
    for flag in flags:
        if (refusal := _refusal(flag.group().strip())) is not None:
            name, value = flag["name"], values_in(flag.group())[flag["name"]]
            unread = name in KNOWN or "parsing failed" in refusal
            reasons.append(f"{name} cannot be {value!r}" if unread else explain(name))
    raise RecipeError(f"{where}: {'; '.join(reasons) or f'the compiler refuses {text!r}'}")


def check_changes(run: Run) -> None:
    """`check` of a run's changes to its set."""
    _, *changes = _parts(run)
    check(" ".join(f"--{change}" for change in changes), "execution.xla_flags")


def _refusal(flags: str) -> str | None:
    """What the compiler says about a value of `XLA_FLAGS`; None if it accepts the value."""
    code = "from jaxlib import xla_client; xla_client.make_cpu_client()"
    environment = os.environ | {"XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    return done.stderr if done.returncode else None
