"""Decides why one start of a job ended, and whether the job is requeued.

    verdict.py STEP FOLDER START STATUS MESSAGES

`slurm.sbatch` runs this after `srun`. STEP is `check`, `train`, or `ending` while Slurm ends the
job. START is the number of the start from 0, which counts Slurm's own requeues too. STATUS is the
exit status of `srun`. MESSAGES is a file with the standard error of `srun`. The program prints a
line for each value of `main`, and writes the verdict into `job.json`, `run.json` and the record's
log.

If Slurm ended the job, that is the reason. Otherwise the first failure decides, and later failures
are its consequences. A check says in `check.json` what it found. A rank says it by its exit status
(`RULES`) and its last words (`run.sh`). If a process was not started or was killed, srun's first
error says it (`slurm_says.py`). The folder of the job may be what fails, so we read there only the
logs of processes that could not say why they ended. This runs outside of containers, with any
Python from 3.7 on.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from typing import NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from slurm_says import TASK, ended_by_slurm, job_state, one_node, slurms, srun_error, still_runs

from jaxbench.base.errors import STATUS

FIRST = r"(?m)^rank (\d+) on (\S+): exit (\d+)$"
"""The line that `run.sh` prints when a process failed."""

ABORTED = 128 + signal.SIGABRT
CONSEQUENCES = {
    *(128 + number for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGABRT)),
    *(STATUS[cause] for cause in ("network", "lost")),
}
"""Exit statuses of ranks that the failure of another rank can cause."""

NETWORK = "{where}: it lost the network or another process: "
JAX = r"distributed service detected fatal errors\..* absl::Status: (.*(?:\n\S*\d)*)"
CUDA = r"Check failed: .*?(CUDA_ERROR_\w+[^)\n]*)"
GLOO = r"instance of 'gloo::IoException'\nwhat\(\):\s*(.*(?:\n\S*\d)*)"


class Rule(NamedTuple):
    """What an exit status of the first rank that failed says (None: any), if the `pattern` is in
    the log of that rank: the status and cause for the record, the reason, and whether a job that
    saves is requeued."""

    exit_status: int | None
    status: str
    cause: str
    reason: str
    again: bool
    pattern: str = ""


RULES = (
    Rule(128 + signal.SIGUSR1, "interrupted", "time limit", "time limit", again=True),
    Rule(128 + signal.SIGTERM, "interrupted", "SIGTERM", "SIGTERM to {where}", again=True),
    Rule(128 + signal.SIGINT, "interrupted", "SIGINT", "SIGINT to {where}", again=True),
    *(Rule(STATUS[cause], "failed", cause, "{where}: {message}", again=False)
      for cause in ("failed", "mistake", "numbers", "memory", "storage")),
    Rule(STATUS["gpu"], "failed", "gpu", "{where}: its GPU failed: {message}", again=True),
    Rule(STATUS["network"], "failed", "network", NETWORK + "{message}", again=True),
    *(Rule(STATUS[cause], "failed", cause, "{message}", again=True) for cause in ("lost", "hang")),
    Rule(ABORTED, "failed", "network", NETWORK + "{quote}", True, JAX),
    Rule(ABORTED, "failed", "network", NETWORK + "{quote}", True, GLOO),
    Rule(ABORTED, "failed", "gpu", "{where}: its GPU failed: {quote}", True, CUDA),
    Rule(None, "failed", "lost", "lost {where} ({how}){last_step}", again=True),
)  # fmt: skip
"""The first rule that matches gives the verdict. The causes `lost` and `hang` name ranks
themselves. After the notice of a time limit a job is requeued only with --requeue-at-time-limit.

JAX aborts a rank when the coordinator, or the network to it, is gone. Without a watchdog it also
aborts a rank when other ranks are silent; the numbers of these ranks follow in its message, one per
line. Gloo aborts a rank when a connection is lost, and XLA when its GPU fails as an asynchronous
operation begins.
"""


def read(path):
    """The content of a file; empty if there is none."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def parsed(path):
    """The object in a JSON file; empty if there is none."""
    try:
        content = json.loads(read(path))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def lines_of(step, folder, rank, start):
    """The lines that a rank printed in this start. `run.sh` marks where each start begins."""
    name = f"rank-{rank}.log" if step == "train" else f"start-{start + 1}/check-{rank}.log"
    lines = read(os.path.join(folder, "ranks", name)).splitlines()
    mark = f"start {start + 1}, on "
    seen = max((n for n, line in enumerate(lines, 1) if line.startswith(mark)), default=0)
    return [line.strip() for line in lines[seen:]]


