"""`jaxbench plan --trace FILE`: the step that a forecast expects, in Chrome's trace format, for
Perfetto.

There is one slice for each launch of a kernel, collective or copy, and one for each wait. Loops are
unrolled as in a profile. Kernels, including their slowdown by collectives, and waits fill the step
without gaps or overlaps. Collectives are on their links. Copies to and from the host are on
streams of their own. If slices overlap, a stream has several lanes.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxbench.base.files import write_whole
from jaxbench.base.hardware import Gpu
from jaxbench.forecast.forecast import expected_schedule
from jaxbench.forecast.tables import Tables
from jaxbench.xla import host_copies
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import Program
from jaxbench.xla.memory import readable
from jaxbench.xla.schedule import Walk
from jaxbench.xla.timeline import EXPOSED, KERNELS, LINKS, Kernel, Repeated, Slice

STREAMS = (
    KERNELS,
    EXPOSED,
    LINKS[False],
    LINKS[True],
    host_copies.TO_HOST,
    host_copies.FROM_HOST,
)
"""In the order in which we show them."""

Axes = Callable[[Collective], str]


def write_trace(
    path: Path, title: str, program: Program, gpu: Gpu, tables: Tables, axes: Axes
) -> None:
    """Writes the trace of a program on a GPU. `axes` names what a collective crosses."""
    schedule = expected_schedule(Walk(program), gpu, tables)
    title = f"{title}: forecast {schedule.step_s:.3f} s, not measured"
    content = {"displayTimeUnit": "ms", "traceEvents": events(title, schedule.slices, axes)}
    write_whole(path, json.dumps(content, separators=(",", ":")))


def unrolled(slices: Sequence[Slice | Repeated], start_s: float = 0.0) -> Iterator[Slice]:
    """Every slice of every iteration, with times from the start of the step."""
    for entry in slices:
        if isinstance(entry, Slice):
            yield replace(entry, start_s=start_s + entry.start_s)
        else:
            for n in range(entry.times):
                yield from unrolled(entry.slices, start_s + entry.start_s + n * entry.seconds)


def events(title: str, slices: Sequence[Slice | Repeated], axes: Axes) -> list[dict[str, Any]]:
    """The events of a trace: names of its lanes, and complete events in microseconds."""
    by_stream: defaultdict[str, list[Slice]] = defaultdict(list)
    for entry in unrolled(slices):
        by_stream[entry.stream].append(entry)
    found: list[dict[str, Any]] = []
    lanes: list[str] = []
    for stream in STREAMS:
        ends: list[int] = []  # of the lanes of this stream, in nanoseconds
        first = len(lanes)
        for entry in sorted(by_stream[stream], key=lambda entry: entry.start_s):
            begin, end = round(entry.start_s * 1e9), round((entry.start_s + entry.seconds) * 1e9)
            lane = next((n for n, free_at in enumerate(ends) if free_at <= begin), len(ends))
            ends[lane : lane + 1] = [end]
            found.append(_event(entry, axes, first + lane, begin, end))
        lanes += [stream if n == 0 else f"{stream} ({n + 1})" for n in range(len(ends))]
    named = [_name("process_name", title, 0)] + [
        event
        for tid, lane in enumerate(lanes)
        for event in (_name("thread_name", lane, tid), _name("thread_sort_index", tid, tid))
    ]
    return named + found


def _name(what: str, value: str | int, tid: int) -> dict[str, Any]:
    """The event that names a lane or the whole trace, or that orders lanes."""
    key = "sort_index" if what == "thread_sort_index" else "name"
    return {"ph": "M", "pid": 0, "tid": tid, "name": what, "args": {key: value}}


def _event(entry: Slice, axes: Axes, tid: int, begin: int, end: int) -> dict[str, Any]:
    """A complete event for a slice, between two times in nanoseconds."""
    cause, stream = entry.cause, entry.stream
    name, category = (f"copy {stream}", stream) if entry.launches else ("slowed", "slowed")
    arguments: dict[str, Any] = {"hlo": entry.name, "launches": entry.launches}
    if cause is not None:
        arguments["bytes"] = cause.bytes
    if isinstance(cause, Kernel):
        name, category = readable(cause.source, entry.name), cause.part
        if flops := sum(work.flops for work in cause.works):
            arguments["TFLOP"] = flops / 1e12
    elif isinstance(cause, Collective):
        name, category = f"{cause.kind} over {axes(cause)}", "collective"
    if stream == EXPOSED:
        name, category = f"wait for {name if cause else entry.name}", stream
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return {"ph": "X", "pid": 0, "tid": tid, "name": name, "cat": category, **times,
            "args": arguments}  # fmt: skip
