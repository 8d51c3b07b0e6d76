"""The gap of a measured step to the published or forecast one, divided into parts with a recorded
cause, and what remains."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from jaxbench.report.gpus import early_host, gpus, least_wait, slow_gpu, slowdowns
from jaxbench.report.runs import Result, RunData

CLOCKED = ("matrix products", "attention", "scan", "products and attention")
"""Parts of a plan (`plans.LABELS`) whose time is inverse to the clock of the multiprocessors."""

REMAINS = "what remains"


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Seconds of a measured step above the `kind` (published, forecast): (name, seconds, why) of
    parts, which add up to it. The last is what no record explains; it is negative where the
    reference itself had some of the others."""

    kind: str
    reference_s: float
    measured_s: float
    parts: list[tuple[str, float, str]]

    @property
    def seconds(self) -> float:
        """The whole gap."""
        return self.measured_s - self.reference_s

    def text(self) -> str:
        """The gap in a line for people, its largest part first."""
        parts = sorted(self.parts, key=lambda part: -abs(part[1]))
        listed = ", ".join(f"{name} {seconds:+.3f} s" for name, seconds, _ in parts)
        return f"{self.seconds:+.3f} s to the {self.kind} step: {listed}"


def explain(result: Result) -> Gap | None:
    """The gap of a complete run, to the published step if that may be compared, else to the plan's
    forecast; None without either. A part is absent where its data are."""
    run, mean = result.run, result.mean_s
    if not result.complete or mean is None:
        return None
    if result.verdict.ratio is not None and run.published:
        kind, reference = "published", run.published["step_time_s"]
    elif run.plan is not None and run.plan.kind == "forecast":
        kind, reference = "forecast", run.plan.step_s
    else:
        return None
    parts = [*_devices(run), *_links(run), *_host(result)]
    rest = mean - reference - sum(seconds for _, seconds, _ in parts)
    parts.append((REMAINS, rest, "the program, its kernels, links, and what was not recorded"))
    return Gap(kind=kind, reference_s=reference, measured_s=mean, parts=parts)


def clocked_s(run: RunData) -> tuple[float, str]:
    """Seconds of a step that are inverse to the clock, and what they are of: the plan's products,
    attention and scan, or else the model's FLOPs at the GPU's peak, which are the least."""
    if run.plan is not None and (seconds := sum(run.plan.parts.get(name, 0) for name in CLOCKED)):
        return seconds, f"{seconds:.3f} s of the plan's {run.plan.kind}"
    if run.flops and run.peak_tflops:
        seconds = min(run.flops.values()) / run.peak_tflops / 1e12
        return seconds, f"at least {seconds:.3f} s, the model's FLOPs at the peak"
    return 0.0, ""


def _devices(run: RunData) -> Iterator[tuple[str, float, str]]:
    """Parts of clocks and slow ranks: the clock of the typical GPU, and beyond it the slowest one,
    for which all wait, or the process with the least wait, for which its GPUs wait."""
    every = gpus(run.record)
    seconds, of = clocked_s(run)
    clocks = [gpu.clock for gpu in every if gpu.clock]
    if clocks and seconds:
        slower = statistics.median(1 / clock for clock in clocks)  # as `slowdowns` has the typical
        yield "clocks", seconds * (slower - 1), f"{100 / slower:.1f} % of the highest, for {of}"
        seconds *= slower
    slow: list[tuple[float, str]] = []
    if clocks or any(gpu.products_s for gpu in every):
        factors = slowdowns(every, outlying=False)
        worst = max(factors, key=lambda gpu: factors[gpu])
        slow.append((seconds * (factors[worst] - 1), slow_gpu(worst, factors[worst])))
    if late := least_wait(every):
        slow.append((late[1], early_host(*late)))
    if slow:
        lost, why = max(slow)
        yield "slow ranks", lost, why if lost else "none is an outlier"


def _links(run: RunData) -> Iterator[tuple[str, float, str]]:
    """The part of collectives and copies for which kernels wait longer than in the forecast of the
    profiled program. Of several ranks that which waits least counts: the others wait for it too."""
    waits = [(compared.waits, compared) for compared in run.profiles]
    longer = [(part.longer_s, part, compared) for part, compared in waits if part]
    if longer:
        lost, part, compared = min(longer, key=lambda each: each[0])
        yield (
            "links",
            lost,
            f"{compared.rank} waits {part.measured_s:.3f} s for them in its profile, "
            f"{part.forecast_s:.3f} s in the forecast",
        )


def _host(result: Result) -> Iterator[tuple[str, float, str]]:
    """Parts that the first process adds to steps between which it takes longer than one: by
    compiling, and by writing records."""
    first, last = result.window
    steps = {n: s for n, s in result.run.steps.seconds.items() if first <= n <= last}
    recorded = {n: result.run.host_s[n] for n in steps if n in result.run.host_s}
    if not recorded:
        return
    typical = statistics.median(steps.values())
    lost = {
        n: max(0.0, min(host - typical, steps[n] - typical)) for n, (host, _) in recorded.items()
    }
    compiled = {n: min(recorded[n][1], seconds) for n, seconds in lost.items()}
    written = sum(lost.values()) - sum(compiled.values())
    counts = [sum(s > 0 for s in part.values()) for part in (lost, compiled)]
    yield (
        "file system",
        written / len(steps),
        (f"records took longer than a step {counts[0] - counts[1]} times in {len(steps)}"),
    )
    yield "recompilation", sum(compiled.values()) / len(steps), f"in {counts[1]} steps"