def message(lines):
    """The line that says why a rank failed, without the name of the recipe."""
    for pattern in (r"error: ", r"failed: ", r"[\w.]*(Error|Exception|Failed)\b"):
        matches = [line for line in lines[-200:] if re.match(pattern, line)]
        if matches:
            return re.sub(r"^(error|failed: \S+, row \S+ \(\w+\)): ", "", matches[-1])
    return next((line for line in reversed(lines) if line), "it said nothing")


def first_rule(code, lines):
    """The first rule for the exit status and the log of a rank, and the first sentence of what its
    pattern finds in the log."""
    log = "\n".join(lines[-200:])
    for rule in RULES:
        match = re.search(rule.pattern, log)
        if match and rule.exit_status in (code, None):
            quote = match.group(1) if rule.pattern else ""
            return rule, " ".join(quote.partition(". ")[0].split())[:300]
    raise AssertionError("the last rule matches everything")


def first_failure(messages):
    """The match of `FIRST` that decides. None if no rank said how it ended. JAX aborts the other
    ranks when rank 0 ends, and one of them may say so a moment earlier than rank 0."""
    first = re.search(FIRST, messages)
    zero = re.search(FIRST.replace(r"\d+", "0", 1), messages)
    if zero and int(first.group(3)) == ABORTED and int(zero.group(3)) not in CONSEQUENCES:
        return zero
    return first


def last_step(folder):
    """The last step in the record. None before the first step."""
    steps = re.findall(r'"step": (\d+)', read(os.path.join(folder, "steps.jsonl")))
    return int(steps[-1]) if steps else None


class Verdict(NamedTuple):
    """How a start ended: the status and cause for the record, the reason, the exit status of the
    batch script, whether a job that saves is requeued, and the node that is at fault."""

    status: str
    cause: str | None
    reason: str
    code: int
    again: bool = False
    nodes: str = ""


def continues_at_limit():
    """True for a job with --requeue-at-time-limit."""
    return os.environ.get("JAXBENCH_REQUEUE_AT_LIMIT") == "true"


def verdict(step, folder, start, status, messages, state):
    """The verdict, given the exit status of `srun`, its standard error, and the state of the job
    (`job_state`)."""
    first = first_failure(messages)
    code = int(first.group(3)) if first else status
    by_slurm = ended_by_slurm(state, start, messages)
    # In a grace time a run may also end by itself.
    if by_slurm and (status != 0 or not still_runs(state)):
        cause, requeued = by_slurm
        waits = cause == "preempted" or (cause == "time limit" and continues_at_limit())
        again = waits and not requeued
        return Verdict("interrupted", cause, cause, code, again)
    if status == 0:
        if parsed(os.path.join(folder, "run.json")).get("status") == "completed" and (
            last_step(folder) is not None
        ):
            return Verdict("completed", None, "", 0)
        reason = "the record of the run is not complete: was its folder changed while it ran?"
        return Verdict("failed", "storage", reason, STATUS["storage"])
    if step == "check":
        found = by_check(folder)
        if not found and "DUE TO TIME LIMIT" in messages:
            found = Verdict("failed", "hang", "it did not end within its time limit", code)
        found = found or by_processes(step, folder, start, code, first, messages)
        return found._replace(reason="check: " + found.reason, again=False)
    return by_processes(step, folder, start, code, first, messages)


def by_check(folder):
    """The verdict of a check that measured something (`check.json`). None if the check did not."""
    report = parsed(os.path.join(folder, "check.json"))
    if not report.get("status"):
        return None
    cause = next(cause for cause, status in STATUS.items() if status == report["status"])
    reason = "; ".join(report["faults"][:3])
    return Verdict("failed", cause, reason, report["status"], nodes=report["exclude"])


def by_processes(step, folder, start, code, first, messages):
    """The verdict according to the `first` rank that failed, with the exit status `code`, or
    according to srun's first error."""
    began = os.path.exists(os.path.join(folder, "run.json"))
    error = srun_error(messages)
    if error and (not first or code in CONSEQUENCES):
        cause, reason, node = error
        status = STATUS.get(cause, STATUS["failed"])
        return Verdict("failed", cause, reason, status, began and cause != "memory", node)
    if not first:  # no rank could say how it ended
        task = re.search(TASK, messages)
        if task:
            reason = "lost rank {rank} on {node} ({what})".format(**task.groupdict())
            return Verdict("failed", "lost", reason, code, True, one_node(task.group("node")))
        errors = [line for line in messages.splitlines() if "error" in line][:1]
        reason = "; ".join(["lost a node, or no process could be started", *errors])
        return Verdict("failed", "lost a node", reason, code, began)
    rank, node = int(first.group(1)), first.group(2)
    words = re.findall(f"(?m)^rank {rank} on \\S+: (error: .*)$", messages)[:1]
    lines = [] if words else lines_of(step, folder, rank, start)
    rule, quote = first_rule(code, lines)
    try:
        how = "killed by " + signal.Signals(code - 128).name
    except ValueError:
        how = f"status {code}"
    trained = last_step(folder)
    reason = rule.reason.format(
        where=f"rank {rank} on {node}", message=message(words or lines), quote=quote, how=how,
        last_step=", before the first step" if trained is None else f", after step {trained}",
    )  # fmt: skip
    again = rule.again and (rule.cause != "time limit" or continues_at_limit())
    named = re.search(r"rank \d+ on ([^\s:]+)", reason)
    at_fault = named.group(1) if named and rule.cause in ("gpu", "lost") else ""
    return Verdict(rule.status, rule.cause, reason, code, again, at_fault)


