"""Reads logs of the published scripts: MaxText's, NeMo 2's, and the progress bar of older NeMo
releases.

The formats are from DGX Cloud Benchmarking 24.11 to 25.05. We read a log in pieces, and keep only
its iterations in memory.
"""

import codecs
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench.base import hardware
from jaxbench.base.errors import counted
from jaxbench.base.quantity import LARGEST
from jaxbench.base.untrusted import opened, printable
from jaxbench.recipe import published
from jaxbench.report.runs import Repeats, RunData, Steps
from jaxbench.results.verdict import SMOKE

PIECE = 1 << 20
"""Bytes that are read at once."""

LONGEST = 1 << 14
"""Characters that we keep of a line. The lines that count are far shorter."""

PUBLISHED_STEPS = 50
"""The number of steps of every published run. MaxText's lines do not state it."""


def _number(name: str) -> str:
    """A pattern for a complete number. The next line may follow it directly."""
    digits = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
    return rf"(?P<{name}>{digits}|[-+]?(?:nan|inf))(?![\d.+-]|[eE][-+\d])"


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
    rf"global_step=(?P<n>\d{{1,9}})\.?\d*, (?=(?:.*?consumed_samples=(?P<samples>\d{{1,15}}))?)"
    rf".*?train_step_timing in s={_number('s')}"
)
FORMATS: dict[str, tuple[re.Pattern, Repeats]] = {
    "maxtext log": (MAXTEXT, "processes"),
    "nemo log": (NEMO, "never"),
    "nemo progress bar": (BAR, "redrawn"),
}
"""For each source the pattern of an iteration's line, and when an iteration may be logged again."""

OTHER_FORMATS = {
    "torchtitan": re.compile(r"step: *\d+ +loss: .*\btps: "),
    "Megatron-LM or Megatron-Bridge": re.compile(
        r"iteration +\d+/ *\d+ \|.*elapsed time per iteration"
    ),
}
"""Programs whose iterations we do not read, by a pattern of their lines."""

RECORD_START = re.compile(r"(?=Training epoch \d+, iteration |completed step: |Epoch \d+: )")
"""The beginning of an iteration's line, also behind another line whose newline was lost."""

COLOURS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[()].)")
"""Control sequences of a terminal."""

PROFILED = re.compile(r"nccltrace|_nsys\b|-prof\b")
"""Marks of a profiled run in the name of a log or of its experiment."""

NAMES = (
    re.compile(r"log-(?:nemo|maxtext)_(?P<model>[a-z0-9.]+)_(?P<size>\d+b)_(?P<gpus>\d{1,6})_\d+"),
    re.compile(r"log-(?P<model>maxtext)-(?P<gpus>\d{1,6})_(?P<size>\d+b)_\d+"),
    re.compile(
        r"pretrain(?:ing)?_(?P<model>[a-z0-9.]+)_(?P<size>\d+b)_(?P<dtype>bf16|fp8)_(?:gpus)?"
        r"(?P<gpus>\d{1,6})"
    ),
)
"""Names that the scripts give to a log or to its experiment."""


class Workload(NamedTuple):
    """The model family, size, dtype and number of GPUs of a log. Each is None if it is unknown."""

    model: str | None = None
    size: str | None = None
    dtype: str | None = None
    gpus: int | None = None


def lines(path: Path) -> Iterator[str]:
    """The lines of a file of any size, without colours. A carriage return ends a line too, since
    progress bars write it. Bytes that are no text in the file's encoding (UTF-8 or UTF-16) are
    replaced."""
    with opened(path) as file:
        utf16 = file.read(4).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        file.seek(0)
        decoder = codecs.getincrementaldecoder("utf-16" if utf16 else "utf-8-sig")("replace")
        rest = ""
        while piece := file.read(PIECE):
            *complete, rest = re.split(r"[\r\n]", rest + decoder.decode(piece))
            rest = rest[:LONGEST]
            yield from (_plain(line[:LONGEST]) for line in complete if line)
        yield _plain(rest + decoder.decode(b"", final=True))


