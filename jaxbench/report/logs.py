"""Logs of the published scripts: MaxText's, NeMo 2's, and the progress bar of older NeMo releases.

Lines of the documents of DGX Cloud Benchmarking 24.11 to 25.05. A log is read in pieces and nothing
of it is kept but the iterations, so that its size does not matter.
"""

import re
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from jaxbench import hardware
from jaxbench.recipe import published
from jaxbench.recipe.verdict import SMOKE
from jaxbench.report.found import LARGEST, Again, Found, Steps
from jaxbench.report.lines import lines

PUBLISHED_STEPS = 50
"""Of every published run; MaxText's lines do not say how many there are to be."""


def _number(name: str) -> str:
    """A number that is whole: a line may have been cut off within one."""
    digits = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
    return rf"(?P<{name}>{digits}|[-+]?(?:nan|inf))(?=[\s,|\]]|$)"


MAXTEXT = re.compile(
    rf"completed step: (?P<n>\d{{1,9}}), seconds: {_number('s')}, .*?"
    rf"total_weights: (?P<tokens>\d{{1,15}}), loss: {_number('loss')}"
)
NEMO = re.compile(
    r"iteration (?P<n>\d{1,9})/(?P<last>\d{1,9}) \|(?=.*?global_batch_size: (?P<batch>\d{1,9}))"
    rf"(?=.*?reduced_train_loss: {_number('loss')})"
    rf"(?=(?:.*?peak_memory_usage: {_number('memory')})?)"
    rf".*?train_step_timing in s: {_number('s')}"
)
BAR = re.compile(
    rf"\| *\d+/(?P<count>\d{{1,9}}) \[.*?reduced_train_loss={_number('loss')}, "
    rf"global_step=(?P<n>\d{{1,9}})\.?\d*, .*?train_step_timing in s={_number('s')}"
)
FORMATS: dict[str, tuple[re.Pattern, Again]] = {
    "maxtext log": (MAXTEXT, "processes"),
    "nemo log": (NEMO, "never"),
    "nemo progress bar": (BAR, "redrawn"),
}
"""By the name of their source: the line of an iteration, and when one may come again."""

PROFILED = re.compile(r"nccltrace|_nsys\b|-prof\b")
"""In the name of a log, or of its experiment: not a plain run."""

NAMES = (
    re.compile(r"log-(?:nemo|maxtext)_(?P<model>[a-z0-9.]+)_(?P<size>\d+b)_(?P<gpus>\d{1,6})_\d+"),
    re.compile(r"log-(?P<model>maxtext)-(?P<gpus>\d{1,6})_(?P<size>\d+b)_\d+"),
    re.compile(
        r"pretrain(?:ing)?_(?P<model>[a-z0-9.]+)_(?P<size>\d+b)_(?P<dtype>bf16|fp8)_(?:gpus)?"
        r"(?P<gpus>\d{1,6})"
    ),
)
"""How the scripts name a log, or the experiment whose log it is."""


class Work(NamedTuple):
    """What a log says of its work: family, size, dtype and GPUs, each None where it does not."""

    model: str | None = None
    size: str | None = None
    dtype: str | None = None
    gpus: int | None = None


