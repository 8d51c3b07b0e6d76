"""The acceptance page of `jaxbench qualify`: nodes, collectives by number of nodes and by size,
rows, versions and a line to sign, in one HTML file. Needs no JAX."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxbench.base.errors import counted
from jaxbench.base.hardware import NULL
from jaxbench.check.judge import largest
from jaxbench.pages.charts import Chart, Label, empty_chart, three_digits
from jaxbench.pages.html import render

VERSIONS = {
    "jaxbench": "jaxbench", "commit": "commit", "python": "Python", "jaxlib": "jaxlib",
    "driver": "driver", "nvidia-nccl-cu13": "NCCL", "kernel": "Linux",
}  # fmt: skip
"""Settings of a host that the page shows, and their names there."""

Line = Mapping[str, Any]
"""A line of a check's `sizes`."""

UNITS = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB", 1: "B"}


def page(
    verdicts: Mapping[str, tuple[str, str]], hosts: Mapping[str, Mapping[str, Any]],
    reports: Sequence[Mapping[str, Any]], notes: Sequence[str], rows: Sequence[Mapping[str, Any]],
) -> str:  # fmt: skip
    """The page. `verdicts` are (verdict, why) by node, `hosts` what the nodes told, `reports` the
    check.json of all checks, the one of most nodes last, `notes` other findings, and `rows` the
    lines of rows (`report.formats.line`)."""
    counts = Counter(verdict for verdict, _ in verdicts.values())
    together: Mapping[str, Any] = next(
        (report for report in reversed(reports) if report["nodes"] > 1), {}
    )
    sizes, numbers = together.get("sizes") or [], by_nodes(reports)
    over = ""
    if together:
        over = f"{counted(together['devices'])} of {counted(together['nodes'], 'node')}"
    passed = sum(row["verdict"] == "pass" for row in rows)
    of_rows = f" {passed} of {counted(len(rows), 'row')} passed." if rows else ""
    return render(
        "acceptance.html",
        {"size": size},
        title="Acceptance of a cluster",
        headline=f"{counts['pass']} of {counted(len(verdicts), 'node')} passed, {counts['fail']} "
        f"failed, {counts['not reached']} not reached.{of_rows}",
        nodes=[(name, *verdicts[name], gpus(hosts.get(name, {}))) for name in verdicts],
        minutes=together.get("minutes") or 0,
        over=over,
        tables=[
            ("Largest collectives by number of nodes", numbers, charts(numbers, "nodes")),
            (f"Collectives over {over}", sizes, charts(sizes, "bytes")),
        ],
        notes=notes,
        rows=rows,
        versions={name: versions(hosts, key) for key, name in VERSIONS.items()},
        null=NULL if any(report.get("null") for report in reports) else "",
    )  # fmt: skip


def gpus(host: Mapping[str, Any]) -> tuple[str, str]:
    """The GPUs of a node by model, and their serial numbers."""
    every = host.get("gpus", {}).values()
    models = Counter(gpu["name"] for gpu in every if gpu.get("name"))
    serials = (str(gpu["serial"]) for gpu in every if gpu.get("serial"))
    return ", ".join(f"{n} x {name}" for name, n in models.items()), ", ".join(serials)


def versions(hosts: Mapping[str, Mapping[str, Any]], key: str) -> str:
    """A version of all nodes. If nodes differ, each version with its number of nodes."""
    found = Counter(str(value) for h in hosts.values() if (value := h["settings"].get(key)))
    if len(found) < 2:
        return "".join(found)
    return ", ".join(f"{value} on {counted(n, 'node')}" for value, n in found.most_common())


def size(number: int) -> str:
    """A number of bytes: `32 KiB`."""
    unit = next(unit for unit in UNITS if round(number / unit, 3) >= 1)
    return f"{number / unit:.4g} {UNITS[unit]}"


def by_nodes(reports: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The lines of the largest size, by collective and then by number of nodes (`nodes`)."""
    lines = [
        {**line, "nodes": report["nodes"]}
        for report in reports
        for line in largest(report.get("sizes") or ()).values()
    ]
    kinds = [*dict.fromkeys(line["collective"] for line in lines)]
    return sorted(lines, key=lambda line: kinds.index(line["collective"]))


def charts(lines: Sequence[Line], over: str) -> list[Chart]:
    """A chart of the busbw over bytes or nodes for each collective, with the expected one."""
    name, every = (size, 3) if over == "bytes" else (str, 1)
    drawn = []
    for kind in dict.fromkeys(line["collective"] for line in lines):
        some = [line for line in lines if line["collective"] == kind]
        if len(some) < 2:
            continue
        measured = [(line[over], line["busbw"]) for line in some]
        expected = [(line[over], line["expected"]) for line in some if line["expected"]]
        labels: list[Label] = [("ours", measured[-1][1], three_digits(measured[-1][1]))]
        if expected:
            text = f"expected {three_digits(expected[-1][1])}"
            labels.append(("published", expected[-1][1], text))
        described = ", ".join(f"{rate:.3g} at {name(at)}" for at, rate in measured)
        last = measured[-1][0]
        ticks = [(at, name(at)) for at, _ in measured[::-every] if at == last or 1.4 * at < last]
        chart = empty_chart(
            kind, f"busbw in GB/s: {described}", [at for at, _ in measured],
            [rate for _, rate in (*measured, *expected)], unit="busbw, GB/s", x_title=over,
            labels=labels, x_ticks=ticks, log=True, from_zero=True,
        )  # fmt: skip
        if expected:
            chart.line("published", expected)
        chart.line("ours", measured)
        chart.dots("ours", measured)
        drawn.append(chart)
    return drawn
