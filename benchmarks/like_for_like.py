"""Holds forecasts against steps that were measured with the same code: MaxText's train step,
compiled for absent GPUs and forecast by `plan --hlo`, beside the times published with MaxText.

MaxText is installed as `host_time_maxtext.py` says. Rows are those of Llama 2 70B
(configs/published.csv) and the two of AI-Hypercomputer/gpu-recipes (src/frameworks/{a3ultra,a4}/
maxtext-configs/llama3-1-70b-256gpus-*.yaml) with cuDNN's attention by JAX:

    python benchmarks/like_for_like.py MAXTEXT/bin/python [ROW ..] [--output docs/like_for_like.md]

The compiler of the time reduced FP8's amax in each layer: it moved such an all-reduce out of a loop
only since June 2025 (openxla/xla pull request 28184), so that pass is disabled for FP8 rows.

What differs from the published runs: MaxText 0.2.5 and jax 0.11 instead of those of the time, and
the schedule, which they had by PGLE. Where XLA's own estimates of times leave collectives exposed
for more than `GUIDED` of the step, the program is compiled again with a profile as PGLE makes it,
but of the forecast's times. Programs stay in results/like_for_like, so that a call that was
interrupted goes on.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

from tables import replace_table

from jaxbench.base import hardware
from jaxbench.base.files import write_whole
from jaxbench.forecast.guide import guide
from jaxbench.plan import hlo_file
from jaxbench.recipe import published, recipes
from jaxbench.xla import flags
from jaxbench.xla.custom_calls import RULES
from jaxbench.xla.hlo import Program

FOLDER = Path("results", "like_for_like")

GUIDED = 0.03
"""Exposed share of a step above which its program is scheduled again; the median error aimed at."""

BASE = {
    "attention": "cudnn_flash_jax", "use_iota_embed": True, "scan_layers": True,
    "logits_dot_in_fp32": False, "dataset_type": "synthetic", "enable_checkpointing": False,
    "hardware": "gpu", "run_name": "peer", "steps": 50,
}  # fmt: skip
"""MaxText's options of every row: those of the published runs, with cuDNN's attention by JAX."""

IN_LAYERS = {"xla_disable_hlo_passes": "while-loop-all-reduce-code-motion"}
"""Compiler options of FP8 rows: amax is reduced where it arises, as it was when they ran."""

SAVED = ("query_proj", "key_proj", "value_proj", "qkv_proj", "out_proj")
"""Activations that the Llama 2 runs saved; those in bf16 also the output of the MLP."""

GCP = {"model_name": "llama3.1-70b", "max_target_length": 8192}


@dataclass(frozen=True)
class Row:
    """A published step time, and MaxText's options and compiler options of its run."""

    name: str
    gpu: str
    gpus: int
    fsdp: int
    published_s: float
    options: dict[str, object]
    compiler: flags.Options


def llama2(dtype: str, row: published.Row) -> Row:
    """A row of Llama 2 70B; the limits of combined collectives depend on precision and nodes."""
    assert row.step_time_s is not None
    large = row.gpus >= 512
    reduce, gather, scatter = (2**31, 2**31, 2**24 if large else 2**25)
    if dtype == "fp8":
        reduce, gather, scatter = 2**30, 2**29, 2**22 if large else 2**23
    extra = {"quantization": "fp8"} if dtype == "fp8" else {"mlpwo": "device"}
    options = {
        "model_name": "llama2-70b", "per_device_batch_size": 2, "max_target_length": 4096,
        "remat_policy": "custom", **dict.fromkeys(SAVED, "device"), **extra,
    }  # fmt: skip
    run = recipes.resolve(recipes.load(f"llama2_70b_{dtype}"), row.gpus)
    compiler = compiler_options() | {
        "xla_gpu_all_reduce_combine_threshold_bytes": reduce,
        "xla_gpu_all_gather_combine_threshold_bytes": gather,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": scatter,
    }
    if dtype == "fp8":
        compiler |= IN_LAYERS
    fsdp = 256 if row.gpus == 256 else min(row.gpus, 128)
    assert run.batch.global_batch == 2 * row.gpus
    return Row(f"llama2_70b_{dtype}:{row.gpus}", "h100", row.gpus, fsdp, row.step_time_s,
               BASE | options, compiler)  # fmt: skip


