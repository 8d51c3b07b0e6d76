"""The record of a run when it starts, and what each of its starts ran on."""

import json
import os
import shlex
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxbench.base.files import SCHEMA
from jaxbench.base.hardware import NULL, identify
from jaxbench.base.versions import versions
from jaxbench.cluster import job
from jaxbench.cluster.devices import hardware, other_gpu
from jaxbench.recipe import flops, published, recipes
from jaxbench.recipe.build import flat
from jaxbench.recipe.settings import Run
from jaxbench.results.window import too_short
from jaxbench.run.arguments import Options
from jaxbench.run.records import read
from jaxbench.xla import flags

WHAT_RAN = "recipe", "hardware", "versions", "flags", "options"
"""Fields of a record that say what ran."""

OF_PROGRAM = "pgle", "tune_kernels"
"""Options with which measurements on the GPUs change the program."""

IGNORED = ("recipe.overrides",)
"""Fields that say how others were set."""


def new_record(run: Run, path: Path, options: Options, step: int) -> dict[str, Any]:
    """The record of a start from `step`, before its first step. `path` is run.json."""
    devices = hardware()
    before = read(path) if options.resume and path.exists() else None
    row = published.lookup(run, identify(devices["device"]))
    record = {
        "schema": SCHEMA,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "status": "running",
        "reason": None,
        "cause": None,
        "label": "null" if devices["null"] else run.label,
        "recipe": recipes.describe(run),
        "hardware": devices,
        # Rank 0's, for all: they identify cached programs, and only one process has to run git.
        "versions": job.broadcast("versions", versions),
        "flags": {
            "compiler_options": flags.options(run, devices["platform"]),
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        },
        "options": {name: getattr(options, name) for name in OF_PROGRAM},
        "parameters": flops.parameters(run.model)["total"],
        "published": row and asdict(row),
        "starts": [*(before["starts"] if before else []), {}],
    }
    record["starts"][-1] = {
        "step": step,
        "started": record["started"],
        "command": record["command"],
        "mesh": run.mesh_text(),
        "devices": devices["devices"],
        "hosts": [*dict.fromkeys(job.all_gather("hosts", job.node()))],
        "changed": changes(before, record) if before else {},
    }
    return record | start_fields(run, options, record, step)


def not_comparable(run: Run, devices: dict[str, Any], options: Options) -> list[str]:
    """The reasons, known before the first step, why a run is not comparable."""
    reasons = published.differences(run, devices["device"])
    if reasons and (line := other_gpu(identify(devices["device"]))):
        reasons.append(line)
    if devices["null"]:
        reasons.append(NULL)
    if options.checkpoint_every is not None:
        reasons.append("checkpoints are written during training")
    if options.profile:
        reasons.append(f"it was profiled (--profile {options.profile})")
    if options.nccl_trace:
        reasons.append("NCCL was traced")
    return reasons


def start_fields(run: Run, options: Options, record: dict[str, Any], step: int) -> dict[str, Any]:
    """The fields of a record that depend on the step at which its last start begins."""
    starts = [*record["starts"][:-1], record["starts"][-1] | {"step": step}]
    first, *resumed = [start["step"] for start in starts]
    reasons = not_comparable(run, record["hardware"], options)
    if resumed:
        reasons.append(f"resumed at step {', '.join(map(str, resumed))}")
    reasons = reasons or too_short(run.steps, first)
    return {
        "comparable": not reasons,
        "not_comparable_because": reasons,
        "first_step": first,
        "resumed_at": resumed,
        "starts": starts,
    }


def changes(before: dict[str, Any], record: dict[str, Any]) -> dict[str, list[Any]]:
    """What differs between the programs that ran: [before, now] by dotted name."""
    there, here = (
        dict(flat({name: fields.get(name) for name in WHAT_RAN}))
        for fields in (before, json.loads(json.dumps(record)))
    )
    names = [n for n in there | here if n not in IGNORED and there.get(n) != here.get(n)]
    return {name: [there.get(name), here.get(name)] for name in names}
