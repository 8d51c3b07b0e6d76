"""The page of `jaxbench compare`."""

from collections.abc import Iterator, Sequence

from jaxbench.base.errors import counted
from jaxbench.forecast.goodput import Goodput
from jaxbench.pages.charts import Bar, Chart, empty_chart, three_digits
from jaxbench.pages.html import render
from jaxbench.plan.compare_cells import Cell, Figures, as_table, train_state
from jaxbench.recipe.names import gpus_name

Series = dict[str, dict[int, float]]
"""Values by the name of a series and the number of GPUs."""

FAILING = ("Between failures", "Checkpoint", "Interval", "Restart", "Goodput, %")
"""Columns of the table from failures to goodput."""


def compare_page(
    model: str, tokens: float, cells: Sequence[Cell], goodput: Series, notes: Sequence[str]
) -> str:
    """The page of a comparison: its cells, curves of goodput by the failure rate that they assume,
    and `notes` on what the figures rest on."""
    amount = f"{tokens / 1e12:g} trillion"
    jobs = {(cell.gpus, cell.state_bytes): cell.goodput for cell in cells if cell.goodput}
    state = train_state(cells)
    on_curve = {gpus: job for (gpus, its), job in jobs.items() if its == state}
    lines = as_table(cells)
    return render(
        "compare.html",
        title=f"Comparison: {model}",
        headline=_compared(model, amount, cells),
        tokens=amount,
        headings=[*lines[0]],
        cells=[
            {
                "name": _name(cell),
                "marks": cell.marks,
                "about": _about(cell),
                "why": cell.why,
                "figures": line if cell.work else {},
                "rests": _rests(cell.figures) if cell.figures else "",
            }
            for cell, line in zip(cells, lines, strict=True)
        ],
        days=[_days(cell, cell.figures) for cell in cells if cell.figures],
        full=max((cell.figures.days_high for cell in cells if cell.figures), default=1.0),
        chart=_goodput_chart(goodput, on_curve) if goodput else None,
        failing=FAILING,
        goodputs={
            counted(gpus) + ("" if its == state else f", a state of {its / 2**30:.0f} GiB"):
            [*_failing(job)] for (gpus, its), job in sorted(jobs.items(), key=lambda item: item[0])
        },
        state=state,
        notes=notes,
    )  # fmt: skip


def _compared(model: str, amount: str, cells: Sequence[Cell]) -> str:
    """The headline: which cells are the fastest and the cheapest."""
    marked = {mark: cell for cell in cells for mark in cell.marks}
    fastest, cheapest = marked.get("fastest"), marked.get("cheapest")
    if not fastest or not fastest.figures:
        return f"{model} fits on none of these GPUs."
    taken = f"{three_digits(fastest.figures.days)} days on {_name(fastest)}, the fastest"
    days = f"{amount} tokens of {model} take {taken}"
    if not cheapest or not cheapest.figures or not cheapest.figures.cost:
        return f"{days}."
    cost = three_digits(cheapest.figures.cost)
    if cheapest is fastest:
        return f"{days} and the cheapest with a cost of {cost}."
    return f"{days}; {_name(cheapest)} are the cheapest with a cost of {cost}."


def _name(cell: Cell) -> str:
    return gpus_name(cell.gpus, cell.gpu)


def _days(cell: Cell, figures: Figures) -> Bar:
    """The bar of a cell's days."""
    css = "ours" if "fastest" in cell.marks else "part"
    name = _name(cell) + ("" if cell.fits else ", does not fit")
    days, ends = figures.days, (figures.days_low, figures.days_high)
    return Bar(css, name, 0.0, days, f"{three_digits(days)} days", whisker=ends)


def _about(cell: Cell) -> str:
    """What a cell is, in words."""
    if not (work := cell.work):
        return cell.recipe
    label = "" if work.label == "full" else f" ({work.label} row)"
    batch = f"{work.global_batch} x {work.sequence_length} tokens"
    return "; ".join(filter(None, [cell.recipe + label, work.mesh, batch, *work.set, cell.why]))


def _rests(figures: Figures) -> str:
    """What the step time of a cell rests on."""
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in figures.rests_on.items())
    assumed = f"{100 * figures.assumed_rates:.0f} % of the step rests on assumed rates"
    texts = [f"step: {shares}", assumed if figures.assumed_rates else ""]
    if figures.published_step_s and figures.published_gpu:
        published = f"published on {figures.published_gpu.upper()}: {figures.published_step_s} s"
        texts.append(f"{published} for the same work, by another program")
    return "; ".join(filter(None, texts))


def _failing(job: Goodput) -> Iterator[str]:
    """The columns `FAILING` of a job's goodput."""
    yield f"{three_digits(job.mtbf_s / 3600)} h"
    yield f"{three_digits(job.checkpoint_s)} s"
    yield f"{three_digits(job.interval_s / 60)} min"
    yield f"{three_digits(job.restart_s / 60)} min"
    yield f"{100 * job.share:.1f}"


def _goodput_chart(curves: Series, jobs: dict[int, Goodput]) -> Chart:
    """Goodput over numbers of GPUs. The first curve is the one that the comparison assumes; dots on
    it are its numbers of GPUs."""
    lines = [*zip(("ours", "other", "published"), curves.items(), strict=True)]
    labels = [(css, 100 * [*points.values()][-1], name) for css, (name, points) in lines]
    counts = [*next(iter(curves.values()))]
    described = "; ".join(
        f"{name}: " + ", ".join(f"{100 * points[n]:.1f} on {counted(n)}" for n in counts[::4])
        for name, points in curves.items()
    )
    chart = empty_chart(
        "Goodput", f"%. {described}", [*counts, *jobs], [0.0, 100.0], unit="%", x_title="GPUs",
        labels=labels, log=True, from_zero=True,
        x_ticks=[(n, f"{n:,}") for n in (10, 100, 1_000, 10_000, 100_000)],
    )  # fmt: skip
    for css, (_, points) in lines:
        chart.line(css, [(n, 100 * share) for n, share in points.items()])
    chart.dots("ours", [(gpus, 100 * job.share) for gpus, job in sorted(jobs.items())])
    return chart
