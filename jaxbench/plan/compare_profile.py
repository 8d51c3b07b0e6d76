"""`jaxbench plan --profile DIR`: compares a profiled step with the forecast of its program.

The folder has a JAX profile of one process on GPUs. `train --profile jax` writes it, together with
the program and, two folders up, the run's record. Both times of a kernel include the slowdown by
collectives that run at the same time. Both times of a collective include its wait for other ranks.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from jaxbench.base.errors import RecipeError, counted
from jaxbench.base.files import write_json
from jaxbench.base.hardware import NULL, Gpu, identify, is_null, placed
from jaxbench.base.untrusted import read_json
from jaxbench.forecast import tables
from jaxbench.forecast.costs import Measured
from jaxbench.forecast.tables import Tables
from jaxbench.jax_internals import profile_events, profiled_instruction
from jaxbench.plan.compiled_step import axes_of
from jaxbench.plan.hlo_file import joined, parse, whole_text
from jaxbench.recipe.settings import AXES
from jaxbench.results.plans import part_name
from jaxbench.results.profiled import COMPARED, WAITS, Compared, Difference, Part
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import PROFILED, Work, display_name
from jaxbench.xla.memory import readable
from jaxbench.xla.schedule import Walk
from jaxbench.xla.timeline import KERNELS, Kernel, Repeated, Schedule, Span

LARGEST = 10
"""The number of differences of single kernels that we list."""

GAPS, UNKNOWN = "nothing runs", "kernels without an instruction"
SLOWED = "slowed by collectives, in loops"
"""Parts of a step besides `WAITS` and the kernels by what they are. The first two occur only in a
profile, the third only in a forecast."""

Seconds = defaultdict[str, list[float]]
"""Measured and forecast seconds per step by the name of a part."""


@dataclass
class Expected:
    """An instruction in the expected step: its seconds and launches per step, and its cause."""

    cause: Kernel | Collective | None
    stream: str
    seconds: float = 0.0
    runs: int = 0


@dataclass
class Profile:
    """The launches on one GPU: (start, seconds) by instruction. The name is empty if the profile
    has none."""

    folder: Path
    launches: dict[str, list[tuple[float, float]]]

    @property
    def duration_s(self) -> float:
        """Seconds from the first launch to the end of the last."""
        every = [launch for launches in self.launches.values() for launch in launches]
        return max(start + s for start, s in every) - min(start for start, _ in every)

    def busy_s(self, names: set[str]) -> float:
        """Seconds in which at least one launch of these instructions runs."""
        total, free_at = 0.0, 0.0
        for start, seconds in sorted(x for name in names for x in self.launches.get(name, ())):
            total += max(0.0, start + seconds - max(start, free_at))
            free_at = max(free_at, start + seconds)
        return total


def read_profile(folder: Path) -> Profile:
    """The first GPU's launches in a JAX profile. Raises RecipeError if there are none."""
    launches: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in profile_events(folder, fallback=False):
        interval = event.start_ns / 1e9, event.duration_ns / 1e9
        launches[profiled_instruction(event)].append(interval)
    if not launches:
        raise RecipeError(
            f"--profile: {folder} has no profile of a GPU; expected the folder of one process, "
            "such as RUN/profile/rank-0 of train --profile jax"
        )
    return Profile(folder, dict(launches))


def by_instruction(schedule: Schedule) -> dict[str, Expected]:
    """The expected seconds and launches per step of each instruction."""
    found: dict[str, Expected] = {}

    def add(spans: Sequence[Span | Repeated], runs: int) -> None:
        for entry in spans:
            if isinstance(entry, Repeated):
                add(entry.spans, runs * entry.times)
                continue
            line = found.setdefault(entry.name, Expected(entry.cause, entry.stream))
            line.seconds += runs * entry.seconds
            line.runs += runs * entry.launches

    add(schedule.spans, 1)
    return found


def read(folder: Path, hlo: Path | None, gpu: Gpu | None, kernels: Path | None) -> Compared:
    """Compares the profile in a folder with the forecast of its program, and writes the comparison
    into the folder.

    The program is in the file `hlo`, or in the folder. If `gpu` is None, the run's record says
    which GPU it was. Measurements in `kernels` take precedence (`forecast.tables`). Raises
    RecipeError for a missing file and an unknown GPU.
    """
    device, sizes = _record(folder)
    gpu = gpu or identify(device)
    if gpu is None or gpu.chip is None:
        raise RecipeError(
            f"--profile: {folder} is from a run on an unknown GPU; name one with --gpu"
        )
    path = hlo or folder / PROFILED
    _, program = parse(path, "--profile")
    gpu, axes = placed(gpu, program.devices), joined
    if sizes:
        axes = partial(axes_of, mesh_shape=sizes)
    profile = read_profile(folder)
    with whole_text(path, "--profile"):
        times = tables.load(gpu.name.lower(), kernels)
        compared = compare(profile, Walk(program), gpu, times, axes)
    if is_null(device):
        compared = replace(compared, remark=NULL)
    write_json(folder / COMPARED, compared)
    return compared


def _record(folder: Path) -> tuple[str, tuple[int, ...]]:
    """The device and the mesh of the run that was profiled; empty if no record has them."""
    try:
        record = read_json(folder.absolute().parents[1] / "run.json")
        sizes = record["recipe"]["parallelism"]
        return str(record["hardware"]["device"]), tuple(int(sizes[axis]) for axis in AXES)
    except (OSError, ValueError, LookupError, TypeError):
        return "", ()


