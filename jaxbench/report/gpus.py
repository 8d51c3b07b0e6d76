"""Compares the GPUs of a run, from its record: which GPU is slower than the others, and a picture
of all GPUs by node."""

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxbench.base.errors import listed
from jaxbench.base.outliers import GPU_SPREAD, STEP_SPREAD, outliers
from jaxbench.base.quantity import figure
from jaxbench.pages.charts import CHARACTER

MOST_NODES = 64
"""The most nodes of a picture. Nodes with the slowest GPUs come first."""

CELL, ROW, CHARACTERS = 26, 16, 20
"""The width and height of a cell of a picture (`page.css` has the height too), and the most
characters of a node's name there."""

LABELLED = 2
"""The most outliers of a node that a picture labels. It counts the others."""

MOST_ECC = 4
"""The most GPUs with ECC errors that a sentence names. It counts the others."""


@dataclass(frozen=True, kw_only=True)
class RunGpu:
    """A GPU of a run, by its node, rank and number. The number is NVML's, or without telemetry the
    number among the rank's GPUs. What is not recorded is None.

    `clock` is its mean clock under load over its highest clock. `wait` is the time for which its
    process waits for it, over the step. `products_s` is the time that it takes for some matmuls
    alone. The last two are numbers of ECC errors during training.
    """

    node: str
    rank: int
    number: int
    clock: float | None
    power_w: float | None
    products_s: float | None
    wait: float | None
    wait_s: float | None
    corrected: float | None
    uncorrected: float | None

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}, GPU {self.number}"


def gpus(record: dict[str, Any]) -> list[RunGpu]:
    """The GPUs of a record, by rank. Malformed entries are left out."""
    ranks = record.get("ranks")
    found = [gpu for rank in (ranks if isinstance(ranks, list) else ()) for gpu in _of_rank(rank)]
    return sorted(found, key=lambda gpu: (gpu.rank, gpu.number))


def _of_rank(rank: Any) -> Iterator[RunGpu]:
    if not isinstance(rank, dict) or (rank_number := figure(rank, "rank")) is None:
        return
    telemetry, products = (
        rank[key] if isinstance(rank.get(key), list) else [] for key in ("gpus", "products_s")
    )
    wait_s, step_s = figure(rank, "wait_s"), figure(rank, "step_time_s", "mean")
    for n in range(max(len(telemetry), len(products), 1)):
        gpu = telemetry[n] if n < len(telemetry) else {}
        number = figure(gpu, "gpu")
        yield RunGpu(
            node=str(rank.get("host")), rank=int(rank_number),
            number=n if number is None else int(number),
            clock=figure(gpu, "clock_ratio"), power_w=figure(gpu, "power_w"),
            products_s=figure(dict(enumerate(products)), n), wait_s=wait_s,
            wait=wait_s / step_s if wait_s is not None and step_s else None,
            corrected=figure(gpu, "ecc_corrected"), uncorrected=figure(gpu, "ecc_uncorrected"),
        )  # fmt: skip


def slowdowns(every: Sequence[RunGpu], outlying: bool = True) -> dict[RunGpu, float]:
    """The time of each GPU over the time of the typical one, by its clock or by its matmuls alone,
    whichever is larger. It is 1 if the GPU is no outlier. Without `outlying`, every clock
    below the typical one counts, since it is a mean of many samples."""
    times = {gpu: 1 / gpu.clock for gpu in every if gpu.clock}
    typical = statistics.median(times.values() or [1.0])
    by_clock = outliers(times, GPU_SPREAD) if outlying else {g: times[g] / typical for g in times}
    by_matmuls = outliers({gpu: gpu.products_s for gpu in every if gpu.products_s}, GPU_SPREAD)
    return {gpu: max(1.0, by_clock.get(gpu, 1.0), by_matmuls.get(gpu, 1.0)) for gpu in every}


def least_wait(every: Sequence[RunGpu]) -> tuple[RunGpu, float] | None:
    """The process that waits least for its devices, because its host is late: one of its GPUs, and
    by how many seconds its wait is shorter than the typical wait. The seconds are 0 if it is no
    outlier. None if there is only one process."""
    some = {gpu.rank: gpu for gpu in every}
    waits = {gpu: gpu.wait_s for gpu in some.values() if gpu.wait_s is not None}
    if len(waits) < 2:
        return None
    least = min(waits, key=lambda gpu: waits[gpu])
    late = least in outliers(waits, STEP_SPREAD, low=True)
    return least, statistics.median(waits.values()) - waits[least] if late else 0.0


def slow_gpu(gpu: RunGpu, factor: float) -> str:
    """How slow a GPU is."""
    return f"{gpu}: {factor:.3f} times the typical GPU's time"


def late_host(gpu: RunGpu, seconds: float) -> str:
    """How much less a process waits than the others."""
    return f"rank {gpu.rank} on {gpu.node} waits {seconds:.3f} s less than the typical process"


def slow_nodes(every: Sequence[RunGpu]) -> dict[str, str]:
    """For each slow node the reason: its slowest GPU, or the process that waits least."""
    late, factors = least_wait(every), slowdowns(every)
    why = {late[0].node: late_host(*late)} if late and late[1] else {}
    slow = sorted((gpu for gpu in every if factors[gpu] > 1), key=lambda gpu: factors[gpu])
    return why | {gpu.node: slow_gpu(gpu, factors[gpu]) for gpu in slow}


class Quantity(NamedTuple):
    """A quantity that some GPUs of a run have, and those of them whose value is an outlier, the
    lowest value first."""

    title: str
    unit: str
    values: dict[RunGpu, float]
    outlying: list[RunGpu]


