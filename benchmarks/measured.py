"""Writes the tables of docs/measured.md from the findings of `benchmarks/gpu.py` on an H100.

python benchmarks/measured.py
"""

import json
from collections import defaultdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
FINDINGS, PAGE = ROOT / "benchmarks" / "measured_h100.jsonl", ROOT / "docs" / "measured.md"
MARK = "<!-- table -->"
FORMATS = {"bfloat16": "bf16", "float8_e4m3fn": "fp8"}


def table(columns: str, lines: list[list[str]]) -> list[str]:
    """A Markdown table."""
    head = ["| " + " | ".join(columns.split(", ")) + " |", "|---" * len(columns.split(", ")) + "|"]
    return [*head, *("| " + " | ".join(line) + " |" for line in lines), ""]


def steps(findings: list[dict]) -> list[str]:
    """The step of each row."""
    timed = {f["what"]: f for f in findings if f["check"] == "rows" and "seconds" in f}
    lines = []
    for what, found in timed.items():
        step_s = median(found["seconds"])
        profiled = next((f for f in findings if f["what"] == f"{what}, profiled"), None)
        ratio = f"{step_s / profiled['step_s'][1]:.3f}" if profiled else ""
        before = next((f for f in findings if f["what"] == what and f["call"] == 1), None)
        lines.append([
            what.partition(",")[0], f"{1e3 * before['step_s']:.1f}" if before else "",
            f"{1e3 * step_s:.1f}", ratio, found["figure"].partition("MFU ")[2],
            f"{found.get('power_w', '')}", f"{found.get('sm_mhz', '')}",
            f"{found['losses'][0]:.3f} to {found['losses'][-1]:.3f}",
        ])  # fmt: skip
    columns = (
        "row `1` of, first call ms, ms per step, of the forecast, MFU, W, MHz, loss in 19 steps"
    )
    return ["## Steps", "", *table(columns, lines)]


def kinds(findings: list[dict]) -> list[str]:
    """Each kind of kernel over all profiled rows."""
    sums: defaultdict[str, list[list[float]]] = defaultdict(list)
    for found in findings:
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
    return ["## Kernels", "", *table(columns, lines)]


def ceilings(findings: list[dict]) -> list[str]:
    """Rates of large matmuls and of copies."""
    lines = [
        [f["what"], f["figure"], str(f.get("power_w", "")), str(f.get("sm_mhz", ""))]
        for f in findings
        if f["check"] == "ceilings"
    ]
    return ["## Ceilings", "", *table("what, rate, W, MHz", lines)]


def grouped(findings: list[dict]) -> list[str]:
    """The best and the worst sizes of each grouped matmul."""
    rates: defaultdict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    plain = {}
    for found in (f for f in findings if f["check"] == "tiles"):
        model, dtype, rest = found["what"].replace(": ", ", ").split(", ", 2)
        rate = float(found["figure"].split()[0])
        if rest == "a plain matmul":
            plain[model, dtype] = rate
        else:
            matmul, _, sizes = rest.partition(", ")
            rates[model, dtype, matmul][sizes] = rate
    lines = []
    for (model, dtype, matmul), by_size in rates.items():
        best = max(by_size, key=lambda sizes: by_size[sizes])
        lines.append([
            model, FORMATS[dtype], f"`{matmul}`", f"{by_size[best]:.0f}", best,
            f"{min(by_size.values()):.0f}", f"{plain[model, dtype]:.0f}",
        ])  # fmt: skip
    columns = "experts of, format, matmul, best TFLOP/s, its sizes, worst, a plain matmul"
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
        [f["what"].removesuffix(", tiny"), f["verdict"], f["figure"], f["beside"].partition(";")[0]]
        for f in findings
        if f["check"] == "trains"
    ]
    return [
        "## Operators", "", *table("operator, verdict, largest error, result and gradients", lines),
        "## Losses", "", *table("smoke row of, verdict, largest difference, losses", losses),
    ]  # fmt: skip


def tables() -> str:
    """All tables."""
    findings = [json.loads(line) for line in FINDINGS.read_text().splitlines()]
    parts = (steps, kinds, ceilings, grouped, operators)
    return "\n".join(line for part in parts for line in part(findings)).rstrip()


if __name__ == "__main__":
    before = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(f"{before}{MARK}\n\n{tables()}\n")
