"""Summary of the steps of a run, log lines, and the printed result."""

import math
from typing import Any

from jaxbench.recipe.mixers import ExpertsConfig
from jaxbench.recipe.settings import Run
from jaxbench.results.throughput import throughput
from jaxbench.results.verdict import Verdict, judge
from jaxbench.results.window import PUBLISHED, first_of_program, spread, start_of, window

SLOW_SHARE, SLOW_S = 0.9, 0.02
"""The least share of a step's time, and the least seconds per step, from which the host's work
counts as slow."""


def summary(
    run: Run, steps: list[dict[str, Any]], peak: float | None, starts: list[dict[str, Any]]
) -> dict[str, Any]:
    """The record's `summary` and `loss`. They follow from the recorded steps, the peak in TFLOP/s,
    and the record's `starts`. If there is no window, `no_summary` says why. Empty before the first
    step."""
    if not steps:
        return {}
    losses = [step["loss"] for step in steps]
    loss = {"first": losses[0], "last": losses[-1], "ln_vocabulary": math.log(run.model.vocabulary)}
    counted = counted_steps(steps, starts)
    if not counted:
        return {"loss": loss, "no_summary": _too_few(steps, starts)}
    step_time_s = spread([step["step_time_s"] for step in counted])
    shares = [step["tokens_dropped"] for step in counted if "tokens_dropped" in step]
    dropped = {"tokens_dropped": round(sum(shares) * assignments(run))} if shares else {}
    return {
        "summary": {
            **dropped,
            "window": [counted[0]["step"], counted[-1]["step"]],
            "start": counted[0].get("start", 0),
            "step_time_s": {**step_time_s, "last": steps[-1]["step_time_s"]},
            **throughput(run, step_time_s["mean"], peak),
            "peak_memory_bytes": max(step["peak_memory_bytes"] for step in counted),
        },
        "loss": loss,
    }


def _by_start(
    steps: list[dict[str, Any]], starts: list[dict[str, Any]]
) -> dict[int, list[dict[str, Any]]]:
    """The steps of each start that ran the same program as the last start."""
    begins = [start["step"] for start in starts]
    found: dict[int, list[dict[str, Any]]] = {}
    for number in range(first_of_program(starts), len(starts)):
        own = [step for step in steps if start_of(step["step"], begins) == number]
        found |= {number: own} if own else {}
    return found