def _plain(line: str) -> str:
    return printable(COLOURS.sub("", line))


@dataclass
class Log:
    """What the lines of a log say.

    `source` is the format of its iterations, one of `FORMATS`, and `other` a program whose format
    we do not read. `batch`, `samples` and `tokens` are numbers by iteration: its sequences, the
    sequences since the start, and its tokens. `memory` is the peak in bytes. `declared` has the
    fields of an older script's first line.
    """

    workload: Workload
    steps: Steps = field(default_factory=Steps)
    source: str | None = None
    other: str | None = None
    batch: dict[int, int] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    memory: float = 0.0
    smoke: bool = False
    traced: bool = False
    declared: dict[str, str] = field(default_factory=dict)

    def add(self, line: str) -> None:
        """Reads one line."""
        if line.startswith("GSW:"):
            self.declared = dict(re.findall(r"(\w+)=(\S+)", line))
            self.workload = with_declared(self.declared, self.workload)
        self.smoke = self.smoke or line.startswith(SMOKE[:9])
        self.traced = self.traced or ("NCCL INFO" in line and "opCount" in line)
        for name in [self.source] if self.source else FORMATS:
            pattern, repeats = FORMATS[name]
            if match := pattern.search(line):
                self.source, self.steps.repeats = name, repeats
                self._add_iteration(match.groupdict())
                break
        # Our own logs have each iteration in both formats, and only NeMo's says how many follow.
        if self.source == "maxtext log" and (match := NEMO.search(line)):
            self.steps.expected = int(match["last"]) + 1
        if self.source is None and self.other is None:
            found = (name for name, pattern in OTHER_FORMATS.items() if pattern.search(line))
            self.other = next(found, None)

    def _add_iteration(self, values: dict[str, Any]) -> None:
        """Adds an iteration by the named groups of its pattern, of which a format may lack some."""
        iteration, last, count = int(values["n"]), values.get("last"), values.get("count")
        self.steps.add(iteration, float(values["s"]), float(values["loss"]))
        expected = int(last) + 1 if last else int(count or 0)
        self.steps.expected = expected or self.steps.expected or PUBLISHED_STEPS
        self.memory = max(self.memory, float(values.get("memory") or 0))
        for unit in ("batch", "samples", "tokens"):
            if number := values.get(unit):
                getattr(self, unit)[iteration] = int(number)


def read(path: Path) -> RunData | None:
    """The run in a log; None for any other file."""
    log = Log(workload_of(path))
    for whole in lines(path):
        for line in RECORD_START.split(whole):
            log.add(line)
    if log.source is None and log.workload.model is None and log.other is None:
        return None
    sequences, tokens = log.batch or _of_each(log.samples), log.tokens
    run = _run(path, log.steps, log.workload, _first(sequences), _first(tokens))
    if log.source is None:
        of = f"a log of {log.other}: " if log.other else ""
        run.failed = f"{of}it has no iteration in a known format ({', '.join(FORMATS)})"
    if log.smoke:
        run.label = "smoke"
        run.not_comparable.insert(0, "smoke row on a CPU")
    if changed := _change(sequences, "sequences") or _change(tokens, "tokens"):
        run.not_comparable.insert(0, changed)
    run.peak_memory = log.memory if 0 < log.memory < LARGEST else None
    environment = {name: value for name, value in log.declared.items() if name != "JOB_ID"}
    run.record = {"environment": environment} if environment else {}
    profiled = (path.parent / "nsys_profile").is_dir() or any(map(PROFILED.search, path.parts[-3:]))
    if log.traced or profiled:
        run.not_comparable.append("it was profiled, or traced by NCCL")
    return run


