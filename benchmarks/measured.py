"""Writes the tables of docs/measured.md from the findings of `benchmarks/gpu.py` on Hopper GPUs.

python benchmarks/measured.py
"""

import json
from collections import defaultdict
from pathlib import Path
from statistics import median

from tables import table as markdown

ROOT = Path(__file__).parents[1]
FINDINGS, PAGE = ROOT / "benchmarks" / "measured.jsonl", ROOT / "docs" / "measured.md"
MARK = "<!-- table -->"
SESSIONS = dict.fromkeys(range(1, 5), "2026-11-26") | {
    5: "2026-11-27", 6: "2026-11-27", 7: "2026-11-27, third", 8: "2026-11-27, H200",
}  # fmt: skip
"""The session of each call: its day, and what tells it from others of that day."""

LAUNCHES = {"bc": "gradients of b and c", "x": "gradient of x"}
"""Sizes of `ops/ssd/pallas/tiles.py`, as findings of call 5 name them."""

FORMATS = {"bfloat16": "bf16", "float8_e4m3fn": "fp8"}


def table(columns: str, lines: list[list[str]]) -> list[str]:
    """A Markdown table. Commas separate its columns."""
    return markdown(columns.split(", "), lines)


def by_session(findings: list[dict]) -> dict[str, list[dict]]:
    """The findings of each session: forecasts, programs and GPUs of two are not the same."""
    sessions: defaultdict[str, list[dict]] = defaultdict(list)
    for found in findings:
        sessions[SESSIONS[found["call"]]].append(found)
    return sessions


def steps(findings: list[dict]) -> list[str]:
    """The step of each row, next to the forecast of that session."""
    lines = []
    for session, found_then in by_session(findings).items():
        timed = {f["what"]: f for f in found_then if f["check"] == "rows" and "losses" in f}
        others = {f["what"]: f for f in found_then if "step_s" in f and f["check"] == "rows"}
        for what, found in timed.items():
            step_s = median(found["seconds"])
            profiled, first = others.get(f"{what}, profiled"), others.get(what)
            lines.append([
                session, what.partition(", row")[0],
                f"{1e3 * first['step_s']:.1f}" if first else "",
                f"{1e3 * step_s:.1f}",
                f"{step_s / profiled['step_s'][1]:.3f}" if profiled else "",
                found["figure"].partition("MFU ")[2],
                f"{found.get('power_w', '')}", f"{found.get('sm_mhz', '')}",
                f"{found['losses'][0]:.3f} to {found['losses'][-1]:.3f}",
            ])  # fmt: skip
    columns = (
        "session, row `1` of, first call ms, ms per step, of the forecast, MFU, W, MHz,"
        " loss of first and last step"
    )
    return ["## Steps", "", *table(columns, lines)]


def kinds(findings: list[dict]) -> list[str]:
    """Each kind of kernel over all profiled rows of a session."""
    text = ["## Kernels", ""]
    for session, found_then in by_session(findings).items():
        sums: defaultdict[str, list[list[float]]] = defaultdict(list)
        for found in found_then:
            for kind, both in found.get("kinds", {}).items():
                sums[kind].append(both)
        lines = []
        for kind, pairs in sorted(sums.items()):
            measured, forecast = (sum(pair[n] for pair in pairs) for n in (0, 1))
            ratios = [m / f for m, f in pairs if f > 5e-4]
            extremes = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
            lines.append([
                kind, str(len(pairs)), f"{1e3 * measured:.1f}", f"{1e3 * forecast:.1f}",
                f"{measured / forecast:.2f}", extremes,
            ])  # fmt: skip
        columns = "kernels, rows, measured ms, forecast ms, measured over forecast, by row"
        text += [f"### Rows of {session}", "", *table(columns, lines)]
    return text


def mamba2(findings: list[dict]) -> list[str]:
    """Mamba-2's kernels in a step, and its mixer with changed sizes."""
    of_row = {
        f["what"].partition(",")[0]: f["kernels"]
        for f in findings
        if f["check"] == "rows" and "kernels" in f
    }
    lines = []
    for name in sorted({name for kernels in of_row.values() for name in kernels}):
        for row, kernels in of_row.items():
            kernel = kernels[name]
            launch_s = kernel["seconds"] / kernel["launches"]
            rate = kernel["flops"] / launch_s / 1e12
            lines.append([
                name, row, str(kernel["launches"]), f"{1e3 * launch_s:.2f}",
                f"{1e3 * kernel['forecast_s'] / kernel['launches']:.2f}",
                f"{rate:.0f}" if rate else "", f"{kernel['bytes'] / launch_s / 1e9:.0f}",
            ])  # fmt: skip
    mixers = []
    for found in (f for f in findings if f["check"] == "mixers"):
        by = found["what"].partition(" by ")[2]
        for short, whole in LAUNCHES.items():
            by = by.replace(f", {short}, ", f", {whole}, ")
        times = [f"{1e3 * s:.2f}" for s in found.get("seconds", ())]
        mixers.append([str(found["call"]), by, *(times or ["too much shared memory", ""])])
    columns = "kernel, row `1` of, launches, ms per launch, forecast ms, TFLOP/s, GB/s"
    return [
        "## Mamba-2's kernels", "", *table(columns, lines),
        *table("call, mixer by, forward ms, with gradients ms", mixers),
    ]  # fmt: skip


