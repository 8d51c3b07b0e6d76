"""A plan for people, and what moved between two plans."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from jaxbench.forecast.tables import PACKAGE
from jaxbench.plan.plan import Plan
from jaxbench.recipe.published import ERRATA

BAR = 30
"""Characters of the longest part of a forecast."""

SHOWN_OUTSIDE = 0.05
"""Share of a forecast outside the tables from which on it is said."""

IGNORED = ("lower_s", "compile_s", "largest_buffers", "published", "collectives", "other_kernels")


def gib(count: float) -> str:
    """Bytes as GiB, for people."""
    return f"{count / 2**30:.1f} GiB"


def report(plan: Plan) -> str:
    """The plan for people."""
    size, state, work = plan.bytes_per_device, plan.state_bytes, plan.flops
    parts, row = plan.bound_parts_s, plan.published
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines = [
        f"{plan.recipe}, row {plan.row}{_derived(plan)}: {plan.mesh}, {plan.system['device']}",
        f"lowered in {plan.lower_s:.1f} s, compiled in {plan.compile_s:.1f} s, "
        f"jax {plan.versions['jax']}",
        "",
        f"memory      {verdict}: peak {gib(size.peak)} of {gib(size.limit)} per device, "
        f"headroom {gib(size.limit - size.peak)}",
        f"  state       parameters {gib(state.parameters)}, optimizer {gib(state.optimizer)}",
        f"  temporaries {gib(size.temporaries)}, of which gradients {gib(state.gradients)}",
        "  largest at the peak:",
        *_buffers(plan, "    "),
        f"work        {work.compiled / 1e12:.1f} TFLOP per device and step, "
        f"{work.recompute_ratio:.3f} of the model's",
        f"  kernels     {plan.kernels.gemm_bf16} bf16 products, {plan.kernels.gemm_fp8} fp8 "
        f"products, {plan.kernels.attention} attention, {plan.launches} launches in all",
        *_pipeline(plan),
        f"network     {gib(plan.wire_bytes)} sent per device and step; "
        f"{gib(plan.uncovered_wire_bytes)} with no product or attention beside it",
    ]
    for c in plan.collectives:
        where = "across domains" if c.across_domains else "in NVLink domain"
        lines.append(
            f"  {c.kind:18} {c.axes:16} {c.count:5} x {gib(c.bytes):>10} {where:16} "
            f"{c.least_s:.3f} s, exposed {c.exposed_s:.3f} s"
        )
    lines.append(
        f"bound       {plan.bound_step_s:.3f} s per step: products and attention "
        f"{parts.compute:.3f}, other kernels {parts.memory:.3f}, exposed "
        f"{parts.exposed:.3f}; {_rates(plan, 'bound')}; the largest other kernels:"
    )
    lines += [
        f"  {kernels.seconds:.3f} s {kernels.launches:6}  {kernels.source}"
        for kernels in plan.other_kernels
    ]
    lines += _forecast(plan)
    if row:
        lines.append(
            f"published   {row['step_time_s']} s on {row['gpu_type'].upper()}, "
            f"{_rates(plan, 'published')}; MFU {row['mfu_pct'] or 'no'} % as its source prints it"
        )
        lines += [f"  {code:10} {ERRATA[code]}" for code in row["errata"]]
    return "\n".join(lines)


def _forecast(plan: Plan) -> list[str]:
    """The forecast, and where its time goes."""
    f = plan.forecast
    widest = max(f.parts_s.values())
    lines = [
        f"forecast    {f.step_s:.3f} s per step, {f.fast_s:.3f} to {f.slow_s:.3f}; "
        f"{_rates(plan, 'forecast')}"
    ]
    for name, seconds in sorted(f.parts_s.items(), key=lambda part: -part[1]):
        share, bar = seconds / f.step_s, "#" * round(BAR * seconds / widest)
        lines.append(f"  {name:34} {seconds:8.3f} s {100 * share:5.1f} %  {bar}".rstrip())
    own = [f"{kind} by {of}" for kind, of in f.sources.items() if not of.startswith(PACKAGE)]
    if own:
        lines.append(f"  measured: {'; '.join(own)}")
    if f.outside >= SHOWN_OUTSIDE:
        lines.append(
            f"  {100 * f.outside:.0f} % of the kernels' time lies outside the tables, and was "
            f"taken in proportion: {'; '.join(f.beyond)}"
        )
    return lines


def _derived(plan: Plan) -> str:
    """What is not in the recipe's file must be shown."""
    if plan.settings["label"] != "derived":
        return ""
    model, batch = plan.settings["model"], plan.settings["batch"]
    return f" (derived: {model['layers']} layers, global batch {batch['global_batch']})"


def _pipeline(plan: Plan) -> list[str]:
    if (p := plan.stages) is None:
        return []
    return [
        f"pipeline    {p.ranks} ranks with {p.virtual_stages} chunks of layers each, "
        f"{p.microbatches} microbatches: idle for {100 * p.bubble:.1f} % of the work, "
        f"{p.slots} slots for activations, {p.padding} layers of padding"
    ]


def _rates(plan: Plan, name: str) -> str:
    rates = plan.rates[name]
    mfu = "unknown" if rates.mfu is None else f"{100 * rates.mfu:.1f} % (full count)"
    return f"{rates.tokens_per_s_per_gpu:.0f} tokens/s/GPU, MFU {mfu}"


def _buffers(plan: Plan, indent: str) -> list[str]:
    return [f"{indent}{gib(b.bytes):>9}  {b.shape:32} {b.name}" for b in plan.largest_buffers]


def too_big(plan: Plan) -> str:
    """Why a plan does not fit: how far it is over the limit, and its largest buffers."""
    size = plan.bytes_per_device
    return "\n".join(
        [
            f"does not fit: {gib(size.peak)} of {gib(size.limit)}; largest buffers:",
            *_buffers(plan, "  "),
        ]
    )


def difference(a: Plan, b: Plan) -> str:
    """A table of everything that differs, with the ratio of numbers; collectives by kind and
    axes."""
    rows = [
        (name, _text(left), _text(right), _ratio(left, right))
        for name, left, right in _pairs(_flat(a), _flat(b))
        if left != right
    ]
    if not rows:
        return "the plans are the same"
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _flat(plan: Plan) -> dict[str, Any]:
    values = dict(_leaves("", {k: v for k, v in asdict(plan).items() if k not in IGNORED}))
    for c in plan.collectives:
        for name in ("count", "bytes", "exposed_s"):
            values[f"{c.kind} over {c.axes}: {name}"] = getattr(c, name)
    return values


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else key, inner)
    else:
        yield prefix, value


def _pairs(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*a, *b]):
        yield name, a.get(name), b.get(name)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)


def _ratio(a: Any, b: Any) -> str:
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (a, b))
    return f"x {b / a:.3f}" if numbers and a else ""