def read(path: Path) -> Found | None:
    """The run in a log; None where the file is none of these."""
    steps, work, batch, tokens = Steps(), named(path), None, None
    source, traced, smoke, memory, said = None, False, False, 0.0, {}
    for line in lines(path):
        if line.startswith("GSW:"):
            said = dict(re.findall(r"(\w+)=(\S+)", line))
            work = declared(said, work)
        smoke = smoke or line.startswith(SMOKE[:9])
        traced = traced or ("NCCL INFO" in line and "opCount" in line)
        for name, (pattern, again) in FORMATS.items():
            if (source or name) != name or not (match := pattern.search(line)):
                continue
            source, values, steps.again = name, match.groupdict(), again
            steps.add(int(values["n"]), float(values["s"]), float(values["loss"]))
            if "last" in values:
                steps.expected, batch = int(values["last"]) + 1, int(values["batch"])
                memory = max(memory, float(values["memory"] or 0))
            elif "count" in values:
                steps.expected = int(values["count"])
            else:
                steps.expected, tokens = PUBLISHED_STEPS, int(values["tokens"])
    if source is None and work.model is None:
        return None
    found = _found(path, source or "log", steps, work, batch, tokens)
    if source is None:
        found.failed = "it made no iteration"
    if smoke:
        found.label = "smoke"
        found.not_comparable.insert(0, "smoke row on a CPU")
    found.started, found.dated = datetime.fromtimestamp(path.stat().st_mtime, UTC), "file time"
    found.peak_memory = memory if 0 < memory < LARGEST else None
    found.record = {"environment": {k: v for k, v in said.items() if k != "JOB_ID"}} if said else {}
    beside = (path.parent / "nsys_profile").is_dir()
    if traced or beside or any(PROFILED.search(part) for part in path.parts[-3:]):
        found.not_comparable.append("it was profiled, or traced by NCCL")
    return found


def named(path: Path) -> Work:
    """What the names of a log and of its folders say, the nearest first."""
    nearest = path.parts[::-1]
    dtype = next((part for part in nearest if part in ("bf16", "fp8")), None)
    for part in nearest:
        for pattern in NAMES:
            if match := pattern.search(part):
                said = match.groupdict()
                gpus = int(said["gpus"])
                return Work(said["model"], said["size"], said.get("dtype", dtype), gpus)
    return Work(dtype=dtype)


def declared(said: dict[str, str], work: Work) -> Work:
    """What the first line of an older script's log says of its work, beside what is known."""
    gpus = work.gpus
    if {"JOB_NUM_NODES", "GPUS_PER_NODE"} <= said.keys():
        numbers = said["JOB_NUM_NODES"], said["GPUS_PER_NODE"]
        gpus = int(numbers[0]) * int(numbers[1]) if all(map(str.isdecimal, numbers)) else gpus
    return Work(
        said.get("MODEL", work.model or "").lower() or None,
        said.get("MODEL_SIZE", work.size or "").lower() or None,
        said.get("DTYPE", work.dtype or "").lower() or None,
        gpus,
    )


def _family(work: Work) -> str | None:
    """The published name of a log's model: scripts call Llama 2 `maxtext`, and Nemotron-4
    `nemotron`."""
    plain = re.sub(r"[^a-z0-9]", "", work.model or "")
    alike = {"maxtext": "llama2", "nemotron": "nemotron4", "grok": "grok1"}
    plain = alike.get(plain, plain)
    names = {row.workload.replace(".", ""): row.workload for row in published.rows()}
    return names.get(plain)


def _found(
    path: Path, source: str, steps: Steps, work: Work, batch: int | None, tokens: int | None
) -> Found:
    family = _family(work)
    rows = [
        r
        for r in published.rows()
        if (r.workload, r.size, r.dtype, r.gpus) == (family, work.size, work.dtype, work.gpus)
        and r.gpu is hardware.H100  # no log names its GPU
    ]
    found = Found(
        path=path, source=source, recipe=f"{family or work.model or path.stem} {work.size or ''}",
        gpus=work.gpus, dtype=work.dtype, label="log", steps=steps, tokens=tokens,
        model=f"{family or work.model} {work.size}" if work.model else "",
    )  # fmt: skip
    if not rows:
        unknown = [name for name, value in work._asdict().items() if value is None]
        found.not_comparable.append(
            f"the log does not say its {', '.join(unknown)}"
            if unknown
            else f"nothing is published for {found.recipe.strip()} {work.dtype} on {work.gpus} GPUs"
        )
        return found
    row = rows[0]
    here = found.tokens = tokens or (batch or row.gbs) * row.seq_len
    if here != row.tokens_per_step:
        found.not_comparable.append(
            f"its step has {here} tokens, the published one {row.tokens_per_step}"
        )
        return found
    found.published = asdict(row)
    found.flops = {"published": row.flops_per_gpu}
    found.peak_tflops = hardware.H100.tflops.get(row.dtype)
    found.memory_limit = hardware.H100.memory
    return found