def commands(findings: list[dict]) -> list[str]:
    """`jaxbench check`, and row `1` by the training command."""
    found_then = [f for f in findings if f["check"] == "commands"]
    rates = [
        [str(f["call"]), what, f"{rate['median']:.0f} {rate['unit']}", f"{rate['expected']:.0f}"]
        for f in found_then
        for what, rate in f.get("rates", {}).items()
    ]
    first: dict[str, list[float]] = {}
    lines = []
    for found in (f for f in found_then if "losses" in f):
        same = first.setdefault(found["what"].partition(" ")[0], found["losses"])
        apart = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], same, strict=True))
        before = f"{1e3 * found['step_s_before']:.1f}" if "step_s_before" in found else ""
        lines.append([
            f"`{found['what']}`", f"{1e3 * found['step_s']:.1f}", before,
            f"{100 * found['mfu']:.1f} %", f"{found['peak_bytes'] / 2**30:.1f}",
            f"{found['compile_s']:.1f}", f"{apart:.1e}" if same is not found["losses"] else "",
        ])  # fmt: skip
    columns = (
        "row `1` by `jaxbench train`, ms per step, ms before PGLE, MFU, peak GiB, compiled in s,"
        " losses apart from the first run's"
    )
    return [
        "## Commands", "", *table("call, `jaxbench check`, measured, expected", rates),
        *table(columns, lines),
    ]  # fmt: skip


def choices(findings: list[dict]) -> list[str]:
    """Alternatives that were timed next to the unchanged row."""
    lines = []
    for found in (f for f in findings if f["check"] == "choices"):
        before, took, after = (f"{1e3 * s:.1f}" for s in found["seconds"])
        lines.append([found["what"], took, f"{before} and {after}", f"{found['ratio']:.3f}"])
    columns = "row `1` of, ms per step, unchanged row in two turns, ratio"
    return ["## Choices", "", *table(columns, lines)]


def ceilings(findings: list[dict]) -> list[str]:
    """Rates of large matmuls and of copies."""
    lines = [
        [f["what"], f["figure"], str(f.get("power_w", "")), str(f.get("sm_mhz", ""))]
        for f in findings
        if f["check"] == "ceilings"
    ]
    return ["## Ceilings", "", *table("what, rate, W, MHz", lines)]


def grouped(findings: list[dict]) -> list[str]:
    """The best and the worst sizes of each grouped matmul, and the best kernels of others."""
    rates: defaultdict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    plain = {}
    measured = (f for f in findings if f["check"] == "tiles" and f["verdict"] == "measured")
    for found in measured:
        session = SESSIONS[found["call"]]
        model, dtype, rest = found["what"].replace(": ", ", ").split(", ", 2)
        rate = float(found["figure"].split()[0])
        if rest == "a plain matmul":
            plain[session, model, dtype] = rate
        else:
            matmul, _, sizes = rest.partition(", ")
            rates[session, model, dtype, matmul][sizes] = rate
    lines = []
    for (session, model, dtype, matmul), every in rates.items():
        others = {what: rate for what, rate in every.items() if "Mosaic" in what}
        by_size = {what: rate for what, rate in every.items() if what not in others}
        best = max(by_size, key=lambda sizes: by_size[sizes])
        other = max(others, key=lambda what: others[what]) if others else ""
        lines.append([
            session, model, FORMATS[dtype], f"`{matmul}`", f"{by_size[best]:.0f}", best,
            f"{min(by_size.values()):.0f}", f"{others[other]:.0f}, {other}" if other else "",
            f"{plain[session, model, dtype]:.0f}",
        ])  # fmt: skip
    columns = (
        "session, experts of, format, matmul, best TFLOP/s, its sizes, worst, best of others,"
        " a plain matmul"
    )
    return ["## Grouped matmuls", "", *table(columns, lines)]


def what(finding: dict) -> str:
    """The name of a finding. Findings of November 2026 call a matmul a product."""
    return finding["what"].replace("FP8 product", "FP8 matmul")


def operators(findings: list[dict]) -> list[str]:
    """Errors of operators, and differences of losses."""
    lines = [
        [what(f), f["verdict"], f["figure"].removeprefix("error "), f["each"]]
        for f in findings
        if f["check"] == "operators"
    ]
    losses = [
        [
            str(f["call"]),
            f["what"].removesuffix(", tiny"),
            f["verdict"],
            f["figure"],
            f["beside"].partition(";")[0],
        ]
        for f in findings
        if f["check"] == "trains"
    ]
    lasting = [
        [f["what"], f["verdict"], ", ".join(filter(None, (f["figure"], f["beside"])))]
        for f in findings
        if f["check"] == "survives"
    ]
    return [
        "## Operators", "", *table("operator, verdict, largest error, result and gradients", lines),
        "## Losses", "", *table("call, smoke row of, verdict, largest difference, losses", losses),
        "## Kill and profile", "", *table("what, verdict, finding", lasting),
    ]  # fmt: skip


def tables() -> str:
    """All tables."""
    findings = [json.loads(line) for line in FINDINGS.read_text().splitlines()]
    parts = (steps, kinds, mamba2, commands, choices, ceilings, grouped, operators)
    return "\n".join(line for part in parts for line in part(findings)).rstrip()


if __name__ == "__main__":
    before = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(f"{before}{MARK}\n\n{tables()}\n")