def compiler_options() -> flags.Options:
    """The published set, in the names of the installed jax."""
    overrides = recipes.parse_overrides(["execution.xla_flags=published", "execution.offload=none"])
    run = recipes.resolve(recipes.load("llama2_70b_bf16"), 64, overrides=overrides)
    return flags.options(run, "gpu")


def rows() -> list[Row]:
    """All rows that were measured with MaxText."""
    measured = [r for r in published.rows() if (r.workload, r.size) == ("llama2", "70b")]
    found = [llama2(r.dtype, r) for r in measured]
    large = compiler_options() | {"xla_gpu_reduce_scatter_combine_threshold_bytes": 2**24}
    h200 = {"per_device_batch_size": 2, "remat_policy": "save_dot_with_context_except_mlp"}
    b200 = {"per_device_batch_size": 8, "remat_policy": "full", "quantization": "fp8"}
    in_layers = large | IN_LAYERS
    return [
        *found,
        Row("llama31_70b_bf16:256 h200", "h200", 256, 128, 15.516, BASE | GCP | h200, large),
        Row("llama31_70b_fp8:256 b200", "b200", 256, 256, 20.935, BASE | GCP | b200, in_layers),
    ]


def compile_row(row: Row, path: Path, profile: Path | None) -> None:
    """Writes MaxText's compiled program, scheduled with a profile if there is one, and prints the
    seconds to lower and to compile it; runs in its environment."""
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    import jax
    import numpy as np
    from flax.core.spmd import logical_axis_rules
    from jax.sharding import AxisType, Mesh
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train_compile as maxtext

    from jaxbench.jax_internals import attention_for_mesh
    from jaxbench.plan.absent import compile_only_devices

    gpu = hardware.PLANNED[row.gpu]
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    sizes = {"data": row.gpus // row.fsdp, "fsdp": row.fsdp}
    inside = {"data": 1, "fsdp": gpu.node}
    options = row.options | {"compile_topology": "a3"}
    options["compile_topology_num_slices"] = row.gpus // gpu.node
    for axis, size in sizes.items():
        options[f"ici_{axis}_parallelism"] = inside[axis]
        options[f"dcn_{axis}_parallelism"] = size // inside[axis]
    start = time.perf_counter()
    base = Path(pyconfig.__file__).with_name("base.yml")
    config = pyconfig.initialize(["", str(base), *(f"{k}={v}" for k, v in options.items())])
    shape = [sizes.get(axis, 1) for axis in config.mesh_axes]
    devices = np.array(compile_only_devices(gpu, row.gpus)).reshape(shape)
    mesh = Mesh(devices, config.mesh_axes, axis_types=(AxisType.Auto,) * len(shape))
    args, kwargs, state, _, model = maxtext.get_shaped_inputs(mesh, config)
    parameters, state = maxtext.sharding.maybe_update_params_sharding_with_opt(config, state)
    given = maxtext.sharding.build_zero1_input_state_mesh_shardings(config, state, parameters)
    data = maxtext.sharding.get_input_data_sharding(config, mesh)
    step, ins, outs, static, donate = maxtext.maxtext_utils.get_functional_train_with_signature(
        maxtext.train.train_step, data, given, model, config, parameters
    )
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules), attention_for_mesh():
        lowered = jax.jit(
            step, in_shardings=ins, out_shardings=outs, static_argnums=static, donate_argnums=donate
        ).lower(*args, **kwargs)
    options = row.compiler | ({flags.PGLE: str(profile)} if profile else {})
    lowered_at = time.perf_counter()
    compiled = lowered.compile(compiler_options=options)
    print(lowered_at - start, time.perf_counter() - lowered_at)
    path.write_text(compiled.as_text())


def stem(row: Row) -> str:
    """The name of a row's files."""
    return row.name.replace(":", "-").replace(" ", "-")


