"""`plan --hlo`: the step of a compiled program that is read from a file. The program may come from
any code.

The file has the text of `compiled.as_text()`, or is the program after optimizations that
`--xla_dump_to` writes. Next to the latter is the compiler's account of memory, which the text alone
does not have.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxbench.base.errors import RecipeError
from jaxbench.base.files import as_json
from jaxbench.base.hardware import placed
from jaxbench.pages.charts import three_digits, waterfall
from jaxbench.pages.html import attached, render
from jaxbench.plan import text
from jaxbench.plan.compiled_step import Step, step_of
from jaxbench.plan.row_page import (
    Box,
    dominating,
    no_forecast,
    step_box,
    step_content,
    system_assumptions,
    total_bar,
)
from jaxbench.plan.systems import Target, system
from jaxbench.xla.collectives import Collective
from jaxbench.xla.custom_calls import RULES
from jaxbench.xla.hlo import Program, display_name
from jaxbench.xla.host_copies import located
from jaxbench.xla.instruction import root

MEMORY_REPORT = "-memory-usage-report.txt"
"""The file name of the compiler's account of memory ends with this, in place of the program's
`.txt`."""

OF_JAX = re.compile(r"\b(?:stack_frame_id|source_file)=|__(?:ynn|xnn|onednn)")
"""Found in the text of a compiled program, and hardly in a program that was written by hand."""

OF_TPUS = re.compile(r':T\([\d,]+\)|custom_call_target="tpu_')
"""Found in a program for TPUs: layouts in tiles, kernels."""

OF_GPUS = re.compile(r'fingerprint_before_lhs|-start\(|custom_call_target="(?:__cu|__gpu|__triton)')
"""Found in a program for GPUs: XLA's mark of its scheduler, asynchronous collectives, kernels."""


@dataclass(frozen=True, kw_only=True)
class HloStep(Step):
    """The step of a program in a file. FLOPs and bytes are per device.

    `arguments` and `outputs` are those in the memory of the device; outputs that take the memory of
    an argument do not count. `peak` is from the compiler's account next to the file; None without
    one. `flops` are by kind and dtype. `assumed` names what may run in another way than we counted
    it.
    """

    file: str
    target: str
    system: dict[str, Any]
    devices: int
    arguments: int
    outputs: int
    peak: int | None
    limit: int
    flops: dict[str, int]
    assumed: list[str]


def read(path: Path, target: Target) -> HloStep:
    """The step of the program in a file on a GPU. Raises RecipeError if the file holds no scheduled
    program for GPUs or if its devices do not fill nodes, and RunFailed if something cannot be
    counted."""
    content, program = parse(path, "--hlo")
    tables, gpu = target.tables(), placed(target.gpu, program.devices)
    with whole_text(path, "--hlo"):
        parameters = (
            i for i in program.computations[program.entry].values() if i.opcode == "parameter"
        )
        return HloStep(
            **vars(step_of(program, gpu, tables, joined)),
            file=str(path),
            target=gpu.name.lower(),
            system=system(gpu),
            devices=program.devices,
            arguments=sum(
                size for i in parameters for size, on_host in located(i.shape) if not on_host
            ),
            outputs=_outputs(program, content),
            peak=_peak(path),
            limit=gpu.memory_limit,
            flops={" ".join(key): count for key, count in program.flops().items()},
            assumed=program.assumed,
        )


def parse(path: Path, option: str) -> tuple[str, Program]:
    """The text in a file that this option names, and its program for GPUs. Raises RecipeError for
    any other file, and for a part of one."""
    try:
        content = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecipeError(f"{option}: cannot read the program in {path}: {reason}") from error
    if "is_scheduled=true" not in content or not re.search(r"^ENTRY ", content, re.MULTILINE):
        raise RecipeError(
            f"{option}: {path} has no scheduled HLO; expected the whole text of "
            "compiled.as_text(), or *_gpu_after_optimizations.txt of XLA_FLAGS=--xla_dump_to=DIR"
        )
    if "\n}" not in content.rpartition("\nENTRY ")[2]:
        raise RecipeError(f"{option}: {path} is cut off within its last computation")
    tpus = OF_TPUS.search(content)
    if tpus or (OF_JAX.search(content) and not OF_GPUS.search(content)):
        raise RecipeError(
            f"{option}: {path} is a program for {'TPUs' if tpus else 'CPUs'}; expected one that "
            "was compiled for GPUs"
        )
    with whole_text(path, option):
        program = Program.parse(content, RULES, strict=False)
        for scope in program.computations.values():
            for i in scope.values():
                if i.opcode not in ("parameter", "constant") and (lost := {*i.operands} - {*scope}):
                    raise LookupError(f"{i.name} reads {min(lost)}, which does not exist")
    return content, program