def compare(
    profile: Profile, walk: Walk, gpu: Gpu, times: Tables, axes: Callable[[Collective], str]
) -> Compared:
    """Compares a profile with the forecast of its program. `axes` names what a collective crosses.
    Raises RecipeError if the profile is not of this program."""
    schedule = walk.under(Measured(gpu, times))
    expected = by_instruction(schedule)
    steps = _steps(profile, expected)
    measured = {
        name: sum(s for _, s in profile.launches[name]) / steps for name in profile.launches
    }
    kernels: Seconds = defaultdict(lambda: [0.0, 0.0])
    links: Seconds = defaultdict(lambda: [0.0, 0.0])
    for name, line in expected.items():
        part = (kernels if line.stream == KERNELS else links)[_part(line, axes)]
        part[0] += measured.get(name, 0.0)
        part[1] += line.seconds
    computing = {name for name, line in expected.items() if line.stream == KERNELS}
    other = set(profile.launches) - expected.keys()
    kernels[UNKNOWN] = [sum(measured[name] for name in other), 0.0]
    step_s, busy_s = profile.duration_s / steps, profile.busy_s(computing | other) / steps
    any_s = profile.busy_s(set(profile.launches)) / steps
    kernels[WAITS] = [any_s - busy_s, schedule.exposed_s]
    kernels[GAPS] = [step_s - any_s, 0.0]
    kernel_s = sum(expected[name].seconds for name in computing)
    return Compared(
        profile=str(profile.folder),
        gpu=gpu.name.lower(),
        devices=walk.program.devices,
        steps=steps,
        measured_s=step_s,
        forecast_s=schedule.step_s,
        kernels=_parts(kernels),
        links=_parts(links),
        largest=sorted(_differences(expected, measured), key=lambda d: -abs(d.longer_s))[:LARGEST],
        found=sum(expected[name].seconds for name in computing & measured.keys()) / kernel_s,
    )


def _parts(seconds: Seconds) -> list[Part]:
    """The parts that take any time."""
    return [
        Part(name=name, measured_s=measured, forecast_s=forecast)
        for name, (measured, forecast) in seconds.items()
        if measured or forecast
    ]


def _part(line: Expected, axes: Callable[[Collective], str]) -> str:
    if isinstance(line.cause, Kernel):
        return part_name(line.cause.part)
    if line.cause is None:
        return SLOWED if line.stream == KERNELS else f"copy {line.stream}"
    return f"{line.cause.kind} over {axes(line.cause)}"


def _steps(profile: Profile, expected: dict[str, Expected]) -> int:
    """The number of steps in a profile. For each instruction we divide its launches in the profile
    by its launches in a step, and take the median."""
    ratios = [
        len(profile.launches[name]) / line.runs
        for name, line in expected.items()
        if line.runs and name in profile.launches
    ]
    if not ratios:
        raise RecipeError(
            f"--profile: {profile.folder} has no instruction of this program; expected the program "
            f"that was profiled: {PROFILED} in a folder of train --profile jax, or --hlo"
        )
    return max(1, round(statistics.median(ratios)))


def _differences(expected: dict[str, Expected], measured: dict[str, float]) -> Iterator[Difference]:
    for name, line in expected.items():
        if name in measured and line.runs:
            cause = line.cause
            work = cause.works[0] if isinstance(cause, Kernel) and cause.works else None
            source = readable(cause.source, name) if isinstance(cause, Kernel) else ""
            yield Difference(
                name=name, measured_s=measured[name], forecast_s=line.seconds, source=source,
                sizes=_sizes(work) if work else "", runs=line.runs,
            )  # fmt: skip


def _sizes(work: Work) -> str:
    return f"{display_name(work.kind)} {work.dtype} {'x'.join(map(str, work.sizes))}"


def report(compared: Compared) -> str:
    """The comparison as text."""
    step = Part(name="step", measured_s=compared.measured_s, forecast_s=compared.forecast_s)
    head = f"{'':34}{'measured s':>12}{'forecast s':>12}{'difference s':>14}"
    lines = [
        f"{compared.profile}: {counted(compared.steps, 'step')} on the first of {compared.devices} "
        f"x {compared.gpu.upper()}",
        *filter(None, [compared.remark]),
        "the profile has the instructions that take "
        f"{100 * compared.found:.1f} % of the forecast's kernel seconds",
        "", head,
        *map(_line, [*compared.kernels, step]),
        "", "collectives and copies, which run next to kernels", *map(_line, compared.links),
        "", f"the {len(compared.largest)} largest differences; runs per step x us per run",
    ]  # fmt: skip
    for entry in compared.largest:
        both = (f"{1e6 * s / entry.runs:.1f}" for s in (entry.measured_s, entry.forecast_s))
        what = f": {entry.what}" if entry.what else ""
        lines.append(f"{_line(entry)}  {entry.runs} x {' and '.join(both)}{what}")
    return "\n".join(lines)


def _line(part: Part) -> str:
    return f"{part.name:34}{part.measured_s:12.6f}{part.forecast_s:12.6f}{part.longer_s:+14.6f}"
