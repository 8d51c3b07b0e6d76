"""Measures how long the host takes to enqueue a step, on null GPUs, and compares plans with runs.

    python benchmarks/host_time.py [--steps 40] ['llama31_8b_bf16:8 model.layers=2' ..]

Rows are given as `recipe:gpus key=value ..`; the default is row `1` of every recipe, each with and
without command buffers. Each row is planned, and then run three times on null GPUs, whose kernels
take no time (`tests/null_gpu`). The median step is then the time of Python, JAX and XLA's runtime.
The calls of the driver and of NCCL per step are the difference of two runs of different length.

Prints two tables: host time over the forecast step; and launches, NCCL bytes of a device and peak
memory, as planned and as counted. Times are of this machine's cores, on which the null GPUs'
streams run too; no time is a GPU's.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "null_gpu"))

import null_gpus
from commands import ROOT

from jaxbench.plan.plan import Plan, read

GOAL = 0.2
"""A row is marked if host time over the forecast step reaches this."""

NO_COMMAND_BUFFERS = "execution.xla_flags=tuned,xla_gpu_enable_command_buffer="
SHORT, LONG = 4, 8
"""Steps of the two runs that count."""
FIRST = 5
"""The first step whose time counts: before, XLA records its command buffers."""

ALLOCATOR = {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}
"""The driver's pools instead of XLA's own allocator, which takes 1/32 of each GPU's memory from the
host's, 18 GiB for eight H100s, and rounds each buffer to 256 bytes."""