@contextmanager
def whole_text(path: Path, option: str) -> Iterator[None]:
    """Raises RecipeError if the parts of a program in a file do not fit together."""
    try:
        yield
    except RecipeError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, StopIteration,
            RecursionError) as error:  # fmt: skip
        reason = f"{type(error).__name__}: {error}"
        raise RecipeError(
            f"{option}: cannot read {path}: it is not a whole program, or not HLO as XLA writes it "
            f"({reason})"
        ) from error


def plain(step: HloStep) -> dict[str, Any]:
    """The step as plain values. If there is no forecast, its values are None."""
    values = asdict(step)
    if step.forecast.unknown:
        unknown = {"unknown": step.forecast.unknown}
        values |= {
            "forecast_step_s": None,
            "forecast": dict.fromkeys(values["forecast"]) | unknown,
        }
    return values


def joined(collective: Collective) -> str:
    """The GPUs that a collective joins: `8 GPUs`, `16 GPUs, 8 apart`, or `pairs`."""
    if collective.kind == "collective-permute":
        return "pairs"
    first, second, *_ = sorted(collective.devices)
    apart = f", {second - first} apart" if second - first > 1 else ""
    return f"{collective.group} GPUs{apart}"


def _outputs(program: Program, content: str) -> int:
    """Bytes of the outputs on the device, except those that take the memory of arguments."""
    result = root(program.computations[program.entry])
    aliases = re.search(r"input_output_alias=\{(.*?)\) \}", content.partition("\n")[0])
    held = {
        int(index or 0) for index in re.findall(r"\{(\d*)\}: \(", aliases[1] if aliases else "")
    }
    return sum(
        size
        for n, (size, on_host) in enumerate(located(result.shape))
        if n not in held and not on_host
    )


def _peak(path: Path) -> int | None:
    """The peak in the compiler's account of memory next to a dumped program; None without one."""
    report = path.with_name(path.name.removesuffix(".txt") + MEMORY_REPORT)
    if not report.is_file():
        return None
    total = re.search(r"color=0\)\nTotal bytes: (\d+)", report.read_text())
    return int(total[1]) if total else None


def report(step: HloStep) -> str:
    """The step as text."""
    forecast = step.forecast
    compiled = (
        ", ".join(f"{n / 1e12:.1f} {display_name(name)}" for name, n in step.flops.items())
        or "none"
    )
    lines = [
        f"{step.file}: {step.devices} x {step.system['device']}",
        "",
        f"memory      {_memory(step)}",
        f"work        TFLOP per device and step: {compiled}",
        f"  kernels     {text.kernels(step)}",
        *text.network(step),
        *text.host_copies(step),
        *text.bound(step),
    ]
    lines += [*text.forecast(forecast), *text.moves(step), *text.other_kernels(step)]
    if step.assumed:
        lines += ["assumed", *(f"  {entry}" for entry in step.assumed)]
    return "\n".join(lines)


def page(step: HloStep) -> str:
    """The step as a page."""
    f, known, name = step.forecast, not step.forecast.unknown, Path(step.file).name
    expected = Box("no forecast", "we do not know what some calls compute")
    result = f"{three_digits(f.step_s)} s per step" if known else "no forecast"
    held = {"arguments": step.arguments, "other outputs": step.outputs}
    rows = waterfall(held, text.in_gib)
    if step.peak is not None:
        rows.append(total_bar("peak", step.peak, step.limit))
    return render(
        "hlo.html",
        title=f"{name}: plan",
        plan=step,
        jax=None,
        headline=f"{name} on {step.target.upper()}: {result}",
        summary=dominating(f.parts_s, f.step_s) if known else "",
        boxes=[
            step_box(f) if known else expected,
            Box(f"{three_digits(step.bound_step_s)} s", "bound: no step can be faster"),
            Box(text.gib(step.wire_bytes), "sent per GPU and step"),
        ],
        reasons=[("How far to trust it:", f"{text.trust(f)}.") if known else no_forecast(f)],
        memory={"rows": rows, "full": max(step.limit, step.peak or 0)},
        flops={display_name(name): count for name, count in step.flops.items()},
        pipeline=[],
        errata={},
        assumptions=[
            *system_assumptions(step, step.system, step.limit),
            *(("Assumed", assumed) for assumed in step.assumed),
        ],
        file="step.json.gz",
        href=attached(plain(step)),
        **step_content(step, f.parts_s),
    )


def _memory(step: HloStep) -> str:
    held = f"arguments {text.gib(step.arguments)}, other outputs {text.gib(step.outputs)}"
    if step.peak is None:
        return f"{held}; temporaries are unknown without the files of --xla_dump_to"
    fits = "fits" if step.peak <= step.limit else "DOES NOT FIT"
    return f"{fits}: peak {text.gib(step.peak)} of {text.gib(step.limit)} per device; {held}"


FORMATS: dict[str, Callable[[HloStep], str]] = {
    "text": report, "html": page, "json": lambda step: as_json(plain(step)),
}  # fmt: skip
"""What writes a step, by `--format`."""
