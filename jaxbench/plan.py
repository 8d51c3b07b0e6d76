"""`python -m jaxbench.plan --config configs/llama2_70b_bf16.yaml --gpus 64`: compiles the program
that `train` would run, for GPUs that are not there, and says whether it fits, what it sends, what
it runs, and how long it takes at best.

`docs/plan.md` explains the model behind the step-time bound. `sweep` plans every row.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxbench import (
    environment,
    flops,
    hlo,
    memory,
    mesh,
    metrics,
    plan_text,
    published,
    recipes,
    schedule,
    sweep,
    systems,
    target,
    train,
    xla_flags,
)
from jaxbench.config import RecipeError, Run, RunFailed
from jaxbench.systems import System

INSTALL = "pip install -c constraints.txt -e '.[plan]'"
KEYS = (
    "recipe", "gpus", "target", "fits", "parameters", "bytes_per_device", "flops", "collectives",
    "kernels", "lower_s", "compile_s", "bound_step_s", "published",
)  # fmt: skip
"""What `--json` prints. A plan has more, for people and for `--diff`."""

SHOWN_BUFFERS = 12


def make_plan(run: Run, gpu: str, system: System, dump: Path | None = None) -> dict[str, Any]:
    """Compiles one step of the run for absent GPUs and describes it in plain values.

    FLOPs and bytes are per device and step. The scheduled program is kept in `dump`.
    """
    devices = target.compile_only_devices(gpu, run.gpus, system.node)
    with (
        jax.set_mesh(mesh.make_mesh(run.mesh_shape, devices)),
        tempfile.TemporaryDirectory() as tmp,
    ):
        options = {"xla_dump_to": tmp, "xla_dump_hlo_as_text": True}
        compiled, lower_s, compile_s = train.compile_program(run, options)
        train.check_program(compiled, run)
        state = state_bytes(run)
        live_ranges = next(Path(tmp).glob("*live-range.txt")).read_text()
    text = compiled.as_text()
    if dump is not None:
        (dump / "program.hlo.txt").write_text(text)
    program, stats = hlo.Program.parse(text), compiled.memory_analysis()
    timeline = schedule.analyse(program, system)
    row = published.lookup(run)
    peak = stats.peak_memory_in_bytes
    return {
        "recipe": run.recipe,
        "row": run.row,
        "gpus": run.gpus,
        "target": gpu,
        "fits": peak <= system.memory_limit,
        "mesh": run.mesh_text(),
        "settings": recipes.describe(run),
        "system": asdict(system),
        "flags": xla_flags.options(run, "gpu"),
        "versions": environment.versions(),
        "parameters": flops.parameters(run.model)["total"],
        "bytes_per_device": {
            "arguments": stats.argument_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
            "peak": peak,
            "limit": system.memory_limit,
        },
        "state_bytes": state,
        "largest_buffers": [asdict(b) for b in memory.largest(program, live_ranges, SHOWN_BUFFERS)],
        "flops": executed(run, program),
        "collectives": collectives(run, system, timeline),
        "wire_bytes": sum(t.collective.wire_bytes for t in timeline.transfers),
        "uncovered_wire_bytes": timeline.uncovered_bytes,
        "kernels": kernels(program),
        "launches": timeline.kernels,
        "lower_s": lower_s,
        "compile_s": compile_s,
        "bound_parts_s": {
            "compute": timeline.compute_s,
            "memory": timeline.memory_s,
            "exposed": timeline.exposed_s,
        },
        "bound_step_s": timeline.bound_s,
        "mfu": mfu(run, system, timeline.bound_s, row.step_time_s if row else None),
        "published": row and asdict(row),
    }


def public(plan: dict[str, Any]) -> dict[str, Any]:
    """The part of a plan that `--json` prints."""
    names = ("kind", "axes", "count", "bytes", "exposed_s")
    chosen = {key: plan[key] for key in KEYS}
    return chosen | {"collectives": [{n: c[n] for n in names} for c in plan["collectives"]]}


def state_bytes(run: Run) -> dict[str, int]:
    """Bytes on one device of the train state, by part, and of the gradients that a step sums up."""
    state = jax.eval_shape(partial(train.init_state, run))

    def local(tree: Any, width: int = 0) -> int:
        total = 0
        for x in jax.tree.leaves(tree):
            shape = x.sharding.shard_shape(x.shape) if x.shape else x.shape
            total += (width or x.dtype.itemsize) * math.prod(shape)
        return total

    width = 4 if run.accumulation > 1 and run.precision.accumulate == "fp32" else 2
    return {
        "parameters": local(state.model),
        "optimizer": local(state.optimizer),
        "gradients": local(state.model, width),
    }


def executed(run: Run, program: hlo.Program) -> dict[str, Any]:
    """FLOPs of one device and step: the model's in two conventions, and those compiled.

    `recompute_ratio` is compiled over `model_full`, since compiled attention is counted unmasked.
    """
    share = run.batch.global_batch / run.gpus
    model = {c: metrics.model_flops(run, c) * share for c in ("causal", "full")}
    compiled = sum(program.gemm_flops().values()) + program.attention_flops()
    return {
        "model_causal": model["causal"],
        "model_full": model["full"],
        "compiled": compiled,
        "recompute_ratio": compiled / model["full"],
    }


def kernels(program: hlo.Program) -> dict[str, int]:
    """Runs per step of matrix products by dtype, and of fused attention, forward and backward."""
    fp8 = sum(runs for dtype, _, runs, _ in program.gemms() if dtype.startswith("f8"))
    bf16 = sum(runs for dtype, _, runs, _ in program.gemms() if dtype == "bf16")
    calls = program.custom_calls()
    attention = sum(calls[name] for name in hlo.ATTENTION_CALLS)
    return {"gemm_bf16": bf16, "gemm_fp8": fp8, "attention": attention}


def collectives(run: Run, system: System, timeline: schedule.Schedule) -> list[dict[str, Any]]:
    """Collectives of one step, summed by kind and mesh axes; `bytes` are sent by one device."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for t in timeline.transfers:
        c = t.collective
        axes = systems.mesh_axes(c.devices, run.mesh_shape)
        entry = found.setdefault(
            (c.kind, axes),
            {
                "kind": c.kind,
                "axes": axes,
                "across_nodes": system.crosses_nodes(c),
                "count": 0,
                "bytes": 0,
                "least_s": 0.0,
                "exposed_s": 0.0,
            },
        )
        entry["count"] += c.count
        entry["bytes"] += c.wire_bytes
        entry["least_s"] += t.seconds
        entry["exposed_s"] += t.exposed_s
    return sorted(found.values(), key=lambda entry: -entry["bytes"])


