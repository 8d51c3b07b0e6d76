"""A plan as text."""

from jaxbench.base.errors import counted
from jaxbench.forecast.forecast import Forecast
from jaxbench.forecast.tables import FORMATS, PACKAGE
from jaxbench.jax_internals import READS_HOST
from jaxbench.plan.compiled_step import Step
from jaxbench.plan.plan import Plan
from jaxbench.recipe.published import ERRATA
from jaxbench.results.plans import part_name
from jaxbench.xla.hlo import display_name

BAR = 24
"""Characters of the longest bar of a forecast."""

NEAR = 0.9
"""The share of the scheduler's memory limit above which temporaries have probably met it. If a
schedule is above the limit, XLA schedules again with nine tenths of it
(`LatencyHidingScheduler::Run`)."""

MOVES, SHOWN_MOVES = 0.1, 6
"""The least percent by which a change must move a forecast to be shown, and the most changes."""

SHORT_S = 0.1
"""Shorter steps, such as those of a single layer, are shown in ms."""

ALWAYS = ("bf16", "fp8")
"""Formats whose matmuls are counted even if there are none."""


def in_gib(count: float) -> str:
    """Bytes in GiB, without the unit."""
    return f"{count / 2**30:.1f}"


def gib(count: float) -> str:
    """Bytes in GiB, with the unit."""
    return f"{in_gib(count)} GiB"


def details(plan: Plan) -> str:
    """Where the time and the memory of a step go, and the least important last."""
    size, state, work = plan.bytes_per_device, plan.state_bytes, plan.flops
    held = "" if state.gradients is None else f", including gradients {gib(state.gradients)}"
    return "\n".join(
        [
            "",
            *forecast(plan.forecast, f"; {_rates(plan, 'forecast')}"),
            *moves(plan),
            *other_kernels(plan),
            f"memory      peak {gib(size.peak)} of {gib(size.limit)} per device, "
            f"headroom {gib(size.limit - size.peak)}",
            f"  state       parameters {gib(state.parameters)}, optimizer {gib(state.optimizer)}",
            f"  temporaries {gib(size.temporaries)}{held}",
            *_uncounted(plan),
            *_host_memory(plan),
            f"work        {work.compiled / 1e12:.1f} TFLOP per device and step, "
            f"{work.recompute_ratio:.3f} times the model's",
            f"  kernels     {kernels(plan)}",
            *pipeline(plan),
            *network(plan),
            *schedule(plan),
            *host_copies(plan),
            *bound(plan, f"; {_rates(plan, 'bound')}"),
            "largest buffers at the peak:",
            *(f"  {gib(b.bytes):>9}  {b.shape:32} {b.name}" for b in plan.largest_buffers),
            *_published(plan),
            _options(plan),
            f"lowered in {plan.lower_s:.1f} s, compiled in {plan.compile_s:.1f} s, "
            f"jax {plan.versions['jax']}",
        ]
    )


def answer(plan: Plan) -> str:
    """What a plan is asked for: does it fit, how long is a step, and what did others reach?"""
    size, f, row = plan.bytes_per_device, plan.forecast, plan.published
    fits = "fits      " if size.peak <= size.limit else "DOES NOT FIT"
    lines = [
        f"{plan.recipe}, row {plan.row}{_derived(plan)}: {plan.mesh}, {plan.system['device']}",
        f"  {fits} {in_gib(size.peak)} of {gib(size.limit)} per GPU",
    ]
    if size.host > size.host_limit:
        over = f"{in_gib(size.host)} of {gib(size.host_limit)} of host memory per GPU"
        lines.append(f"  DOES NOT FIT {over}")
    if f.unknown:
        lines.append("  step       no forecast: we do not know what some calls compute")
    else:
        within = f"90 % interval {f.interval.low_s:.3g} to {f.interval.high_s:.3g}"
        rates = _rates(plan, "forecast", count="")
        lines.append(f"  step       {f.step_s:.3f} s ({within}), {rates}")
    if row:
        rates = _rates(plan, "published", count="")
        lines.append(f"  published  {row.step_time_s} s on {row.gpu.name}, {rates}")
    return "\n".join(lines)


