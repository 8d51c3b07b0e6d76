"""Results as runs leave them: our records, and logs of the published scripts."""

import json
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

import numpy as np

from jaxbench.base import hardware
from jaxbench.recipe import flops, published, recipes
from jaxbench.results.profiled import COMPARED, WAITS
from jaxbench.results.throughput import throughput
from jaxbench.results.window import spread
from jaxbench.xla import flags

PUBLISHED_S = 12.37
"""Llama 3.1 405B in FP8 on 512 GPUs, 256 sequences of 8192 tokens."""

EXPERIMENT = "pretrain_llama3.1_405b_fp8_512"


def nemo(n, seconds=PUBLISHED_S, loss=11.9, last=49):
    return (
        f"Training epoch 0, iteration {n}/{last} | lr: 1.5e-07 | global_batch_size: 256 | "
        f"global_step: {n} | peak_memory_usage: 70000000000 | memory_allocated: 60000000000 | "
        f"reduced_train_loss: {loss} | train_step_timing in s: {seconds} | "
        f"consumed_samples: {(n + 1) * 256}\n"
    )


def maxtext(n, seconds=4.71, loss=10.4):
    """Llama 2 70B in bf16 on 64 GPUs, 128 sequences of 4096 tokens."""
    return (
        f"completed step: {n}, seconds: {seconds:.3f}, TFLOP/s/device: 400.000, "
        f"Tokens/s/device: 1700.000, total_weights: 524288, loss: {loss:.3f}\n"
    )


def bar(n, seconds=4.61, count=50):
    """Nemotron-4 340B in bf16 on 128 GPUs."""
    return (
        f"Epoch 0: :  {100 * (n + 1) // count}%|████      | {n + 1}/{count} [07:41<00:00, "
        f"reduced_train_loss=12.40, global_step={n}.00, consumed_samples={32 * (n + 1)}.0, "
        f"train_step_timing in s={seconds}]\r"
    )


def log(folder, text, name=f"log-{EXPERIMENT}.out", encoding="utf-8"):
    """A log as a Slurm job leaves it, in folders of its own."""
    path = folder / EXPERIMENT / "1726" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return path


def times(mean, steps=50, seed=0, noise=0.004):
    """Step times with a slow beginning and a spread."""
    slow = 1 + 0.4 * np.exp(-np.arange(steps) / 1.5)
    return [float(s) for s in mean * slow * np.random.default_rng(seed).normal(1, noise, steps)]


def write_record(
    folder,
    name,
    seconds=None,
    *,
    recipe="llama2_70b_bf16",
    row=64,
    status="completed",
    reason=None,
    steps=50,
    device=hardware.H100.device,
    started=None,
    ranks=0,
    driver="580.65.06",
    **changes,
):
    """A folder of ours with a record of the real recipe. `seconds` is one step time, or all."""
    run = recipes.resolve(recipes.load(recipe), row)
    found = published.lookup(run)
    seconds = 4.7 if seconds is None else seconds
    each = seconds if isinstance(seconds, list) else [seconds] * steps
    peak = hardware.peak_tflops(device, run.precision.dtype)
    mean = spread(each[11:45] or each)
    content = {
        "schema": 1, "started": (started or datetime(2026, 3, 1, tzinfo=UTC)).isoformat(),
        "command": f"python -m jaxbench.train --config {recipe} --gpus {run.gpus}",
        "status": status, "reason": reason, "label": run.label,
        "not_comparable_because": published.differences(run, device),
        "recipe": recipes.describe(run),
        "hardware": {
            "platform": "gpu", "device": device, "devices": run.gpus, "processes": run.gpus,
            "host": "node001", "runtime": "cuda 13000", "device_memory_bytes": 78_149_541_000,
        },
        "versions": {"jaxbench": "0.1.0", "jax": "0.11.2", "jaxlib": "0.11.2", "driver": driver},
        "flags": {"compiler_options": flags.options(run, "gpu"), "XLA_FLAGS": ""},
        "parameters": flops.parameters(run.model)["total"],
        "published": found and asdict(found), "resumed_at": [],
        "kernels": {"attention": "cudnn", "products": run.precision.dtype},
        "ranks": ranks if isinstance(ranks, list) else [
            {"rank": r, "host": f"node{r // 8:03}", "wait_s": w, "step_time_s": mean}
            for r, w in enumerate(np.random.default_rng(1).normal(0.9, 0.01, ranks) * mean["mean"])
        ],
        "summary": {
            "window": [11, 44], "step_time_s": mean, **throughput(run, mean["mean"], peak),
            "peak_memory_bytes": 60_000_000_000,
        },
    } | changes  # fmt: skip
    path = folder / name
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(content))
    rate = content["summary"]["tflops_per_gpu"]["full"] if "summary" not in changes else 400.0
    lines = [
        json.dumps({"step": n, "step_time_s": s, "loss": 10.4, "peak_memory_bytes": 6e10,
                    "tflops_per_gpu": rate * mean["mean"] / s}) + "\n"
        for n, s in enumerate(each[:steps])
    ]  # fmt: skip
    (path / "steps.jsonl").write_text("".join(lines))
    return path