def complete(folder, name, verdict, slurm):
    """Writes the verdict and what Slurm says into a record, `job.json` or `run.json`. A completed
    record keeps its verdict. Returns the record's recipe; None if there is no such record, or if it
    is completed."""
    path = os.path.join(folder, name)
    record = parsed(path)
    if not record.get("recipe"):
        return None
    record.update({"slurm": slurm} if slurm else {})
    if record.get("status") != "completed":
        record["status"], record["cause"] = verdict.status, verdict.cause
        record["reason"] = verdict.reason or None
    with open(path + ".verdict", "w") as file:
        file.write(json.dumps(record, indent=2) + "\n")
    os.replace(path + ".verdict", path)
    return record["recipe"] if record["status"] != "completed" else None


def record(folder, verdict, slurm):
    """Completes both records, and also the log of the run unless the run is completed."""
    complete(folder, "job.json", verdict, slurm)
    recipe = complete(folder, "run.json", verdict, slurm)
    if recipe:
        with open(os.path.join(folder, "log-{recipe}_{row}.out".format_map(recipe)), "a") as file:
            file.write(f"{verdict.status}: {verdict.reason}\n")


def requeued(folder, start):
    """The file that marks a start as followed by a restart of our own."""
    return os.path.join(folder, "ranks", f"start-{start + 1}", "requeued")


def restart(folder, start, cause):
    """Counts a restart, with a file of this start. Returns why there is no restart, or an empty
    text.

    Slurm's count includes its own requeues, which are not limited. `slurm.sbatch` removes the file
    if Slurm refuses the requeue. The file has the cause and the last step: if the same failure
    comes at the same step again, it would come at every start.
    """
    if os.environ.get("JAXBENCH_RESUME") != "true":
        return "it does not save, so it ends"
    before = [read(requeued(folder, n)) for n in range(start)]
    restarts = [text for text in before if text]
    if len(restarts) >= int(os.environ.get("JAXBENCH_RESTARTS", "0")):
        return "all restarts are used up"
    failure = f"{cause} {last_step(folder)}\n"
    if restarts[-1:] == [failure]:
        return "the same as in the last restart, at the same step, so it ends"
    try:
        with open(requeued(folder, start), "w") as file:
            file.write(failure)
    except OSError as error:
        return f"it ends, since restarts cannot be counted: {error.strerror}"
    return ""


def main(step, folder, start, status, messages):
    """What `slurm.sbatch` does now: the exit status, the seconds after which the job is requeued
    (or an empty text), the nodes that the requeued job leaves out, and the last line of the main
    log."""
    start, status, state = int(start), int(status), job_state()
    messages = read(messages)
    if step == "ending":
        by_slurm = ended_by_slurm(state, start, messages)
        if by_slurm:
            reason = f"{by_slurm[0]}; killed before it had ended"
            found = Verdict("interrupted", by_slurm[0], reason, 128 + signal.SIGTERM)
            for name in ("job.json", "run.json"):
                complete(folder, name, found, slurms(state, found))
        return ()
    found = verdict(step, folder, start, status, messages, state)
    excluding = os.environ.get("JAXBENCH_EXCLUDE_SLOW") == "true"
    delay, refusal = "", ""
    if step == "check" and found.nodes and excluding:
        delay = "0"
    elif found.again and found.cause == "preempted":
        delay = "0"  # Slurm would requeue the job itself at the end of its grace time
    elif found.again:
        refusal = restart(folder, start, found.cause)
        counted = [s for s in range(start + 1) if read(requeued(folder, s))]
        delay = "" if refusal else str(30 * (len(counted) - 1))
    if refusal:
        found = found._replace(reason=f"{found.reason}; {refusal}")
    try:
        record(folder, found, slurms(state, found))
    except OSError as error:
        unsaid = f"its record does not say so: {error.strerror}"
        found = found._replace(reason=f"{found.reason}; {unsaid}")
    nodes = found.nodes if excluding else ""
    line = f"{found.status}: {found.reason}" if found.reason else found.status
    return found.code, delay, nodes, line


if __name__ == "__main__":
    print(*main(*sys.argv[1:]), sep="\n")