def _options(plan: Plan) -> str:
    """The options in which the program differs from the one that `train` compiles."""
    options = ", ".join(f"{name}={value}" for name, value in plan.planned_flags.items())
    return f"compiled with the options of train and {options}, since there is no GPU to ask"


def _derived(plan: Plan) -> str:
    """The model and batch of a row that is not in the recipe's file."""
    if plan.settings["label"] != "derived":
        return ""
    model, batch = plan.settings["model"], plan.settings["batch"]
    return f" (derived: {model['layers']} layers, global batch {batch['global_batch']})"


def _uncounted(plan: Plan) -> list[str]:
    """What the peak lacks if cuDNN could not be asked."""
    reason = plan.without_cudnn
    return [f"  not counted: the workspaces of cuDNN's attention ({reason})"] if reason else []


def _host_memory(plan: Plan) -> list[str]:
    """The activations that are kept in host memory."""
    size, asked = plan.bytes_per_device, plan.settings["execution"]["offload"] != "none"
    if size.host:
        fits = "" if size.host <= size.host_limit else "DOES NOT FIT: "
        return [f"  host        {fits}{gib(size.host)} of {gib(size.host_limit)} per device"]
    if asked and not READS_HOST:
        return ["  host        nothing is kept there: that needs jaxlib 0.11.2"]
    return []


def pipeline(plan: Plan) -> list[str]:
    """The pipeline of a plan, in one line."""
    if (p := plan.stages) is None:
        return []
    return [
        f"pipeline    {p.ranks} ranks with {p.virtual_stages} model chunks each, "
        f"{p.microbatches} microbatches; each is idle for {100 * p.bubble:.1f} % of its busy time; "
        f"a stash for the activations of {p.slots} chunks; {p.padding} blocks of padding"
    ]


def kernels(step: Step) -> str:
    """The kernel launches of a step."""
    counts = {name: step.kernels[f"gemm_{name}"] for name in FORMATS}
    matmuls = [f"{n} {name} matmuls" for name, n in counts.items() if n or name in ALWAYS]
    moved = step.quantization_bytes
    quantization = f"; quantization moves {gib(moved)}" if moved else ""
    attention = f"{step.kernels['attention']} attention"
    total = f"{step.launches} kernel launches in all"
    return f"{', '.join(matmuls)}, {attention}, {total}{quantization}"


def unit_of(step_s: float) -> tuple[float, str]:
    """Units in a second, and their name, in which the parts of a step are shown."""
    return (1e3, "ms") if step_s < SHORT_S else (1.0, "s")


def network(step: Step) -> list[str]:
    """The collectives of a step."""
    where = {True: "across domains", False: "in NVLink domain"}
    unit, name = unit_of(step.bound_step_s)
    return [
        f"network     {gib(step.wire_bytes)} sent per device and step; "
        f"no matmul or attention overlaps with {gib(step.uncovered_wire_bytes)} of it",
        *(
            f"  {c.kind:18} {c.axes:16} {counted(c.count, 'run'):>10} {gib(c.bytes):>10} "
            f"{where[c.across_domains]:16} {c.least_s * unit:.3f} {name}, "
            f"exposed {c.exposed_s * unit:.3f} {name}"
            for c in step.collectives
        ),
    ]


def schedule(plan: Plan) -> list[str]:
    """Whether XLA's scheduler has probably given up overlap to save memory."""
    size = plan.bytes_per_device
    if not plan.collectives:
        return []
    met = size.temporaries > NEAR * size.scheduled
    found = "probably reached, so more memory may expose less" if met else "not reached"
    return [
        f"  memory limit of XLA's scheduler {found}: temporaries {gib(size.temporaries)} of "
        f"{gib(size.scheduled)}"
    ]


def host_copies(step: Step) -> list[str]:
    """The copies of a step from and to the host."""
    moved, (unit, name) = step.host, unit_of(step.bound_step_s)
    line = (
        f"host        {gib(moved.to_host)} to the host and {gib(moved.from_host)} back per "
        f"device and step, exposed {moved.exposed_s * unit:.3f} {name}"
    )
    return [line] if moved.to_host or moved.from_host else []