def mfu(run: Run, system: System, bound_s: float, published_s: float | None) -> dict[str, Any]:
    """Model FLOPs utilisation (full attention) at the bound and at the published step time."""
    peak = flops.peak_tflops(system.device, run.precision.dtype)
    times = {"bound": bound_s, "published": published_s}
    return {
        name: metrics.throughput(run, seconds, peak)["mfu"]["full"] if seconds else None
        for name, seconds in times.items()
    }


def remedies(run: Run) -> list[tuple[str, ...]]:
    """Changes that may make a run fit, the mildest first: smaller passes, more ranks for the
    weights, recomputation, and these together."""
    smaller = [
        f"batch.microbatch={n}"
        for n in sorted({run.microbatch // 2, 1}, reverse=True)
        if 0 < n < run.microbatch
    ]
    wider = [f"parallelism.fsdp={run.parallelism.fsdp * n}" for n in (2, 4, 8)]
    full = [] if run.execution.remat == "full" else ["execution.remat=full"]
    least = [*full, *smaller[-1:]]
    single = [(change,) for change in (*smaller, *wider, *full)]
    together = [tuple(least), (*least, "parallelism.tensor=8")]
    return [*single, *(changes for changes in together if len(changes) > 1)]


def find_remedy(
    run: Run, recipe: recipes.Recipe, row: int | str, gpu: str, system: System
) -> Iterator[str]:
    """Compiles the run with each of `remedies` until one fits; says what was tried."""
    for changes in remedies(run):
        try:
            overrides = recipes.parse_overrides([*run.overrides, *changes])
            changed = recipes.resolve(recipe, row, overrides=overrides)
        except RecipeError:
            continue
        devices = target.compile_only_devices(gpu, changed.gpus, system.node)
        with jax.set_mesh(mesh.make_mesh(changed.mesh_shape, devices)):
            compiled, _, _ = train.compile_program(changed)
        peak = compiled.memory_analysis().peak_memory_in_bytes
        fits = peak <= system.memory_limit
        asked = " ".join(f"--set {change}" for change in changes)
        yield f"  {'it fits' if fits else 'still too big'}, {plan_text.gib(peak)}, with {asked}"
        if fits:
            return
    yield "  none of these settings makes it fit: it needs more GPUs or fewer layers"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The arguments; `--help` is their documentation."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxbench.plan",
        description="Compiles a benchmark for GPUs that are not there, and describes its step.",
    )
    parser.add_argument("--config", help="recipe file, such as configs/llama2_70b_bf16.yaml")
    parser.add_argument("--gpus", type=int, help="the row: number of GPUs")
    parser.add_argument("--gpu", choices=list(systems.SYSTEMS), default="h100", help="default h100")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="change a setting of the row: batch.microbatch=4")  # fmt: skip
    parser.add_argument("--system", action="append", default=[], metavar="KEY=VALUE",
                        help="change the system: nvlink=450 and nic=50 (GB/s per GPU, one "
                        "direction), node=8 (GPUs in an NVLink domain)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--dump", type=Path, metavar="DIR",
                        help="keep the scheduled program and the whole plan")  # fmt: skip
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"),
                        help="what moved between two plans: JSON files of --dump, or rows with "
                        "settings, as in 'llama2_70b_bf16:64 execution.remat=full'")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="plan every row of every recipe")
    parser.add_argument("--output", type=Path, default=Path("docs"),
                        help="folder for the table of --all (default docs)")  # fmt: skip
    return parser.parse_args(argv)