def _of_each(samples: dict[int, int]) -> dict[int, int]:
    """The sequences of each iteration, from the sequences since the start."""
    return {n: s - samples.get(n - 1, 0) for n, s in samples.items() if not n or n - 1 in samples}


def _first(numbers: dict[int, int]) -> int | None:
    return next(iter(numbers.values()), None)


def _change(numbers: dict[int, int], unit: str) -> str | None:
    """The first change of what an iteration trains on; None if nothing changes."""
    for n, number in numbers.items():
        if number != _first(numbers):
            return f"a step changes from {_first(numbers)} to {number} {unit} at iteration {n}"
    return None


def workload_of(path: Path) -> Workload:
    """The workload according to the names of a log and of its folders. The nearest name counts."""
    parts = path.parts[::-1]
    dtype = next((part for part in parts if part in ("bf16", "fp8")), None)
    matches = (pattern.search(part) for part in parts for pattern in NAMES)
    if match := next(filter(None, matches), None):
        values = match.groupdict()
        dtype = values.get("dtype", dtype)
        return Workload(values["model"], values["size"], dtype, int(values["gpus"]))
    return Workload(dtype=dtype)


def with_declared(values: dict[str, str], workload: Workload) -> Workload:
    """The workload according to the first line of an older script's log, completed by what is
    known."""
    known = {"model": "MODEL", "size": "MODEL_SIZE", "dtype": "DTYPE"}
    declared: dict[str, Any] = {
        field: values[name].lower() for field, name in known.items() if name in values
    }
    numbers = values.get("JOB_NUM_NODES", ""), values.get("GPUS_PER_NODE", "")
    if all(map(str.isdecimal, numbers)):
        declared["gpus"] = int(numbers[0]) * int(numbers[1])
    return workload._replace(**declared)


def _family(workload: Workload) -> str | None:
    """The published name of a log's model. Scripts call Llama 2 `maxtext`, and Nemotron-4
    `nemotron`."""
    plain = re.sub(r"[^a-z0-9]", "", workload.model or "")
    aliases = {"maxtext": "llama2", "nemotron": "nemotron4", "grok": "grok1"}
    names = {row.workload.replace(".", ""): row.workload for row in published.rows()}
    return names.get(aliases.get(plain, plain))


def _run(
    path: Path, steps: Steps, workload: Workload, sequences: int | None, tokens: int | None
) -> RunData:
    """A run with its published row, or the reason why it has none. `sequences` and `tokens` are
    those of the first step; None for what the log does not say."""
    family, (model, size, dtype, gpus) = _family(workload), workload
    run = RunData(
        path=path, recipe=f"{family or model or printable(path.stem)} {size or ''}".strip(),
        gpus=gpus, dtype=dtype, label="log", steps=steps, tokens=tokens,
        model=f"{family or model} {size}" if model else "",
        started=datetime.fromtimestamp(path.stat().st_mtime, UTC), dated="file time",
    )  # fmt: skip
    row = next((
        r for r in published.rows()
        if (r.workload, r.size, r.dtype, r.gpus) == (family, size, dtype, gpus)
        and r.gpu is hardware.H100  # no log names its GPU
    ), None)  # fmt: skip
    if row is None:
        unknown = [name for name, value in workload._asdict().items() if value is None]
        run.not_comparable.append(
            f"the log does not say its {', '.join(unknown)}"
            if unknown
            else f"nothing is published for {run.recipe} {dtype} on {counted(gpus)}"
        )
        return run
    run.tokens = tokens or (sequences or row.gbs) * row.seq_len
    if run.tokens != row.tokens_per_step:
        run.not_comparable.append(
            f"its step has {run.tokens} tokens, the published one {row.tokens_per_step}"
        )
        return run
    run.published = asdict(row)
    run.flops = {"published": row.flops_per_gpu}
    run.peak_tflops = hardware.H100.tflops.get(row.dtype)
    run.memory_limit = hardware.H100.memory
    return run