def bound(step: Step, rates: str = "") -> list[str]:
    """The bound and its parts."""
    unit, name = unit_of(step.bound_step_s)
    compute, memory, exposed = (
        f"{step.bound_parts_s.get(part, 0) * unit:.3f}" for part in ("compute", "memory", "exposed")
    )
    return [
        f"bound       {step.bound_step_s * unit:.3f} {name} per step: matmuls and attention "
        f"{compute}, other kernels {memory}, exposed {exposed}{rates}"
    ]


def other_kernels(step: Step) -> list[str]:
    """The kernels that take longest, matmuls and attention aside."""
    unit, name = unit_of(step.forecast_step_s)
    return [
        "other kernels that take longest, with their launches:",
        *(
            f"  {k.seconds * unit:.3f} {name} {k.launches:6}  {k.source}"
            for k in step.other_kernels
        ),
    ]


def _rates(plan: Plan, name: str, count: str = " (full count)") -> str:
    rates = plan.rates[name]
    mfu = "unknown" if rates.mfu is None else f"{100 * rates.mfu:.1f} %{count}"
    return f"{rates.tokens_per_s_per_gpu:.0f} tokens/s/GPU, MFU {mfu}"


def forecast(f: Forecast, rates: str = "") -> list[str]:
    """A forecast and its parts, with bars; or why there is none."""
    if f.unknown:
        return [
            "forecast    none: we do not know what these calls compute, so not how long they take",
            *(f"  {name}: at least {s:.3f} s for its bytes" for name, s in f.unknown.items()),
        ]
    longest, (unit, unit_name) = max(f.parts_s.values()), unit_of(f.step_s)
    step = f"{f.step_s * unit:.3f} {unit_name} per step"
    lines = [f"forecast    {step}{rates}", f"  trust: {trust(f)}"]
    for name, seconds in sorted(f.parts_s.items(), key=lambda part: -part[1]):
        share, bar = seconds / f.step_s, "#" * round(BAR * seconds / longest)
        lines.append(
            f"  {part_name(name):28} {seconds * unit:8.3f} {unit_name} {100 * share:5.1f} %  "
            f"{bar}".rstrip()
        )
    sources = [
        f"{display_name(kind)} from {s}"
        for kind, s in f.sources.items()
        if not s.startswith(PACKAGE)
    ]
    if sources:
        lines.append(f"  measured: {'; '.join(sources)}")
    lines += [f"  assumed: {assumed}" for assumed in f.assumed]
    return [*lines, _rests_on(f)]


def trust(f: Forecast) -> str:
    """How far to trust a forecast, in one line."""
    i = f.interval
    experts = f" ({i.with_experts} with experts)" if i.with_experts else ""
    share = f"{100 * i.assumed:.0f} %" if i.assumed else "no part"
    rates = f" ({', '.join(i.assumed_rates)})" if i.assumed else ""
    return (
        f"90 % interval {i.low_s:.3g} to {i.high_s:.3g} s, from the errors on {i.programs} "
        f"programs of {i.families} families{experts} that others timed; {i.calibrated_s:.3g} s if "
        f"calibrated by their mean error; {share} of this step rests on assumed rates{rates}"
    )


def moves(step: Step) -> list[str]:
    """What moves a forecast most."""
    shown = [s for s in step.sensitivities if s.percent >= MOVES][:SHOWN_MOVES]
    lines = (f"  {s.percent:+5.1f} %  {s.what}: {s.change}" for s in shown)
    return ["moves       what would make this forecast longer:", *lines] if shown else []


def _rests_on(f: Forecast) -> str:
    """The shares of a forecast by what they rest on, in one line."""
    named = f" ({'; '.join(f.beyond)})" if f.beyond else ""
    shares = (
        f"{name} {100 * seconds / f.step_s:.0f} %{named if name == 'in proportion' else ''}"
        for name, seconds in f.rests_on.items()
    )
    return f"  rests on: {', '.join(shares)}"


def _published(plan: Plan) -> list[str]:
    if (row := plan.published) is None:
        return []
    mfu = f"; MFU {row.mfu_pct} % as its source prints it" if row.mfu_pct else ""
    return [
        f"published   {row.step_time_s} s on {row.gpu.name}, {_rates(plan, 'published')}{mfu}",
        *(f"  {code:10} {ERRATA[code]}" for code in row.errata),
    ]
