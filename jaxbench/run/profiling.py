"""Profiles of a run: JAX's profiler, Nsight Systems, NCCL's trace, profile-guided latencies (PGLE).

JAX's profiler, Nsight Systems and PGLE use CUPTI, which has one subscriber at a time, so a run uses
at most one of them. The figures of a profiled or traced run are marked as not comparable.
"""

import ctypes
import ctypes.util
import hashlib
import importlib.util
import os
import re
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from jax.experimental.profiler import get_profiled_instructions_proto

from jaxbench import mesh
from jaxbench.base.errors import RecipeError, RunFailed
from jaxbench.base.files import write_whole
from jaxbench.cluster import job
from jaxbench.forecast.guide import guide
from jaxbench.jax_internals import kernel_names, profile_events
from jaxbench.recipe.settings import Run
from jaxbench.run.cache import cache_in
from jaxbench.train.loop import run_steps
from jaxbench.train.program import Compiled, Guide, compile_program
from jaxbench.xla import flags
from jaxbench.xla.hlo import PROFILED

NCCL_TRACE = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL,P2P,NET"}
"""The variables of the published trace."""

COVERAGE = 0.5
"""The smallest share of a program's kernels and collectives that a profile for PGLE has to
cover."""

TIMED_STEPS, PROFILED_STEPS = 10, 3
"""Steps of PGLE: first some for the step time before (the first half of them warms up), then some
for the profile."""


@dataclass
class Window:
    """A pause (`train.loop.Pause`) that starts a profile before step `first` and stops it before
    step `last` or at the end."""

    first: int
    last: int
    start: Callable[[], Any]
    stop: Callable[[], Any]
    is_open: bool = False

    def due(self, step: int, ending: bool) -> bool:
        if self.is_open:
            return ending or step >= self.last
        return not ending and self.first <= step < self.last

    def act(self, step: int, state: Any, ending: bool) -> None:
        (self.stop if self.is_open else self.start)()
        self.is_open = not self.is_open


def nsys_window(steps: tuple[int, int]) -> Window:
    """The window that Nsight Systems records. `launch/run.sh` runs this process under nsys."""
    call = partial(_call, cuda_runtime())
    return Window(*steps, partial(call, "cudaProfilerStart"), partial(call, "cudaProfilerStop"))


def jax_window(steps: tuple[int, int], folder: Path, program: jax.stages.Compiled) -> Window:
    """The window in which JAX's profile is written to `<folder>/profile/rank-<n>`, with the text of
    the program for `jaxbench plan --profile`."""
    trace = folder / "profile" / f"rank-{jax.process_index()}"
    trace.mkdir(parents=True, exist_ok=True)
    write_whole(trace / PROFILED, profiled_text(program))

    def stop() -> None:
        jax.profiler.stop_trace()
        check_profile(trace, mesh.platform())

    return Window(*steps, partial(jax.profiler.start_trace, trace), stop)


def compile_without_graphs(run: Run, extra_options: dict[str, Any], guide: Guide) -> Compiled:
    """`compile_program` without CUDA graphs, which hide kernels from JAX's profiler. We use no
    cache: a program that XLA loads from a cache has CUDA graphs, whatever its compiler options
    (seen with jax 0.10.2 on null GPUs)."""
    with cache_in(None):
        return compile_program(run, flags.WITHOUT_GRAPHS | extra_options, guide)


def broadcast_guide(name: str) -> Guide:
    """`forecast.guide.guide` in the first process, whose profile all processes get under a name of
    its own."""
    return lambda program, gpu: job.broadcast(name, lambda: guide(program, gpu))


def check_profile(trace: Path, platform: str) -> None:
    """Raises RunFailed unless a JAX profile has an event on a device. On a CPU any event will
    do."""
    if next(profile_events(trace, fallback=platform != "gpu"), None) is None:
        raise RunFailed(
            "--profile jax: the profile has no event on a device; does another tool use CUPTI, or "
            "does the driver let only root profile? The lines about cupti in the log say which"
        )


def profiled_text(program: jax.stages.Compiled) -> str:
    """The text of a compiled program in which each asynchronous start has the name that a profile
    uses for it: the name of the instruction that it wraps."""
    names = dict(pair for pair in kernel_names(program) if len(pair) == 2)
    return renamed(program.as_text() or "", names)


def renamed(text: str, names: dict[str, str]) -> str:
    """A program's text with other names of instructions. An instruction may be called as its
    opcode is, so only what stands after a `%` is a name."""
    return re.sub(r"(?<=%)[\w.\-]+", lambda match: names.get(match[0], match[0]), text)


def cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime that the process uses. Raises RunFailed if there is none."""
    names = ["libcudart.so.13", "libcudart.so.12", ctypes.util.find_library("cudart")]
    if (spec := importlib.util.find_spec("nvidia")) is not None:
        for folder in spec.submodule_search_locations or ():
            names += map(str, Path(folder).glob("**/libcudart.so.*"))
    for name in filter(None, names):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RunFailed("--profile nsys: no CUDA runtime library (libcudart) was found")


def _call(runtime: ctypes.CDLL, name: str) -> None:
    if code := getattr(runtime, name)():
        raise RunFailed(f"--profile nsys: {name} failed with CUDA error {code}")


def check_nsys() -> None:
    """Raises RecipeError unless this process runs under `nsys profile`."""
    if not any(name.startswith("NSYS_") for name in os.environ):
        raise RecipeError("--profile nsys: start it with launch/run.sh, or under nsys profile")


def trace_nccl(folder: Path) -> None:
    """Makes NCCL write its trace to `<folder>/nccl-trace/<host>.<pid>.log`. Call it before the
    first collective."""
    (folder / "nccl-trace").mkdir(parents=True, exist_ok=True)
    os.environ.update(NCCL_TRACE, NCCL_DEBUG_FILE=str(folder / "nccl-trace" / "%h.%p.log"))


def check_nccl_trace(folder: Path, say: Callable[[str], None]) -> None:
    """Says whether NCCL wrote its trace. Raises RunFailed if there were collectives to trace and
    NCCL wrote nothing."""
    files = (folder / "nccl-trace").glob(f"*.{os.getpid()}.log")
    if any(path.stat().st_size for path in files):
        say(f"NCCL wrote a trace: {folder / 'nccl-trace'}")
    elif mesh.platform() == "gpu" and jax.device_count() > 1:
        raise RunFailed(f"--nccl-trace: NCCL wrote nothing into {folder / 'nccl-trace'}")
    else:
        say("NCCL wrote no trace, since a CPU or a single GPU does not use it")


def compile_with_pgle(
    run: Run, program: Any, folder: Path, say: Callable[[str], None]
) -> tuple[Any, dict]:
    """Compiles the program of a step with a profile of itself. Returns the new program and the
    record's `pgle`. The method is profile-guided latency estimation (docs.jax.dev, "GPU performance
    tips").

    It times some steps with `program`, then profiles some without CUDA graphs. Rank 0 profiles, and
    all ranks read its file, for two reasons. Several collectors on a host disturb each other.
    Programs compiled from different profiles order their collectives differently and hang, as JAX's
    automatic PGLE did (marin issue 7344, pull request 8209). Every process compiles before any
    process trains. Raises RunFailed if the profile is not of this program.
    """
    say(f"PGLE: timing {TIMED_STEPS} steps, then profiling {PROFILED_STEPS}")
    before = [s["step_time_s"] for s in run_steps(replace(run, steps=TIMED_STEPS), program)]
    collecting = compile_without_graphs(run, {}, broadcast_guide("visible schedule")).program
    trace, path = folder / "pgle", (folder / "pgle" / "profile.pb").absolute()
    if jax.process_index() == 0:  # an earlier start may have left a profile of its program
        shutil.rmtree(trace / "plugins", ignore_errors=True)
    last = 1 + PROFILED_STEPS
    start, stop = partial(jax.profiler.start_trace, trace), jax.profiler.stop_trace
    pauses = [Window(1, last, start, stop)] if jax.process_index() == 0 else []
    for _ in run_steps(replace(run, steps=last), collecting, pauses=pauses):
        pass
    covered, digest = job.broadcast("pgle", lambda: _collect(trace, path, program))
    check_digest(path, digest)
    if covered < COVERAGE:
        raise RunFailed(
            f"PGLE: the profile has times for only {covered:.0%} of the instructions; does another "
            f"tool use CUPTI?"
        )
    compiled, _, compile_s = compile_program(run, {flags.PGLE: str(path)})
    return compiled, {
        "profile": str(path), "coverage": covered, "compile_s": compile_s,
        "step_time_before_s": statistics.fmean(before[TIMED_STEPS // 2 :]),
    }  # fmt: skip


def _collect(trace: Path, path: Path, program: jax.stages.Compiled) -> tuple[float, str]:
    """Writes the profile of a trace to `path`; returns its coverage and digest."""
    folders = [p.parent for p in trace.glob("plugins/profile/*/*.xplane.pb")]
    profile = get_profiled_instructions_proto(str(folders[-1])) if folders else b""
    path.write_bytes(profile)
    shutil.rmtree(trace / "plugins", ignore_errors=True)
    return coverage(profile, program), _digest(path)


def check_digest(path: Path, digest: str) -> None:
    """Raises RunFailed in every process unless all processes read a profile with this digest in
    `path`."""
    if not all(job.all_gather("pgle profile", _digest(path) == digest)):
        raise RunFailed(f"PGLE: not every process reads the same profile in {path}")


def _digest(path: Path) -> str:
    """The digest of a file, or of no bytes if it does not exist."""
    return hashlib.sha256(path.read_bytes() if path.exists() else b"").hexdigest()


def coverage(profile: bytes, program: jax.stages.Compiled) -> float:
    """The share of a program's custom calls and asynchronous starts that a profile names: GPU
    kernels, matmuls and collectives.

    XLA silently ignores an empty profile, and one of another program. It looks an instruction up by
    its name. It looks an `async-start` up also by the name of the instruction that it wraps, which
    is the name in a profile (openxla/xla, xla/service/profile_guided_latency_estimator.cc).
    """
    profiled = {cost.name for cost in profile_type().FromString(profile).costs}
    covered = [not profiled.isdisjoint(names) for names in kernel_names(program)]
    return sum(covered) / len(covered) if covered else 0.0


def profile_type() -> type[Any]:
    """XLA's `ProfiledInstructionsProto` (tsl/profiler/protobuf/profiled_instructions.proto), of
    which no package has the Python class. Its other fields are ignored."""
    file = FileDescriptorProto(name="profiled_instructions.proto", package="jaxbench")
    cost, whole = file.message_type.add(name="Cost"), file.message_type.add(name="Profile")
    field = FieldDescriptorProto
    cost.field.add(name="name", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    whole.field.add(
        name="costs", number=1, type=field.TYPE_MESSAGE, label=field.LABEL_REPEATED,
        type_name=".jaxbench.Cost",
    )  # fmt: skip
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("jaxbench.Profile"))
