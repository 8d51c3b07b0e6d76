"""Logs of the published scripts: MaxText's, NeMo 2's, and the progress bar of older NeMo releases.

Lines of the documents of DGX Cloud Benchmarking 24.11 to 25.05. A log is read in pieces and nothing
of it is kept but the iterations, so that its size does not matter; a progress bar is one line that
is written again and again after a carriage return.
"""

import codecs
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from jaxbench import hardware
from jaxbench.recipe import published
from jaxbench.recipe.families import MODELS
from jaxbench.report.found import Found, Steps

PIECE = 1 << 20
LONGEST = 1 << 14
"""Bytes read at once, and characters kept of a line: the lines that count are far shorter."""

PUBLISHED_STEPS = 50
"""Of every published run; MaxText's lines do not say how many there are to be."""

NUMBER = r"([-+.\deE]+|[-+]?nan|[-+]?inf)"
MAXTEXT = re.compile(
    rf"completed step: (?P<n>\d+), seconds: {NUMBER.replace('(', '(?P<s>', 1)}, .*?"
    rf"total_weights: (?P<tokens>\d+), loss: {NUMBER.replace('(', '(?P<loss>', 1)}"
)
NEMO = re.compile(
    r"iteration (?P<n>\d+)/(?P<last>\d+) \|(?=.*?global_batch_size: (?P<batch>\d+))"
    rf"(?=.*?reduced_train_loss: {NUMBER.replace('(', '(?P<loss>', 1)})"
    rf".*?train_step_timing in s: {NUMBER.replace('(', '(?P<s>', 1)}"
)
BAR = re.compile(
    rf"\| *\d+/(?P<count>\d+) \[.*?reduced_train_loss={NUMBER.replace('(', '(?P<loss>', 1)}, "
    rf"global_step=(?P<n>\d+)\.?\d*, .*?train_step_timing in s={NUMBER.replace('(', '(?P<s>', 1)}"
)
FORMATS = {"maxtext log": MAXTEXT, "nemo log": NEMO, "nemo progress bar": BAR}

NAMES = (
    re.compile(r"log-(?:nemo|maxtext)_(?P<model>[a-z0-9.]+)_(?P<size>\d+b)_(?P<gpus>\d+)_\d+"),
    re.compile(r"log-(?P<model>maxtext)-(?P<gpus>\d+)_(?P<size>\d+b)_\d+"),
    re.compile(
        r"pretrain(?:ing)?_(?P<model>[a-z0-9.]+)_(?P<size>\d+b)_(?P<dtype>bf16|fp8)_(?:gpus)?"
        r"(?P<gpus>\d+)"
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
    source = None
    for line in lines(path):
        if line.startswith("GSW:"):
            work = declared(line, work)
        for name, pattern in FORMATS.items():
            if (source or name) != name or not (match := pattern.search(line)):
                continue
            source, values = name, match.groupdict()
            steps.add(int(values["n"]), float(values["s"]), float(values["loss"]))
            if "last" in values:
                steps.expected, batch = int(values["last"]) + 1, int(values["batch"])
            elif "count" in values:
                steps.expected = int(values["count"])
            else:
                steps.expected, tokens = PUBLISHED_STEPS, int(values["tokens"])
    return _found(path, source, steps, work, batch, tokens) if source else None


def lines(path: Path) -> Iterator[str]:
    """The lines of a file of any size, those of a progress bar one by one; what is not text in its
    encoding is replaced."""
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(0)
        wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        decoder = codecs.getincrementaldecoder("utf-16" if wide else "utf-8")("replace")
        rest = ""
        while piece := file.read(PIECE):
            *whole, rest = re.split(r"[\r\n]", rest + decoder.decode(piece))
            rest = rest[:LONGEST]
            yield from (line[:LONGEST] for line in whole)
        yield rest + decoder.decode(b"", final=True)


def named(path: Path) -> Work:
    """What the names of a log and of its folders say."""
    text = str(path)
    dtype = next((part for part in path.parts if part in ("bf16", "fp8")), None)
    for pattern in NAMES:
        if match := pattern.search(text):
            said = match.groupdict()
            return Work(said["model"], said["size"], said.get("dtype", dtype), int(said["gpus"]))
    return Work(dtype=dtype)


def declared(line: str, work: Work) -> Work:
    """What the first line of an older script's log says, beside what is known."""
    said = dict(re.findall(r"(\w+)=(\S+)", line))
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
    ]
    found = Found(
        path=path, source=source, recipe=f"{family or work.model or path.stem} {work.size or ''}",
        gpus=work.gpus, dtype=work.dtype, label="log", steps=steps, tokens=tokens,
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
    per_step = row.gbs * row.seq_len
    here = tokens or (batch or row.gbs) * row.seq_len
    if here != per_step:
        found.not_comparable.append(f"its step has {here} tokens, the published one {per_step}")
        return found
    cfg = next(cfg for cfg in MODELS.values() if (cfg.family, cfg.size) == (row.workload, row.size))
    count = published.source_flops(replace(cfg, layers=row.layers), row.seq_len)
    found.tokens, found.published = per_step, asdict(row)
    found.flops = {"published": count * row.gbs / row.gpus}
    found.peak_tflops = hardware.H100.tflops.get(row.dtype)
    return found
