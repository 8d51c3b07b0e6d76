"""`jaxbench report --format mlperf`: runs as lines of MLPerf's training log, `:::MLLOG {...}`,
which MLPerf's tools and others read (mlcommons/logging, mllog.py).

It is not a submission: synthetic tokens have no target quality, so nothing is evaluated, and no
organisation, platform and division are named. Keys are mllog's constants. A step is a
`tracked_stats`, as in published submissions.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxbench.report.runs import Result
from jaxbench.results.quantity import LARGEST

SETTINGS = {
    "global_batch_size": ("batch", "global_batch"),
    "gradient_accumulation_steps": ("batch", "accumulation"),
    "max_sequence_length": ("batch", "sequence_length"),
    "max_steps": ("steps",),
    "opt_base_learning_rate": ("optimizer", "learning_rate"),
    "opt_end_learning_rate": ("optimizer", "final_learning_rate"),
    "opt_adamw_weight_decay": ("optimizer", "weight_decay"),
    "opt_adamw_epsilon": ("optimizer", "eps"),
    "seed": ("seed",),
}
"""Keys of MLPerf, and the place where a recorded recipe has them."""


def as_mlperf(results: Sequence[Result]) -> str:
    """The lines of all runs, one run after the other."""
    return "".join(f":::MLLOG {json.dumps(event)}\n" for r in results for event in _events(r))


def _events(result: Result) -> Iterator[dict[str, Any]]:
    """The events of a run. Their times are in milliseconds: the known start of the run (for a log,
    the time of its file) plus its iterations. Compilation is not in between."""
    run, file = result.run, str(result.run.path)
    now = run.started.timestamp() if run.started else 0.0
    settings = run.record.get("recipe")
    settings = settings if isinstance(settings, Mapping) else {}

    def event(kind: str, key: str, value: Any = None, **metadata: Any) -> dict[str, Any]:
        where = {"file": file, "lineno": 0, **metadata}
        return {"namespace": "", "time_ms": round(1000 * now), "event_type": kind, "key": key,
                "value": value, "metadata": where}  # fmt: skip

    tokens = run.tokens or 0
    yield event("INTERVAL_START", "init_start")
    for key, path in SETTINGS.items():
        value: Any = settings
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            yield event("POINT_IN_TIME", key, value)
    yield event("INTERVAL_END", "init_stop")
    yield event("INTERVAL_START", "run_start")
    for step, seconds in sorted(run.steps.seconds.items()):
        if not 0 < seconds < LARGEST:
            continue  # the run failed for this reason
        now += seconds
        rates = {"train_step_time": seconds}
        if tokens and run.gpus:
            rates["tokens_per_s_per_gpu"] = tokens / seconds / run.gpus
        yield event("POINT_IN_TIME", "tracked_stats", rates, step=step)
    verdict = {"verdict": result.verdict.name, "reason": result.verdict.reason}
    status = "success" if result.complete else "aborted"
    yield event("INTERVAL_END", "run_stop", None, status=status, label=run.label, **verdict)
