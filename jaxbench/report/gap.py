"""The gap between a measured step and the published or forecast one. It is divided into parts with
a recorded cause, and a rest."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxbench.report.gpus import gpus, late_host, least_wait, slow_gpu, slowdowns
from jaxbench.report.runs import Result, RunData

CLOCKED = ("matmuls", "attention", "scan")
"""Parts of a plan (`plans.part_name`) whose time is inverse to the clock of the multiprocessors."""

REMAINS = "what remains"

MENTIONED = 0.05
"""The line of a slow run leaves out parts that are a smaller share of the gap."""


class Part(NamedTuple):
    """A part of a gap: its name and seconds, the evidence, and the culprit in a few words."""

    name: str
    seconds: float
    why: str
    culprit: str


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The seconds by which a measured step is longer than the reference step, whose `kind` is
    published or forecast. The parts add up to it. The last one is what no record explains. It is
    negative if the others overlap, or if the reference itself had some of them."""

    kind: str
    reference_s: float
    measured_s: float
    parts: list[Part]

    @property
    def seconds(self) -> float:
        """The whole gap."""
        return self.measured_s - self.reference_s

    def text(self) -> str:
        """The gap in one line for people, with its largest part first."""
        parts = sorted(self.parts, key=lambda part: -part.seconds)
        listed = ", ".join(
            f"{part.culprit} ({part.seconds:+.3f} s)"
            for part in parts
            if abs(part.seconds) >= MENTIONED * self.seconds
        )
        share = 100 * self.seconds / self.reference_s
        return f"{share:.1f} % slower than {self.kind} ({self.seconds:+.3f} s): {listed}"


def explain(result: Result) -> Gap | None:
    """The gap of a complete run to the published step if we may compare them, else to the plan's
    forecast. None if there is neither. If the data of a part are missing, the part is missing
    too."""
    run, mean = result.run, result.counted_s
    if mean is None:
        return None
    if result.verdict.ratio is not None and run.published:
        kind, reference = "published", run.published["step_time_s"]
    elif run.plan is not None:
        kind, reference = "forecast", run.plan.step_s
    else:
        return None
    parts = [*_devices(run), *_links(run), *_host(result)]
    rest = mean - reference - sum(part.seconds for part in parts)
    why = "the program, its kernels, links, and what was not recorded"
    parts.append(Part(REMAINS, rest, why, "parts overlap" if rest < 0 else "not explained"))
    return Gap(kind=kind, reference_s=reference, measured_s=mean, parts=parts)


def clocked_s(run: RunData) -> tuple[float, float, str]:
    """The seconds of a step that depend on the clock: at the highest clock, as expected under load,
    and what they are.

    With a plan they are its arithmetic at the GPU's peak, and its matmuls, attention and scan,
    whose rates are those under the power limit. Without a plan both are the model's FLOPs at the
    peak.
    """
    if run.plan is not None and (seconds := sum(run.plan.parts.get(name, 0) for name in CLOCKED)):
        at_peak = run.plan.at_peak_s or 0.0
        return at_peak, seconds, f"{at_peak:.3f} s at the peak, {seconds:.3f} s in the forecast"
    if run.flops and run.peak_tflops:
        seconds = min(run.flops.values()) / run.peak_tflops / 1e12
        return seconds, seconds, f"at least {seconds:.3f} s, the model's FLOPs at the peak"
    return 0.0, 0.0, ""


def _devices(run: RunData) -> Iterator[Part]:
    """The parts of clocks and slow ranks. First comes what the clock of the typical GPU costs
    beyond what is expected under load. Beyond it comes the slowest GPU, for which all others wait,
    or the process with the least wait, for which its GPUs wait."""
    every = gpus(run.record)
    at_peak, seconds, of = clocked_s(run)
    clocks = [gpu.clock for gpu in every if gpu.clock]
    if clocks and seconds:
        slower = statistics.median(1 / clock for clock in clocks)  # as in `slowdowns`
        lost = max(0.0, at_peak * slower - seconds)
        percent = f"{100 / slower:.1f} %"
        why = f"{percent} of the highest clock, during {of}"
        yield Part("clocks", lost, why, f"clocks at {percent}")
        seconds += lost
    slow: list[tuple[float, str, str]] = []
    if clocks or any(gpu.products_s for gpu in every):
        factors = slowdowns(every, outlying=False)
        worst = max(factors, key=lambda gpu: factors[gpu])
        lost = seconds * (factors[worst] - 1)
        name = f"GPU {worst.number} of {worst.node}"
        slow.append((lost, slow_gpu(worst, factors[worst]), name))
    if late := least_wait(every):
        slow.append((late[1], late_host(*late), f"late process on {late[0].node}"))
    if slow:
        lost, why, culprit = max(slow)
        yield Part("slow ranks", lost, why if lost else "none is an outlier", culprit)


def _links(run: RunData) -> Iterator[Part]:
    """The part of collectives and copies for which kernels wait longer than in the forecast of the
    profiled program. Among several ranks the one with the least additional wait counts, since the
    others wait for it too."""
    waits = [(part, compared.rank) for compared in run.profiles if (part := compared.waits)]
    if waits:
        part, rank = min(waits, key=lambda wait: wait[0].longer_s)
        why = (
            f"{rank} waits {part.measured_s:.3f} s for collectives and copies in its profile, "
            f"{part.forecast_s:.3f} s in the forecast"
        )
        yield Part("exposed communication", part.longer_s, why, "waiting for links")


def _host(result: Result) -> Iterator[Part]:
    """The time that the first process adds to steps, by compiling and by writing records. It counts
    if the process takes longer than a step between two steps."""
    first, last = result.window
    steps = {n: s for n, s in result.run.steps.seconds.items() if first <= n <= last}
    recorded = {n: result.run.host_s[n] for n in steps if n in result.run.host_s}
    if not recorded:
        return
    typical, count = statistics.median(steps.values()), len(steps)
    lost = {n: max(0.0, min(host, steps[n]) - typical) for n, (host, _) in recorded.items()}
    compiled = {n: min(recorded[n][1], seconds) for n, seconds in lost.items()}
    late, compiling = (sum(s > 0 for s in part.values()) for part in (lost, compiled))
    why = f"a record took longer than a step in {late - compiling} of {count} steps"
    in_files = sum(lost.values()) - sum(compiled.values())
    yield Part("file system", in_files / count, why, "writing records")
    why = f"something was compiled in {compiling} steps"
    yield Part("recompilation", sum(compiled.values()) / count, why, "recompilation")