CLOCKED_S, OTHER_S = 5.0, 1.8
"""Parts of a forecast step whose time is inverse to the clock, and of the others."""


def write_slowed(
    folder, name, clock=1.0, slow=1.0, busy_s=0.0, links_s=0.0, written_s=(), compiled_s=(),
    **changes,
):  # fmt: skip
    """A run of 16 GPUs in step, and its forecast. GPU 11 has the clock of the others over `slow`,
    the host of rank 5 is late by `busy_s` in each step, kernels wait for links by `links_s`; steps
    wait for records or compilations."""
    draw = np.random.default_rng(3)
    clocks = clock * draw.normal(1, 0.001, 16)
    clocks[11] /= slow
    busy = np.full(16, 0.1)
    busy[5] += busy_s
    each_s = CLOCKED_S / clocks.min() + OTHER_S + busy_s + links_s
    steps = np.full(50, each_s) + draw.normal(0, 0.004, 50)
    host = np.full((50, 2), (0.002, 0.0))
    for column, late in enumerate((written_s, compiled_s)):
        for step, seconds in late:
            host[step] = steps[step] + seconds, seconds * column
            steps[step] += seconds
    mean = spread([float(s) for s in steps[1:]])
    ranks = [
        {"rank": r, "host": f"n{r // 8}", "wait_s": mean["mean"] - busy[r], "step_time_s": mean,
         "products_s": [0.0155], "gpus": [{"gpu": r % 8, "sm_mhz": 1980 * clocks[r], "sm_max_mhz":
         1980, "clock_ratio": clocks[r], "power_w": 600.0, "throttled_s": {}}]}
        for r in range(16)
    ]  # fmt: skip
    changes = {"ranks": ranks} | changes
    path = write_record(folder, name, [float(s) for s in steps], **changes)
    lines = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    for line, (host_s, compiled) in zip(lines, host, strict=True):
        line |= {"host_s": host_s} | ({"compiled_s": compiled} if compiled else {})
    (path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = json.loads((path / "run.json").read_text())
    parts = {
        "products": CLOCKED_S - 1,
        "attention": 1.0,
        "other kernels": 0.8,
        "exposed: fsdp": 1.0,
    }
    plan = {
        "gpus": record["recipe"]["gpus"], "target": "h100", "settings": record["recipe"],
        "forecast": {"step_s": CLOCKED_S + OTHER_S, "parts_s": parts},
        "bound_parts_s": {"compute": CLOCKED_S},
    }  # fmt: skip
    (path / "plan.json").write_text(json.dumps(plan))
    return path


def day(number):
    """The first of March 2026 and so many days."""
    return datetime(2026, 3, 1, 9, 30, tzinfo=UTC) + timedelta(days=number)


def write_profile(folder, waits_s, rank=0):
    """A profile of a run next to its forecast, in which kernels wait so much longer."""
    parts = [{"name": "matmuls", "measured_s": 3.1, "forecast_s": 3.0},
             {"name": WAITS, "measured_s": 0.2 + waits_s, "forecast_s": 0.2}]  # fmt: skip
    gather = {"name": "all-gather over fsdp", "measured_s": 1.0 + waits_s, "forecast_s": 1.0}
    single = {"name": "cublas-lt-matmul.5", "measured_s": 0.5, "forecast_s": 0.4, "runs": 320,
              "source": "forward BSD,DF->BSF/dot_general", "sizes": "matmul bf16 1x8192x28672x64",
              }  # fmt: skip
    content = {
        "profile": str(folder / "profile" / f"rank-{rank}"), "gpu": "h100", "devices": 64,
        "steps": 5, "measured_s": 3.3 + waits_s, "forecast_s": 3.2, "kernels": parts,
        "links": [gather], "largest": [single], "found": 0.99, "remark": "",
    }  # fmt: skip
    path = folder / "profile" / f"rank-{rank}" / COMPARED
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))
