"""The cells of `jaxbench compare`, and the columns that its table and its page show of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxbench.forecast.goodput import Goodput
from jaxbench.pages.charts import three_digits
from jaxbench.plan.plan import Plan
from jaxbench.plan.text import in_gib


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a cell's forecast says about some number of tokens.

    `days` include the time that failures and checkpoints cost. `cost` is in the currency of the
    price of a GPU-hour. `mwh` is the energy of GPUs that draw their highest power all the time.
    Both are None if price or power is not known. `low` and `high` are the ends of a 90 % interval.
    `rests_on` has shares of the step by what they rest on, `assumed_rates` the share whose rate was
    not measured.
    """

    step_s: float
    low_s: float
    high_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None
    days: float
    days_low: float
    days_high: float
    gpu_hours: float
    cost: float | None
    mwh: float | None
    rests_on: dict[str, float]
    assumed_rates: float
    published_step_s: float | None
    published_gpu: str | None


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """The row of a cell that was compiled. `headroom` is the memory of a GPU, in bytes, that the
    step leaves; it is negative if the row does not fit."""

    precision: str
    label: str
    mesh: str
    set: list[str]
    global_batch: int
    sequence_length: int
    headroom: int

    @classmethod
    def of(cls, plan: Plan) -> "PlannedRow":
        settings, size = plan.settings, plan.bytes_per_device
        return cls(
            precision=settings["precision"]["dtype"],
            label=settings["label"],
            mesh=plan.mesh,
            set=[*settings["overrides"]],
            global_batch=settings["batch"]["global_batch"],
            sequence_length=settings["batch"]["sequence_length"],
            headroom=size.limit - size.peak,
        )


@dataclass(kw_only=True)
class Cell:
    """A GPU and a number of GPUs. `why` says why it has no `work` or no `figures`, or why it does
    not fit. `state_bytes` is the train state of the whole job. `marks` say in what it is best."""

    gpu: str
    gpus: int
    recipe: str
    why: str = ""
    state_bytes: int = 0
    goodput: Goodput | None = None
    work: PlannedRow | None = None
    figures: Figures | None = None
    marks: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.figures is not None and not self.why


def train_state(cells: Sequence[Cell]) -> int:
    """Bytes of the train state of the first cell that was compiled; 0 if none was."""
    return next((cell.state_bytes for cell in cells if cell.work), 0)


def mark(cells: Sequence[Cell]) -> None:
    """Marks the cells with the fewest days and with the lowest cost, among those that fit. No cell
    is the cheapest if the cost of another one is unknown."""
    for name, figure in (("fastest", "days"), ("cheapest", "cost")):
        values = {i: getattr(cell.figures, figure) for i, cell in enumerate(cells) if cell.fits}
        if values and None not in values.values():
            cells[min(values, key=values.__getitem__)].marks.append(name)


Text = tuple[str, str]
"""A figure and its interval, both as texts and empty if there is none."""


def _within(low: float, high: float) -> str:
    return f"{three_digits(low)} to {three_digits(high)}"


def _known(value: float | None) -> str:
    return "" if value is None else three_digits(value)


COLUMNS: dict[str, Callable[[Figures], Text]] = {
    "Step, s": lambda f: (three_digits(f.step_s), _within(f.low_s, f.high_s)),
    "Tokens/s/GPU": lambda f: (f"{f.tokens_per_s_per_gpu:,.0f}", ""),
    "MFU, %": lambda f: ("" if f.mfu is None else f"{100 * f.mfu:.1f}", ""),
    "Days": lambda f: (three_digits(f.days), _within(f.days_low, f.days_high)),
    "GPU-hours": lambda f: (three_digits(f.gpu_hours), ""),
    "Cost": lambda f: (_known(f.cost), ""),
    "MWh": lambda f: (_known(f.mwh), ""),
}
"""Columns of figures."""


def as_table(cells: Sequence[Cell]) -> list[dict[str, Text]]:
    """The texts of each cell by column. A cell without a figure has empty texts, and a column that
    would be empty in all cells is left out."""
    lines = []
    for cell in cells:
        line = {
            name: column(cell.figures) if cell.figures else ("", "")
            for name, column in COLUMNS.items()
        }
        line["Free, GiB"] = (in_gib(cell.work.headroom) if cell.work else "", "")
        line["Goodput, %"] = (f"{100 * cell.goodput.share:.1f}" if cell.goodput else "", "")
        lines.append(line)
    names = [name for name in lines[0] if any(line[name][0] for line in lines)]
    return [{name: line[name] for name in names} for line in lines]