def guided(row: Row, python: str) -> hlo_file.HloStep:
    """The forecast of MaxText's program, scheduled with the forecast's times of its first one."""
    gpu = hardware.PLANNED[row.gpu]
    program = Program.parse((FOLDER / f"{stem(row)}.hlo.txt").read_text(), RULES, strict=False)
    path = (FOLDER / f"{stem(row)}.pbtxt").absolute()
    write_whole(path, guide(program, gpu))
    return forecast(row, python, path)


def printed(command: list[str]) -> str:
    """What a process prints. Raises SystemExit with the end of its errors."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stdout


def forecast(row: Row, python: str, profile: Path | None = None) -> hlo_file.HloStep:
    """The forecast of MaxText's program. Raises SystemExit with what the compiler printed."""
    path = FOLDER / f"{stem(row)}{'-guided' if profile else ''}.hlo.txt"
    if not path.is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        command = [python, __file__, python, row.name, "--compile", str(unfinished)]
        command += ["--guide", str(profile)] if profile else []
        printed(command)
        unfinished.rename(path)
    return hlo_file.read(path, hardware.PLANNED[row.gpu], None)


def exposed(step: hlo_file.HloStep) -> float:
    """Seconds of a step's forecast in which kernels wait for collectives."""
    return sum(s for part, s in step.forecast.parts_s.items() if part.startswith("exposed"))


def line(row: Row, step: hlo_file.HloStep, again: hlo_file.HloStep | None) -> str:
    """The line of a row, with the forecast of its guided schedule if there is one."""
    f = step.forecast
    ratios = [seconds / row.published_s for seconds in (f.step_s, f.fast_s, f.slow_s)]
    second = ""
    if again is not None:
        error = again.forecast_step_s / row.published_s - 1
        second = f"{again.forecast_step_s:.3f} s, {100 * error:+.1f} %, {exposed(again):.3f} s"
    return (
        f"| {row.name} | {row.published_s} | {f.step_s:.3f} | {100 * (ratios[0] - 1):+.1f} | "
        f"{100 * (ratios[1] - 1):+.1f} to {100 * (ratios[2] - 1):+.1f} | {exposed(step):.3f} | "
        f"{second} | {step.bound_step_s:.3f} | {step.launches} | {100 * f.outside:.0f} |"
    )


def summary(errors: list[float]) -> str:
    """The median, the 90th percentile of sizes and the worst of signed errors."""
    sizes = sorted(map(abs, errors))
    ninth = sizes[min(len(sizes) - 1, round(0.9 * (len(sizes) - 1)))]
    return (
        f"{len(errors)} rows: median {100 * statistics.median(errors):+.1f} %, nine of ten within "
        f"{100 * ninth:.1f} %, worst {100 * max(errors, key=abs):+.1f} %."
    )


def main() -> None:
    """Forecasts rows one after another, prints the table, and writes it with `--output`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="of the environment with MaxText")
    parser.add_argument("rows", nargs="*", help="names, as llama2_70b_bf16:64")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--compile", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--guide", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    chosen = [row for row in rows() if not args.rows or row.name in args.rows]
    if args.compile:
        compile_row(chosen[0], args.compile, args.guide)
        return
    lines = [
        "| row | published s | forecast s | error % | range % | exposed s | guided: s, error, "
        "exposed | bound s | launches | outside the tables % |",
        "|" + "---|" * 10,
    ]
    print("\n".join(lines), flush=True)
    errors, guided_errors = [], []
    for row in chosen:
        step = forecast(row, args.python)
        again = guided(row, args.python) if exposed(step) > GUIDED * step.forecast_step_s else None
        errors.append(step.forecast_step_s / row.published_s - 1)
        guided_errors.append((again or step).forecast_step_s / row.published_s - 1)
        lines.append(line(row, step, again))
        print(lines[-1], flush=True)
    summaries = f"{summary(errors)} With guided schedules {summary(guided_errors)}"
    lines = [f"{time.strftime('%Y-%m-%d')}, jax {version('jax')}. {summaries}", "", *lines]
    print(f"\n{lines[0]}")
    if args.output:
        replace_table(args.output, "\n".join(lines))


if __name__ == "__main__":
    main()
