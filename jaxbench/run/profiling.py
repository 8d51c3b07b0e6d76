"""Looking into a run: JAX's profiler, Nsight Systems, the NCCL trace, profile-guided scheduling.

The first two and PGLE read the GPU through CUPTI, which has one subscriber at a time: a run has at
most one of them. Figures of an observed run are marked as not comparable.
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
from jax.experimental.profiler import get_profiled_instructions_proto

from jaxbench.cluster import job
from jaxbench.errors import RecipeError, RunFailed
from jaxbench.recipe.settings import Run
from jaxbench.train.loop import run_steps
from jaxbench.train.program import compile_program

NCCL_TRACE = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL,P2P,NET"}
"""What the published trace sets."""

PGLE_OPTION = "xla_gpu_pgle_profile_file_or_directory_path"

COVERAGE = 0.5
"""Smallest share of a program's kernels and collectives that a useful profile has times of."""

TIMED, PROFILED = 10, 3
"""PGLE: steps for the step time before, whose first half warms up, and steps that are profiled."""


@dataclass
class Window:
    """A pause of training (`train.loop.Pause`) that opens a profile before step `first`, and closes
    it before step `last` or at the end."""

    first: int
    last: int
    start: Callable[[], Any]
    stop: Callable[[], Any]
    is_open: bool = False

    def due(self, step: int, ending: bool) -> bool:
        """True at the window's edges."""
        if self.is_open:
            return ending or step >= self.last
        return not ending and self.first <= step < self.last

    def act(self, step: int, state: Any, ending: bool) -> None:
        """Opens or closes the profile; the device is idle."""
        (self.stop if self.is_open else self.start)()
        self.is_open = not self.is_open


def window(kind: str, first: int, last: int, folder: Path) -> Window:
    """The window of a `jax` profile, written to `<folder>/profile/rank-<n>`, or of `nsys`, which
    `launch/run.sh` starts around this process."""
    if kind == "nsys":
        runtime = cuda_runtime()
        begin, end = (partial(_call, runtime, f"cudaProfiler{word}") for word in ("Start", "Stop"))
        return Window(first, last, begin, end)
    trace = folder / "profile" / f"rank-{jax.process_index()}"
    return Window(first, last, partial(jax.profiler.start_trace, trace), jax.profiler.stop_trace)


def cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime that the process uses. Raises RunFailed where there is none."""
    names = ["libcudart.so.13", "libcudart.so.12", ctypes.util.find_library("cudart")]
    if (spec := importlib.util.find_spec("nvidia")) is not None:
        for place in spec.submodule_search_locations or ():
            names += map(str, Path(place).glob("**/libcudart.so.*"))
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
    """Makes NCCL write its trace to `<folder>/nccl-trace/<host>.<pid>.log`; to be called before the
    first collective."""
    (folder / "nccl-trace").mkdir(parents=True, exist_ok=True)
    os.environ.update(NCCL_TRACE, NCCL_DEBUG_FILE=str(folder / "nccl-trace" / "%h.%p.log"))


def guided(run: Run, program: Any, folder: Path, say: Callable[[str], None]) -> tuple[Any, dict]:
    """(the step compiled with a profile of itself, what that took): profile-guided latency
    estimation (docs.jax.dev, "GPU performance tips").

    Some steps are timed with `program`, some are profiled without command buffers, which hide the
    kernels. One process profiles, and all read its file: several collectors on a host disturb each
    other, and programs compiled from different profiles order their collectives differently and
    hang, as JAX's automatic PGLE was seen to (marin issue 7344, pull request 8209).
    Every process compiles before any trains on. Raises RunFailed if the profile is not of this
    program.
    """
    say(f"PGLE: timing {TIMED} steps, profiling {PROFILED}")
    before = [s["step_time_s"] for s in run_steps(replace(run, steps=TIMED), program)]
    collecting, *_ = compile_program(run, {"xla_gpu_enable_command_buffer": ""})
    trace, path = folder / "pgle", (folder / "pgle" / "profile.pb").absolute()
    profiler = Window(
        1, 1 + PROFILED, partial(jax.profiler.start_trace, trace), jax.profiler.stop_trace
    )
    pauses = [profiler] if jax.process_index() == 0 else []
    for _ in run_steps(replace(run, steps=1 + PROFILED), collecting, pauses=pauses):
        pass
    told = job.from_first("pgle", partial(_collect, trace, path, program.as_text()))
    coverage = shared(told, path)
    if coverage < COVERAGE:
        raise RunFailed(
            f"PGLE: the profile has the times of {coverage:.0%} of the instructions; does another "
            f"tool use CUPTI?"
        )
    compiled, _, compile_s = compile_program(run, {PGLE_OPTION: str(path)})
    return compiled, {
        "profile": str(path), "coverage": coverage, "compile_s": compile_s,
        "step_time_before_s": statistics.fmean(before[TIMED // 2 :]),
    }  # fmt: skip


def _collect(trace: Path, path: Path, program: str) -> str:
    """Writes the profile of a trace to `path`; returns `coverage` of it, and its digest."""
    found = [p.parent for p in trace.glob("plugins/profile/*/*.xplane.pb")]
    profile = get_profiled_instructions_proto(str(found[-1])) if found else b""
    path.write_bytes(profile)
    shutil.rmtree(trace / "plugins", ignore_errors=True)
    return f"{coverage(profile, program)} {_digest(path)}"


def shared(told: str, path: Path) -> float:
    """The coverage of the profile that `_collect` told of. Raises RunFailed in every process unless
    all read that profile in `path`."""
    coverage, digest = told.split()
    if not job.all_agree("pgle profile", _digest(path) == digest):
        raise RunFailed(f"PGLE: not every process reads the same profile in {path}")
    return float(coverage)


def _digest(path: Path) -> str:
    """Of a file's content; of nothing where it cannot be read."""
    content = path.read_bytes() if path.exists() else b""
    return hashlib.sha256(content).hexdigest()


def coverage(profile: bytes, program: str) -> float:
    """The share of a scheduled program's products, kernels and collectives that a profile names.

    XLA compiles without a word when the profile is of another program, or none at all. The profile
    is a protocol buffer, in which names are plain bytes behind their length.
    """
    names = re.findall(r"%?([\w.-]+) = .* (?:custom-call|[a-z-]+-start)\(", program)
    named = [name for name in names if bytes([0x0A, len(name) % 128]) + name.encode() in profile]
    return len(named) / len(names) if names else 0.0
