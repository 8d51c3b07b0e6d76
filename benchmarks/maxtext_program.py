"""MaxText's train step, compiled for absent GPUs: the program of another project that `plan --hlo`
reads and our forecast times.

MaxText is installed as `host_time_maxtext.py` says. `compiled` runs this file in that environment.

All programs are compiled in one way:

- Dynamic-slice fusion is off. It runs saved matmuls twice, and no measured run had it.
- XLA's scheduler has no memory limit. Below its limit it gives up overlap, and it takes a program
  for larger than it is.
- FP8's amax is reduced in each layer. XLA moves these all-reduces out of the loop only since June
  2025 (openxla/xla pull request 28184).
- The outputs of attention have the name that Transformer Engine gives them.
- If `Program.profiled` and more than `GUIDED` of the step is exposed, the program is compiled again
  with a profile of the forecast's times, as PGLE does with measured ones.
"""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

from jaxbench.base import hardware
from jaxbench.base.files import write_whole
from jaxbench.base.hardware import placed
from jaxbench.forecast.forecast import Forecast, forecast
from jaxbench.forecast.guide import guide
from jaxbench.forecast.tables import load
from jaxbench.plan import hlo_file
from jaxbench.plan.plan import Memory
from jaxbench.xla import flags
from jaxbench.xla.schedule import Walk

SLICE = 8
"""GPUs of a slice of MaxText's topology `a3`, whatever our GPU. Only the number of all GPUs counts,
since `lowered` makes the mesh."""

GUIDED = 0.01
"""If a run had a profile, and waits for collectives are a larger share of our step than this, the
program is scheduled again."""

BASE = {
    "attention": "cudnn_flash_jax", "use_iota_embed": True, "logits_dot_in_fp32": False,
    "dataset_type": "synthetic", "enable_checkpointing": False, "hardware": "gpu",
    "scan_layers": True, "run_name": "peer", "steps": 50,
}  # fmt: skip
"""MaxText's options of every program: those of the published runs, with cuDNN's attention by JAX
instead of Transformer Engine."""

SLOP = 1.4
"""The limit of XLA's scheduler, as a factor on its usual one. No program comes near it."""

PUBLISHED: flags.Options = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_highest_priority_async_stream": True,
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_pipeline_all_reduce": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_enable_while_loop_double_buffering": True,
    "xla_gpu_enable_all_gather_combine_by_dim": False,
    "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
    "xla_gpu_enable_command_buffer": "",
    "xla_disable_hlo_passes": "rematerialization",
}
"""Compiler options of the published Llama 2 runs (MaxText, DGX Cloud Benchmarking 25.01), by their
names in jax 0.11, without the thresholds that a program has of its own."""

COMPILER: flags.Options = {
    "xla_gpu_enable_dynamic_slice_fusion": False,
    "xla_gpu_memory_limit_slop_factor": round(100 * SLOP),
}
"""Compiler options of every program, next to the published ones."""

IN_LAYERS: flags.Options = {
    "xla_disable_hlo_passes": "rematerialization,while-loop-all-reduce-code-motion"
}
"""FP8's amax is reduced where it arises; the published set disables rematerialization too."""

COMBINE = [f"xla_gpu_{kind}_combine_threshold_bytes"
           for kind in ("all_reduce", "all_gather", "reduce_scatter")]  # fmt: skip

USUAL = 0.8
"""The share of an absent GPU's memory that XLA's scheduler takes as its usual limit."""