def _quantity(
    title: str, unit: str, values: Mapping[RunGpu, float | None], outlying: Collection[RunGpu]
) -> Quantity:
    """A quantity from the values of all GPUs, None where it is not recorded."""
    known = {gpu: value for gpu, value in values.items() if value is not None}
    bad = sorted((gpu for gpu in known if gpu in outlying), key=lambda gpu: known[gpu])
    return Quantity(title, unit, known, bad)


def _quantities(every: Sequence[RunGpu]) -> Iterator[Quantity]:
    """What we compare GPUs by."""
    slow_clocks = outliers({gpu: 1 / gpu.clock for gpu in every if gpu.clock}, GPU_SPREAD)
    clocks = {gpu: _percent(gpu.clock) for gpu in every}
    yield _quantity("SM clock under load", "% of the highest", clocks, slow_clocks)

    low_powers = outliers({gpu: 1 / gpu.power_w for gpu in every if gpu.power_w}, GPU_SPREAD)
    powers = {gpu: gpu.power_w for gpu in every}
    yield _quantity("power under load", "W", powers, low_powers)

    seconds = {gpu: gpu.products_s for gpu in every if gpu.products_s}
    fastest = min(seconds.values(), default=0.0)
    speeds = {gpu: _percent(fastest / s) for gpu, s in seconds.items()}
    slow = outliers(seconds, GPU_SPREAD)
    yield _quantity("speed of matmuls alone", "% of the fastest", speeds, slow)

    late = least_wait(every)
    waiting = [gpu for gpu in every if late and late[1] and gpu.rank == late[0].rank]
    waits = {gpu: _percent(gpu.wait) for gpu in every}
    yield _quantity("wait for the device", "% of the step", waits, waiting)


def heat_maps(every: Sequence[RunGpu]) -> tuple[list[dict[str, Any]], list[str]]:
    """The GPUs by node: a picture for each quantity with an outlier, and a sentence for each
    quantity without one. A quantity that fewer than two GPUs have has neither."""
    pictures, sentences = [], []
    for quantity in _quantities(every):
        if len(quantity.values) < 2:
            continue
        if quantity.outlying:
            pictures.append(_heat_map(quantity, _nodes(every)))
        else:
            values, unit = quantity.values.values(), quantity.unit
            least, most = f"{min(values):.1f}", f"{max(values):.1f}"
            spread = f"{least} {unit} everywhere" if least == most else f"{least} to {most} {unit}"
            sentences.append(f"{quantity.title}: {spread}")
    return pictures, sentences


def ecc_errors(every: Sequence[RunGpu]) -> list[str]:
    """A sentence for uncorrected and one for corrected ECC errors, which names the GPUs that had
    some, those with the most first."""
    uncorrected = {gpu: gpu.uncorrected for gpu in every if gpu.uncorrected}
    corrected = {gpu: gpu.corrected for gpu in every if gpu.corrected}
    sentences = []
    for kind, counts in (("uncorrected", uncorrected), ("corrected", corrected)):
        worst = sorted(counts, key=lambda gpu: -counts[gpu])
        if texts := [f"{gpu}: {counts[gpu]:.0f}" for gpu in worst]:
            sentences.append(f"{kind} ECC errors: {listed(texts, MOST_ECC, '; ')}")
    return sentences


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _nodes(every: Sequence[RunGpu]) -> dict[str, list[RunGpu]]:
    """GPUs by node. All nodes are in their order; if there are too many, only the slowest, with the
    slowest first."""
    nodes: dict[str, list[RunGpu]] = defaultdict(list)
    for gpu in every:
        nodes[gpu.node].append(gpu)
    if len(nodes) > MOST_NODES:
        slow = slowdowns(every)

        def key(item: tuple[str, list[RunGpu]]) -> tuple[float, float]:
            return -max(slow[g] for g in item[1]), min((g.wait or 0.0) for g in item[1])

        nodes = dict(sorted(nodes.items(), key=key)[:MOST_NODES])
    return nodes


def _heat_map(quantity: Quantity, nodes: dict[str, list[RunGpu]]) -> dict[str, Any]:
    """A picture: its cells, which are thick lines, one path for normal ones and one for outliers;
    the nodes' names and the labels of the outliers; and what it says in words."""
    known, bad = quantity.values, quantity.outlying
    names = [name if len(name) <= CHARACTERS else f"..{name[2 - CHARACTERS :]}" for name in nodes]
    start = 8 + CHARACTER * max(map(len, names))
    end = start + CELL * max(map(len, nodes.values()))
    cells = {"normal": "", "outlier": ""}
    labels = []
    for row, gpus_of_node in enumerate(nodes.values()):
        for column, gpu in enumerate(gpus_of_node):
            if gpu in known:
                css = "outlier" if gpu in bad else "normal"
                cells[css] += f"M{start + CELL * column},{ROW * row + 8}h{CELL - 1}"
        if found := [f"GPU {g.number}: {known[g]:.1f}" for g in gpus_of_node if g in bad]:
            labels.append((ROW * row + 12, listed(found, LABELLED)))
    normal = [value for gpu, value in known.items() if gpu not in bad]
    others = f"; the others: {min(normal):.1f} to {max(normal):.1f}" if normal else ""
    outlying = (f"{gpu}: {known[gpu]:.1f}" for gpu in bad)
    return {
        "title": quantity.title, "unit": quantity.unit,
        "cells": cells, "labels": labels, "end": end + 4,
        "names": [(ROW * row + 12, name) for row, name in enumerate(names)],
        "width": end + 4 + CHARACTER * max((len(text) for _, text in labels), default=0),
        "height": ROW * len(nodes), "says": listed(outlying, LABELLED, "; ") + others,
    }  # fmt: skip