def check_compiler() -> None:
    """Raises RecipeError where the compiler for GPUs is not installed."""
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        raise RecipeError(f"plan needs the compiler for GPUs: {INSTALL}")


def plan_spec(spec: str, gpu: str, system: System) -> dict[str, Any]:
    """The plan of `recipe:gpus key=value ..`, or of a file that `--dump` left."""
    path = Path(spec)
    if path.is_dir() or path.suffix == ".json":
        try:
            return json.loads((path / "plan.json" if path.is_dir() else path).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise RecipeError(f"{spec}: cannot read a plan: {error}") from error
    row, *changes = spec.split()
    name, _, gpus = row.partition(":")
    run, _ = resolve(name, int(gpus) if gpus.isdigit() else None, changes)
    check_compiler()
    return make_plan(run, gpu, system)


def resolve(config: str, gpus: int | None, changes: list[str]) -> tuple[Run, recipes.Recipe]:
    """The run of a row, and its recipe. `config` is a file or the name of a recipe."""
    path = Path(config)
    recipe = recipes.load(path if path.suffix else recipes.config_folder() / f"{config}.yaml")
    if gpus not in recipe.rows:
        raise RecipeError(f"--gpus: recipe {recipe.name} has the rows {recipe.row_names()}")
    run = recipes.resolve(recipe, gpus, overrides=recipes.parse_overrides(changes))
    return run, recipe


def main(argv: list[str] | None = None) -> int:
    """The command; returns 0, 1 when a plan does not fit, or 2 for a user's mistake."""
    args = parse_arguments(argv)
    try:
        xla_flags.check_environment(os.environ.get("XLA_FLAGS", ""))
        jax.config.update("jax_platforms", "cpu")
        system = systems.with_settings(systems.SYSTEMS[args.gpu], args.system)
        if args.diff:
            print(plan_text.difference(*(plan_spec(s, args.gpu, system) for s in args.diff)))
            return 0
        if args.all:
            check_compiler()
            return sweep.sweep(args.gpu, system, args.system, args.output)
        if not args.config or args.gpus is None:
            raise RecipeError("--config and --gpus are needed (or --all, or --diff A B)")
        run, recipe = resolve(args.config, args.gpus, args.set)
        check_compiler()
        if args.dump:
            args.dump.mkdir(parents=True, exist_ok=True)
        plan = make_plan(run, args.gpu, system, args.dump)
    except (RecipeError, RunFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.dump:
        metrics.write_json(args.dump / "plan.json", plan)
    print(json.dumps(public(plan), indent=2) if args.json else plan_text.report(plan))
    if not plan["fits"]:
        print(plan_text.too_big(plan), file=sys.stderr)
        for line in find_remedy(run, recipe, args.gpus, args.gpu, system):
            print(line, file=sys.stderr, flush=True)
    return 0 if plan["fits"] else 1


if __name__ == "__main__":
    sys.exit(main())