LOGGED = re.compile(
    r"LatencyHidingScheduler current memory usage: (\d+) bytes. Current limit: (\d+)"
)
"""XLA's log of a schedule: the memory that the scheduler believes to need, and its limit. Arguments
and outputs are in neither."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A train step of MaxText on GPUs that are not there.

    `batch` is in sequences per GPU, and `combine` has the bytes up to which XLA combines
    all-reduces, all-gathers and reduce-scatters. The last axis of `mesh` is the innermost. `nic` is
    in GB/s, for a network adapter other than the GPU's usual one.
    """

    gpu: str
    gpus: int
    dtype: str
    sequence: int
    batch: float
    mesh: dict[str, int]
    options: dict[str, object]
    combine: tuple[int, int, int]
    profiled: bool = False
    nic: float | None = None

    @property
    def digest(self) -> str:
        """For names of files, so that a program with other options is another file."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:8]

    @property
    def target(self) -> hardware.Gpu:
        gpu = hardware.PLANNED[self.gpu]
        return replace(gpu, nic=self.nic or gpu.nic)

    @property
    def maxtext_options(self) -> dict[str, object]:
        """MaxText's options."""
        mesh: dict[str, int] = {}
        left = SLICE
        for axis, size in reversed(self.mesh.items()):
            inside = math.gcd(size, left)
            left //= inside
            mesh |= {f"ici_{axis}_parallelism": inside, f"dcn_{axis}_parallelism": size // inside}
        return BASE | {
            "quantization": "fp8" if self.dtype == "fp8" else "",
            "max_target_length": self.sequence,
            "per_device_batch_size": self.batch,
            "compile_topology": "a3",
            "compile_topology_num_slices": self.gpus // SLICE,
        } | mesh | self.options  # fmt: skip

    @property
    def compiler_options(self) -> flags.Options:
        """XLA's options."""
        in_layers = IN_LAYERS if self.dtype == "fp8" else {}
        thresholds = dict(zip(COMBINE, self.combine, strict=True))
        return PUBLISHED | COMPILER | in_layers | thresholds


@dataclass(frozen=True)
class Facts:
    """What the compiler said: the seconds to trace and lower and to compile, the bytes that a GPU
    holds at the peak, and the bytes that XLA's scheduler believed to need."""

    lower_s: float
    compile_s: float
    peak: int
    believed: int = 0


def path(stem: Path, end: str = ".hlo.txt") -> Path:
    """A file of a program whose files begin with `stem`."""
    return stem.with_name(stem.name + end)


def facts(stem: Path) -> Facts:
    """The facts that were kept next to a program."""
    return Facts(**json.loads(path(stem, ".json").read_text()))


def read(program: Program, file: Path) -> tuple[Walk, Forecast]:
    """The text of a compiled program in a file, and its forecast."""
    walk = Walk(hlo_file.parse(file, "--hlo")[1])
    gpu = placed(program.target, program.gpus)
    return walk, forecast(walk, gpu, load(program.gpu), hlo_file.joined)


def exposed(of: Forecast) -> float:
    """Seconds of a step's forecast in which kernels wait for collectives."""
    return sum(s for part, s in of.parts_s.items() if part.startswith("exposed"))


def scheduled(stem: Path) -> Path:
    """The file with the schedule that counts: the guided one, if there is one."""
    guided = path(stem, "-guided.hlo.txt")
    return guided if guided.is_file() else path(stem)


@contextmanager
def saved_by_name() -> Iterator[None]:
    """Names the outputs of cuDNN's attention `context`, as Transformer Engine does, while a program
    is traced. Otherwise a policy that saves `context` runs attention forward a second time."""
    from jax._src.cudnn import fused_attention_stablehlo
    from jax.ad_checkpoint import checkpoint_name

    from jaxbench.jax_internals import replaced

    forward = fused_attention_stablehlo._dot_product_attention_fwd_p_wrapper

    class Named:
        @staticmethod
        def bind(*args: Any, **options: Any) -> list[Any]:
            return [checkpoint_name(output, "context") for output in forward.bind(*args, **options)]

    with replaced(fused_attention_stablehlo, "_dot_product_attention_fwd_p_wrapper", Named):
        yield


@contextmanager
def tokamax_for(device: Any) -> Iterator[None]:
    """Makes tokamax choose its kernels for this device, while a program is traced. It asks for the
    default device, which is a CPU here."""
    from jax.extend import backend

    from jaxbench.jax_internals import replaced

    with replaced(backend, "get_default_device", lambda: device):
        yield


def lowered(program: Program) -> Any:
    """MaxText's lowered train step; runs in its environment."""
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    import jax
    import numpy as np
    from flax.core.spmd import logical_axis_rules
    from jax.sharding import AxisType, Mesh
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train_compile as maxtext

    from jaxbench.jax_internals import attention_for_mesh
    from jaxbench.plan.absent import compile_only_devices

    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    base = Path(pyconfig.__file__).with_name("base.yml")
    options = [f"{name}={value}" for name, value in program.maxtext_options.items()]
    config = pyconfig.initialize(["", str(base), *options])
    shape = [program.mesh.get(axis, 1) for axis in config.mesh_axes]
    devices = np.array(compile_only_devices(program.target, program.gpus)).reshape(shape)
    mesh = Mesh(devices, config.mesh_axes, axis_types=(AxisType.Auto,) * len(shape))
    args, kwargs, state, _, model = maxtext.get_shaped_inputs(mesh, config)
    parameters, state = maxtext.sharding.maybe_update_params_sharding_with_opt(config, state)
    given = maxtext.sharding.build_zero1_input_state_mesh_shardings(config, state, parameters)
    data = maxtext.sharding.get_input_data_sharding(config, mesh)
    step, ins, outs, static, donate = maxtext.maxtext_utils.get_functional_train_with_signature(
        maxtext.train.train_step, data, given, model, config, parameters
    )
    with (
        jax.set_mesh(mesh),
        logical_axis_rules(config.logical_axis_rules),
        attention_for_mesh(),
        saved_by_name(),
        tokamax_for(devices.flat[0]),
    ):
        return jax.jit(
            step, in_shardings=ins, out_shardings=outs, static_argnums=static, donate_argnums=donate
        ).lower(*args, **kwargs)


def _compile(program: Program, stem: Path) -> None:
    """Writes the compiled program, and the one that is guided if there should be one; prints the
    `Facts` of the first one. Runs in MaxText's environment."""
    start = time.perf_counter()
    step, options = lowered(program), program.compiler_options
    lowered_at = time.perf_counter()
    compiled = step.compile(compiler_options=options)
    ended = time.perf_counter()
    peak = Memory.of(compiled, program.target).peak
    print(json.dumps(asdict(Facts(lowered_at - start, ended - lowered_at, peak))), flush=True)
    write_whole(path(stem), compiled.as_text())
    if not program.profiled:
        return
    walk, first = read(program, path(stem))
    if exposed(first) > GUIDED * first.step_s:
        profile = path(stem, ".pbtxt").absolute()
        write_whole(profile, guide(walk.program, program.target))
        text = step.compile(compiler_options=options | {flags.PGLE: str(profile)}).as_text()
        write_whole(path(stem, "-guided.hlo.txt"), text)


def compiled(python: str, program: Program, stem: Path) -> Facts:
    """Compiles a program in MaxText's environment, whose interpreter is `python`, unless its files
    are there; `stem` begins their names. Raises RuntimeError with the end of its errors."""
    if path(stem, ".json").is_file():
        return facts(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    command = [python, __file__, json.dumps(asdict(program)), str(stem)]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_MAX_VLOG_LEVEL": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{stem.name}: {done.stderr[-3000:]}")
    said = next(line for line in done.stdout.splitlines() if line.startswith('{"lower_s"'))
    used, limit = map(int, LOGGED.findall(done.stderr)[-1])
    held = round(USUAL * SLOP * program.target.memory) - limit
    found = Facts(**json.loads(said) | {"believed": used + held})
    write_whole(path(stem, ".json"), json.dumps(asdict(found)))
    return found


if __name__ == "__main__":
    _compile(Program(**json.loads(sys.argv[1])), Path(sys.argv[2]))
