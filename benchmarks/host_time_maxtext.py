"""Compares host time per step on null GPUs with MaxText's, for a step of the same model.

MaxText is installed into an environment of its own, with the jax of this one (Python 3.12), and
without its extras, which pin all that it depends on; Google Cloud is left out (`DECOUPLE_GCLOUD`):

    python3.12 -m venv MAXTEXT
    MAXTEXT/bin/pip install --no-deps maxtext==0.2.5
    MAXTEXT/bin/pip install -c constraints.txt jax-cuda13-plugin jax-cuda13-pjrt jax jaxlib flax \\
        optax orbax-checkpoint nvidia-cudnn-cu13 nvidia-cuda-nvcc aqtp qwix omegaconf pydantic \\
        absl-py pyyaml psutil packaging pathwaysutils jinja2 tokamax huggingface_hub sympy \\
        tokenizers transformers datasets grain drjax pillow tiktoken sentencepiece ml_collections
    python benchmarks/host_time_maxtext.py MAXTEXT/bin/python [--rounds 3] [--steps 40] \\
        ['llama31_8b_bf16:1 model.layers=2' ..]

Rows are Llamas in bf16, given as in `host_time.py`, with `execution.remat` `none` or `full`. Both
sides have the row's dimensions, batch, mesh, remat and compiler options (`execution.xla_flags`),
AdamW, clipping, cuDNN's attention, and one process for all GPUs. Each runs its own training loop on
synthetic tokens, one after the other in each round; a round's figure is the median time from step
to step, and its ratio is ours over MaxText's. Times are of this machine's cores, on which the null
GPUs' streams run too; no time is a GPU's.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import host_time
import null_gpus

from jaxbench.base import hardware
from jaxbench.plan.command import resolve
from jaxbench.recipe import flops
from jaxbench.recipe.settings import AXES, Run
from jaxbench.xla import flags

ROWS = [
    f"llama31_8b_bf16:{row}{changes}"
    for row in ("1", "8 model.layers=2 batch.global_batch=8")
    for changes in ("", " execution.remat=full", " execution.xla_flags=default")
]
MEMORY_MB = 160 * 1024
"""Of all null GPUs together, so that one holds MaxText's larger step too: XLA takes 1/32 of it from
the host's."""

MAXTEXT = {
    "override_model_config": True, "hardware": "gpu", "dataset_type": "synthetic",
    "attention": "cudnn_flash_jax", "use_iota_embed": True, "logits_dot_in_fp32": False,
    "enable_checkpointing": False, "enable_tensorboard": False, "log_config": False,
    "abort_on_nan_loss": False, "run_name": "host", "learning_rate_schedule_steps": 1000,
}  # fmt: skip
"""MaxText's options for every row: those of the published runs, with cuDNN's attention by JAX
instead of Transformer Engine, and nothing that writes. The length of the schedule is part of the
program, which is compiled once with a fixed one."""


@dataclass(frozen=True)
class Side:
    """One of the two programs: what a step asks for, and the median step of each round."""

    gpus: int
    counts: Counter[str]
    seconds: list[float]

    @property
    def launches(self) -> float:
        """Kernels, copies and fills per device and step."""
        whats = ("kernels", "copies", "fills")
        return sum(n for k, n in self.counts.items() if k.startswith(whats)) / self.gpus

    @property
    def step_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def launch_s(self) -> float:
        """Host time over the launches of all devices."""
        return self.step_s / (self.launches * self.gpus)


def options(run: Run) -> dict[str, object]:
    """MaxText's options for a run. Raises SystemExit for what has no equal there."""
    model = run.model
    if model.family not in ("llama2", "llama3.1") or run.precision.dtype != "bf16":
        sys.exit(f"{run.recipe}: expected a Llama in bf16")
    if run.execution.remat not in ("none", "full"):
        sys.exit(
            f"{run.recipe}: expected execution.remat=none or full: names of activations differ"
        )
    assert model.attention
    assert model.mlp
    mesh = zip(AXES, run.mesh_shape, strict=True)
    return MAXTEXT | {f"ici_{axis}_parallelism": size for axis, size in mesh} | {
        "model_name": f"{model.family}-{model.size}",
        "base_num_decoder_layers": model.layers,
        "base_emb_dim": model.embed,
        "base_mlp_dim": model.mlp.ffn,
        "base_num_query_heads": model.attention.heads,
        "base_num_kv_heads": model.attention.kv_heads,
        "head_dim": model.attention.head_dim,
        "vocab_size": model.vocabulary,
        "max_target_length": run.batch.sequence_length,
        "per_device_batch_size": run.microbatch * run.batch_ranks / run.gpus,
        "gradient_accumulation_steps": run.accumulation,
        "remat_policy": run.execution.remat,
        "scan_layers": not run.unrolled,
    }  # fmt: skip