def counted_steps(
    steps: list[dict[str, Any]], starts: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The steps of the window, which lies within one start. If a start has the whole published
    window we take it, else the longest one. Empty if every start has a single step, since its time
    includes the start."""
    best: list[dict[str, Any]] = []
    length = (False, 1)
    for own in _by_start(steps, starts).values():
        first, last = window(own[-1]["step"] + 1, own[0]["step"])
        whole = (first, last) == PUBLISHED, len(own)
        if len(own) > 1 and whole >= length:
            best, length = [step for step in own if first <= step["step"] <= last], whole
    return best


def _too_few(steps: list[dict[str, Any]], starts: list[dict[str, Any]]) -> str:
    """The reason why there is no window."""
    if len(starts) == 1:
        return "there is only one step, and its time includes the start"
    own = _by_start(steps, starts).get(len(starts) - 1, [])
    has = f"has only step {own[0]['step']}" if own else "has no step"
    return (
        "no start with this program has enough steps for a window, and we do not mix figures of "
        f"two programs: the last of {len(starts)} starts {has}"
    )


def assignments(run: Run) -> int:
    """Assignments of tokens to experts in a step, over all layers."""
    model, applications = run.model, run.model.prediction.depth if run.model.prediction else 0
    mixers = [*model.mixers, *(applications * model.predicting)]
    experts = [mixer.top_k for mixer in mixers if isinstance(mixer, ExpertsConfig)]
    return run.tokens_per_step * sum(experts)


def dropped(run: Run, figures: dict[str, Any]) -> list[str]:
    """The reason why a run is not comparable if its dropless experts dropped tokens, by its
    `summary`; none if they dropped none."""
    count = figures.get("summary", {}).get("tokens_dropped", 0)
    if not (run.model.dropless and count):
        return []
    first, last = figures["summary"]["window"]
    return [
        f"dropless experts dropped {count} assignments in steps {first} to {last}, beginning with "
        "the last experts of each rank"
    ]


def slow_records(steps: list[dict[str, Any]]) -> list[str]:
    """A line if the host's work between steps, which writes their records, takes as long as the
    steps, which then wait for it. None otherwise."""
    if not steps:
        return []
    host, time = (sum(s.get(key, 0.0) for s in steps) for key in ("host_s", "step_time_s"))
    if host < SLOW_SHARE * time or host < SLOW_S * len(steps):
        return []
    return [
        f"slow storage or terminal: writing the records of a step takes {host / len(steps):.2g} s, "
        "as long as the step"
    ]


def verdict(record: dict[str, Any], steps: list[dict[str, Any]]) -> Verdict:
    """The verdict on a run from its record and recorded steps; `jaxbench.report` checks more."""
    mean = record.get("summary", {}).get("step_time_s", {}).get("mean")
    published = record["published"] or {}
    expected = range(record["first_step"], record["recipe"]["steps"])
    complete = [step["step"] for step in steps] == list(expected)
    return judge(
        mean,
        published.get("step_time_s"),
        failed=None if record["status"] == "completed" else record["reason"] or record["status"],
        incomplete=[] if complete else [f"{len(steps)} of {len(expected)} steps are recorded"],
        not_comparable=record["not_comparable_because"],
    )


def short_line(run: Run, step: dict[str, Any]) -> str:
    """A step in a short line for people; steps are numbered from 0, as in the records."""
    width = len(str(run.steps - 1))
    return (
        f"step {step['step']:{width}}  {step['step_time_s']:.4g} s  loss {step['loss']:.4f}  "
        f"{step['tokens_per_s_per_gpu']:.0f} tokens/s per device"
    )


def maxtext_line(run: Run, step: dict[str, Any]) -> str:
    """A step in MaxText's format, for which the Llama 2 document greps."""
    return (
        f"completed step: {step['step']}, seconds: {step['step_time_s']:.3f}, "
        f"TFLOP/s/device: {step['tflops_per_gpu']:.3f}, "
        f"Tokens/s/device: {step['tokens_per_s_per_gpu']:.3f}, "
        f"total_weights: {run.tokens_per_step}, loss: {step['loss']:.3f}"
    )


def nemo_line(run: Run, step: dict[str, Any]) -> str:
    """A step in NeMo's format, which the Llama 3.1 and later documents and their parser read."""
    n, batch = step["step"], run.batch.global_batch
    return (
        f"Training epoch 0, iteration {n}/{run.steps - 1} | lr: {step['learning_rate']:.4g} | "
        f"global_batch_size: {batch} | global_step: {n} | "
        f"peak_memory_usage: {step['peak_memory_bytes']} | "
        f"memory_allocated: {step['memory_bytes']} | reduced_train_loss: {step['loss']:.4g} | "
        f"train_step_timing in s: {step['step_time_s']:.4g} | "
        f"TFLOPS_per_GPU: {step['tflops_per_gpu']:.4g} | consumed_samples: {(n + 1) * batch}"
    )


def lines(record: dict[str, Any], steps: list[dict[str, Any]]) -> list[str]:
    """The printed result, from the record and the recorded steps."""
    recipe = record["recipe"]
    text = [f"{record['status']}: {recipe['recipe']}, row {recipe['row']} ({record['label']})"]
    if record["reason"]:
        text[0] += f": {record['reason']}"
    if s := record.get("summary"):
        t, loss = s["step_time_s"], record["loss"]
        text += [
            f"  step time   {t['mean']:.4g} s, mean of steps {s['window'][0]} to {s['window'][1]} "
            f"(std {t['std']:.2g}, median {t['median']:.4g}, p95 {t['p95']:.4g}, "
            f"last step {t['last']:.4g})",
            f"  throughput  {s['tokens_per_s_per_gpu']:.1f} tokens/s per device, "
            f"{s['tokens_per_s']:.1f} in all",
            _rate_line(s),
            *_dropped_line(s, recipe),
            *_energy_line(s),
            f"  loss        {loss['first']:.4f} first, {loss['last']:.4f} last "
            f"(ln vocabulary is {loss['ln_vocabulary']:.4f})",
        ]
        if pgle := record.get("pgle"):
            text.append(f"  PGLE        {pgle['step_time_before_s']:.4g} s per step before")
    if reason := record.get("no_summary"):
        text.append(f"  step time   none: {reason}")
    if row := record["published"]:
        mfu = "" if row["mfu_pct"] is None else f"{row['mfu_pct']} % MFU, "
        text.append(
            f"  published   {row['step_time_s']} s, {mfu}{row['gpus']} {row['gpu_type'].upper()}"
        )
    elif record["label"] == "full":
        text.append("  published   nothing for this row")
    if record["status"] == "completed":  # else the first line is the verdict
        text.append(f"  verdict     {verdict(record, steps)}")
    return text


def _dropped_line(summary: dict[str, Any], recipe: dict[str, Any]) -> list[str]:
    if not summary.get("tokens_dropped"):
        return []
    kind = "dropless" if recipe["model"]["experts"]["capacity_factor"] is None else "by capacity"
    return [f"  dropped     {summary['tokens_dropped']} assignments to experts ({kind})"]


def _energy_line(summary: dict[str, Any]) -> list[str]:
    if "joules_per_token" not in summary:
        return []
    return [
        f"  energy      {summary['joules_per_token']:.4g} J per token, "
        f"{summary['tokens_per_kwh']:.4g} tokens per kWh (GPUs only)"
    ]


def _rate_line(summary: dict[str, Any]) -> str:
    """The rate by the count of the published figures, next to which it is printed."""
    rate, mfu = summary["tflops_per_gpu"]["published"], summary["mfu"]["published"]
    percent = "" if mfu is None else f", MFU {100 * mfu:.2f} %"
    return f"  FLOPs       {rate:.4g} TFLOP/s per device{percent}"