NCCL = {
    "all-gather": "ncclAllGather", "reduce-scatter": "ncclReduceScatter",
    "all-reduce": "ncclAllReduce", "all-to-all": "ncclAlltoAll", "collective-permute": "ncclSend",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A row as it was planned and run; `counts` are per step, of all devices of the process."""

    spec: str
    plan: Plan
    counts: Counter[str]
    step_s: float
    peak: int

    def per_device(self, what: str) -> float:
        """Kernels, copies or fills per device and step."""
        return sum(n for k, n in self.counts.items() if k.startswith(what)) / self.plan.gpus


def asked(plan: Plan) -> Counter[str]:
    """Planned bytes that a device gives to NCCL per step, by function, from ring bytes. An
    all-to-all has a buffer for each of its peers, and the bytes of one are given."""
    sizes = plan.settings["parallelism"]
    total: Counter[str] = Counter()
    for line in plan.collectives:
        n = math.prod(sizes[axis] for axis in line.axes.removeprefix("part of ").split(" x "))
        ring = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}.get(line.kind, n - 1)
        total[NCCL[line.kind]] += round(line.bytes / ring)
    return total


def parsed(spec: str) -> tuple[str, int, list[str]]:
    """The recipe, the number of GPUs and the settings of `recipe:gpus key=value ..`."""
    row, *changes = spec.split()
    name, _, gpus = row.partition(":")
    return name, int(gpus), changes


def arguments(spec: str) -> list[str]:
    """Arguments of `plan` and `train` for `recipe:gpus key=value ..`."""
    name, gpus, changes = parsed(spec)
    return ["--config", name, "--gpus", str(gpus), *(f"--set={change}" for change in changes)]


def planned(spec: str, folder: Path) -> Plan:
    """The plan of a row. Raises CalledProcessError where it has none."""
    command = [sys.executable, "-m", "jaxbench.plan", *arguments(spec), "--dump", str(folder)]
    subprocess.run([*command, "--json"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    return read(folder / "plan.json")


def trained(spec: str, steps: int, folder: Path, variables: dict[str, str]) -> list[dict]:
    """The steps of a row on the null GPUs that variables describe. Raises SystemExit with what it
    printed where it fails."""
    command = null_gpus.start(
        *arguments(spec), "--steps", steps, folder=Path(tempfile.mkdtemp(dir=folder), "run"),
        JAX_COMPILATION_CACHE_DIR=str(folder / "cache"),  # train's own is of one number of steps
        **variables,
    ).wait(900)  # fmt: skip
    if command.status:
        sys.exit(f"{spec}: {command.out}{command.err}")
    return command.steps


def asked_per_step(run: Callable[[int, dict[str, str]], object], folder: Path) -> Counter[str]:
    """What the driver and NCCL are asked for per step: the difference of two runs of different
    length. `run` takes the number of steps and a variable for the null GPUs."""
    sums = []
    for length in (SHORT, LONG):
        (counts := folder / f"counts{length}").mkdir()
        run(length, {"NULL_GPU_COUNTS": str(counts)})
        sums.append(counted(counts))
    return Counter({k: (n - sums[0][k]) / (LONG - SHORT) for k, n in sums[1].items()})


def counted(folder: Path) -> Counter[str]:
    """Sums of a folder of counts."""
    lines = [line for path in folder.iterdir() for line in path.read_text().splitlines()]
    total: Counter[str] = Counter()
    for n, _, name in (line.partition(" ") for line in lines):
        total[name] += int(n)
    return total


def measure(spec: str, steps: int) -> Case:
    """Plans and runs a row, on null GPUs with as much memory as its plan needs."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plan = planned(spec, folder)
        memory_mb = math.ceil(plan.bytes_per_device.peak / 0.85 / 2**20) + 1024
        variables = null_gpus.environment(plan.gpus, memory_mb=memory_mb, still=1) | ALLOCATOR
        lines = trained(spec, steps, folder, variables)  # first: autotuning launches too
        peaks = []

        def run(length: int, counts: dict[str, str]) -> None:
            peaks.append(trained(spec, length, folder, variables | counts)[-1]["peak_memory_bytes"])

        per_step = asked_per_step(run, folder)
    step_s = median_step(line["step_time_s"] for line in lines)
    return Case(spec, plan, per_step, step_s, peaks[-1])  # autotuning takes memory too


def median_step(times: Iterable[float]) -> float:
    """The median of the step times that count."""
    return statistics.median(list(times)[FIRST:])


def host_line(case: Case) -> str:
    """The line of a case in the first table."""
    launches = sum(map(case.per_device, ("kernels", "copies", "fills")))
    forecast = case.plan.forecast_step_s
    ratio = case.step_s / forecast
    every = 1e6 * case.step_s / (launches * case.plan.gpus)
    return (
        f"| {case.spec} | {launches:.0f} | {case.counts['cuGraphLaunch'] / case.plan.gpus:.0f} | "
        f"{1e3 * case.step_s:.1f} | {every:.1f} | {forecast:.3f} | "
        f"{ratio:.3f}{' held back' if ratio >= GOAL else ''} |"
    )


def plan_lines(case: Case) -> list[str]:
    """The lines of a case in the second table."""
    parts = [case.per_device(what) for what in ("kernels", "copies", "fills")]
    launched = f"{sum(parts):g} ({' + '.join(f'{n:g}' for n in parts)})"
    peak = case.plan.bytes_per_device.peak
    rows = [
        ("launches", case.plan.launches, launched, sum(parts) - case.plan.launches),
        ("peak bytes", peak, case.peak, case.peak - peak),
    ]
    bytes_of = asked(case.plan)
    for name in sorted({*bytes_of, *NCCL.values()}):
        run = round(case.counts[f"{name} bytes"] / case.plan.gpus)
        if run or bytes_of[name]:
            rows.append((f"{name} bytes", bytes_of[name], run, run - bytes_of[name]))
    return [f"| {case.spec} | {a} | {b} | {c} | {d:+.0f} |" for a, b, c, d in rows]


def main() -> None:
    """Measures rows one after another; prints both tables last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--steps", type=int, default=40, help="of the run that is timed")
    args = parser.parse_args()
    if reason := null_gpus.missing():
        sys.exit(reason)
    names = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    rows = [f"{name}:1{set_}" for name in names for set_ in ("", f" {NO_COMMAND_BUFFERS}")]
    cases = []
    for spec in args.rows or rows:
        cases.append(measure(spec, args.steps))
        print(*plan_lines(cases[-1]), host_line(cases[-1]), sep="\n", flush=True)
    cores, load = os.cpu_count(), os.getloadavg()[0]
    print(f"\nOf this machine's {cores} cores, load {load:.1f}; no figure is a GPU's.\n")
    print("| row | launches | graphs | host ms | µs per launch | forecast s | host / forecast |")
    print("|---|---|---|---|---|---|---|", *map(host_line, cases), sep="\n")
    print("\n| row | per device and step | planned | counted | difference |")
    print("|---|---|---|---|---|", *(line for c in cases for line in plan_lines(c)), sep="\n")


if __name__ == "__main__":
    main()