def as_variable(compiler: flags.Options) -> str:
    """Compiler options as `XLA_FLAGS`, which knows modes by the last part of their name."""
    named = {k: v for k, v in compiler.items() if k not in flags.PINNING}  # no flags of `XLA_FLAGS`
    values = {k: str(v).removeprefix("COLLECTIVE_PIPELINING_MODE_") for k, v in named.items()}
    return " ".join(f"--{name}={value.lower()}" for name, value in values.items())


def maxtext(
    python: str, run: Run, steps: int, folder: Path, variables: dict[str, str]
) -> list[float]:
    """Times of the steps of MaxText's training loop. Raises SystemExit with what it printed where
    it fails or has another number of parameters."""
    own = Path(tempfile.mkdtemp(dir=folder))
    metrics = own / "metrics.jsonl"
    settings = options(run) | {
        "steps": steps, "metrics_file": metrics, "base_output_directory": own,
        "jax_cache_dir": folder / "maxtext_cache",
    }  # fmt: skip
    command = null_gpus.start(
        *(f"{name}={value}" for name, value in settings.items()), folder=own, python=python,
        program=("-m", "maxtext.trainers.pre_train.train"), DECOUPLE_GCLOUD="TRUE",
        XLA_FLAGS=as_variable(flags.options(run, "gpu")), **variables,
    ).wait(900)  # fmt: skip
    if command.status:
        sys.exit(f"MaxText: {command.text}")
    parameters = f"{flops.parameters(run.model)['total'] / 1e9:.3f}"
    theirs = re.search(r"number parameters: (\S+) billion", command.out + command.err)
    if not theirs or theirs[1] != parameters:
        sys.exit(f"MaxText has {theirs and theirs[1]} billion parameters instead of {parameters}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["perf/step_time_seconds"] for line in lines]


def measure(spec: str, python: str, rounds: int, steps: int) -> tuple[Side, Side]:
    """Ours and MaxText's, in turn."""
    run, _ = resolve(*host_time.parsed(spec), hardware.H100)
    variables = null_gpus.environment(run.gpus, memory_mb=MEMORY_MB // run.gpus, still=1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def ours(count: int, more: dict[str, str]) -> list[float]:
            lines = host_time.trained(spec, count, folder, variables | more)
            return [line["step_time_s"] for line in lines]

        def theirs(count: int, more: dict[str, str]) -> list[float]:
            return maxtext(python, run, count, folder, variables | more)

        both = (ours, theirs)
        times = [[host_time.median_step(side(steps, {})) for side in both] for _ in range(rounds)]
        sides = []
        for side, seconds in zip(both, zip(*times, strict=True), strict=True):
            (own := folder / side.__name__).mkdir()
            sides.append(Side(run.gpus, host_time.asked_per_step(side, own), list(seconds)))
    return sides[0], sides[1]


def line(spec: str, ours: Side, theirs: Side) -> str:
    """The line of a row."""
    ratios = [a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
    graphs = [side.counts["cuGraphLaunch"] / side.gpus for side in (ours, theirs)]
    return (
        f"| {spec} | {ours.launches:.0f}, {theirs.launches:.0f} | {graphs[0]:.0f}, {graphs[1]:.0f} "
        f"| {1e3 * ours.step_s:.1f}, {1e3 * theirs.step_s:.1f} | {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) | {1e6 * ours.launch_s:.1f}, "
        f"{1e6 * theirs.launch_s:.1f} | {ours.launch_s / theirs.launch_s:.2f} |"
    )


def main() -> None:
    """Measures rows one after another and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="of the environment with MaxText")
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="of a run that is timed")
    args = parser.parse_intermixed_args()
    if reason := null_gpus.missing():
        sys.exit(reason)
    code = "from importlib.metadata import version as v; print(v('maxtext'), v('jax'))"
    found = subprocess.run([args.python, "-c", code], check=True, capture_output=True, text=True)
    theirs, _, jax = found.stdout.strip().partition(" ")
    if jax != version("jax"):
        sys.exit(f"MaxText has jax {jax} instead of {version('jax')}")
    cores, load = os.cpu_count(), os.getloadavg()[0]
    print(f"MaxText {theirs}, jax {jax}, {cores} cores, load {load:.1f}; no figure is a GPU's.\n")
    print("Ours, MaxText's; ratios are ours over MaxText's, with the least and largest round.\n")
    print("| row | launches | graphs | host ms | ratio | µs per launch | ratio |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for spec in args.rows or ROWS:
        print(line(spec, *measure(spec, args.python, args.rounds, args.steps)), flush=True)


if __name__ == "__main__":
    main()
