"""Decides why one start of a job ended, and whether the job is requeued.

    verdict.py FOLDER START STATUS MESSAGES

`slurm.sbatch` runs this after `srun`. START is the number of the start from 0, which counts Slurm's
own requeues too; STATUS is the exit status of `srun`; MESSAGES is a file with the standard error of
`srun`. Prints the last line of the main log, and writes the same into `run.json` and the record's
log. Exit status 75: requeue the job.

If Slurm ended the job, that is the reason (`SLURM`). Otherwise the first rank that failed decides
(`RULES`): MESSAGES has the exit status of each (`run.sh`), and later failures are consequences. The
folder of the job may be what fails: only the logs of processes that could not say why they ended
are read there. Runs outside of containers, with any Python from 3.7 on.
"""

import json
import os
import re
import signal
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from jaxbench.errors import STATUS

REQUEUE = 75
NO, YES, AT_LIMIT = "no", "yes", "with --requeue-at-time-limit"

SLURM = (
    ("DUE TO JOB REQUEUE", "requeued"),
    ("DUE TO PREEMPTION", "preempted"),
    ("DUE TO NODE FAILURE", "lost a node"),
    ("srun: error: Node failure on", "lost a node"),
    ("DUE TO TIME LIMIT", "time limit"),
)
"""Messages of slurmstepd and srun when Slurm ends a step, and the cause that each stands for."""

ENDS = {
    "cancelled": "CANCELLED", "time limit": "TIMEOUT", "preempted": "PREEMPTED",
    "lost a node": "NODE_FAIL", "requeued": "REQUEUED",
}  # fmt: skip
"""Slurm's state of a job by the cause for which Slurm ended it."""

FIRST = r"(?m)^rank (\d+) on (\S+): exit (\d+)$"
"""Line of `run.sh` when a process failed."""

ABORTED = 128 + signal.SIGABRT
NETWORK = "{where}: it lost the network or another process: "
JAX = r"distributed service detected fatal errors\..* absl::Status: (.*(?:\n\S*\d)*)"
CUDA = r"Check failed: .*?(CUDA_ERROR_\w+[^)\n]*)"
GLOO = r"instance of 'gloo::IoException'\nwhat\(\):\s*(.*(?:\n\S*\d)*)"

RULES = (
    # exit status, log, pattern, status, cause, reason, requeue a job that saves
    (128 + signal.SIGUSR1, "", "", "interrupted", "time limit", "time limit", AT_LIMIT),
    (128 + signal.SIGTERM, "", "", "interrupted", "SIGTERM", "SIGTERM to {where}", YES),
    (128 + signal.SIGINT, "", "", "interrupted", "SIGINT", "SIGINT to {where}", YES),
    *((STATUS[cause], "", "", "failed", cause, "{where}: {message}", NO)
      for cause in ("failed", "mistake", "numbers", "memory", "storage")),
    (STATUS["gpu"], "", "", "failed", "gpu", "{where}: its GPU failed: {message}", YES),
    (STATUS["network"], "", "", "failed", "network", NETWORK + "{message}", YES),
    *((STATUS[cause], "", "", "failed", cause, "{message}", YES) for cause in ("lost", "hang")),
    (ABORTED, "rank", JAX, "failed", "network", NETWORK + "{quote}", YES),
    (ABORTED, "rank", GLOO, "failed", "network", NETWORK + "{quote}", YES),
    (ABORTED, "rank", CUDA, "failed", "gpu", "{where}: its GPU failed: {quote}", YES),
    (None, "", "", "failed", "lost", "lost {where} ({how}){last_step}", YES),
)  # fmt: skip
"""The first rule that matches gives the verdict: exit status of the first rank that failed (None:
any), and a pattern in the log of that rank. The causes `lost` and `hang` name ranks themselves.

JAX aborts a rank when the coordinator, or the network to it, is gone, and without a watchdog when
other ranks are silent, whose numbers follow in its message, one a line. Gloo aborts it when a
connection is lost, XLA when its GPU fails as an asynchronous operation begins.
"""

OWN = {status for cause, status in STATUS.items() if cause not in ("network", "lost")}
"""Exit statuses of a process whose failure is no consequence of another one's."""


def read(path):
    """The content of a file; empty if there is none."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def job_state():
    """The fields of `scontrol show job`; empty where Slurm does not answer."""
    command = ["scontrol", "show", "job", "--oneliner", os.environ.get("SLURM_JOB_ID", "")]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    fields = done.stdout.decode(errors="replace").split()
    return dict(field.partition("=")[::2] for field in fields)


def ended_by_slurm(state, start, messages):
    """(cause, whether Slurm requeues the job itself); None if Slurm did nothing to the job.

    A job that is being ended is COMPLETING, for whatever cause; one that Slurm requeues has a
    higher count of restarts than this start.
    """
    requeued = int(state.get("Restarts") or start) > start
    if not requeued and state.get("JobState") in (None, "RUNNING"):
        return None
    causes = [cause for text, cause in SLURM if text in messages]
    return (causes or ["requeued" if requeued else "cancelled"])[0], requeued


def lines_of(folder, rank, start):
    """The lines that a rank printed in this start: `run.sh` marks where each start begins."""
    lines = read(os.path.join(folder, "ranks", f"rank-{rank}.log")).splitlines()
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


def last_step(folder):
    """The last step in the record; None before the first."""
    steps = re.findall(r'"step": (\d+)', read(os.path.join(folder, "steps.jsonl")))
    return int(steps[-1]) if steps else None


def verdict(folder, start, messages, state):
    """(status and cause for the record, reason, whether a job that saves is to be requeued), given
    the standard error of `srun` and the state of the job (`job_state`)."""
    at_limit = os.environ.get("JAXBENCH_REQUEUE_AT_LIMIT") == "true"
    by_slurm = ended_by_slurm(state, start, messages)
    if by_slurm:
        cause, requeued = by_slurm
        return "interrupted", cause, cause, cause == "time limit" and not requeued and at_limit
    first = re.search(FIRST, messages)
    if not first:  # none lived to say how it ended
        errors = [line for line in messages.splitlines() if "error" in line][-1:]
        reason = "; ".join(["lost a node, or no process could be started", *errors])
        return "failed", "lost a node", reason, os.path.exists(os.path.join(folder, "run.json"))
    if int(first.group(3)) == ABORTED:  # by JAX, perhaps, because rank 0 had ended a moment before
        zero = re.search(FIRST.replace(r"\d+", "0", 1), messages)
        first = zero if zero and int(zero.group(3)) in OWN else first
    rank, node, code = int(first.group(1)), first.group(2), int(first.group(3))
    words = re.findall(f"(?m)^rank {rank} on \\S+: (error: .*)$", messages)[:1]
    lines = [] if words else lines_of(folder, rank, start)
    logs = {"rank": "\n".join(lines[-200:]), "": ""}
    for exit_status, log, pattern, status, cause, reason, requeue in RULES:  # noqa: B007
        match = re.search(pattern, logs[log])
        if match and exit_status in (code, None):
            break
    quote = match.group(1) if log else ""
    if log == "rank":  # its first sentence
        quote = " ".join(quote.partition(". ")[0].split())[:300]
    try:
        how = "killed by " + signal.Signals(code - 128).name
    except ValueError:
        how = f"status {code}"
    step = last_step(folder)
    reason = reason.format(
        where=f"rank {rank} on {node}", message=message(words or lines), quote=quote, how=how,
        last_step=", before the first step" if step is None else f", after step {step}",
    )  # fmt: skip
    return status, cause, reason, requeue == YES or (requeue == AT_LIMIT and at_limit)


def slurms(state, status, messages, cause=None):
    """The record's `slurm`: what Slurm tells of the job while its batch script ends. A script that
    still runs decides the state that Slurm will show, the `cause` of Slurm that of one that does
    not."""
    if "JobState" not in state:
        return {}
    first = re.search(FIRST, messages)
    code = int(first.group(3)) if first else status
    states = {"RUNNING": "FAILED" if code else "COMPLETED", "COMPLETING": ENDS.get(cause)}
    return {
        "job": state.get("JobId"),
        "state": states.get(state["JobState"]) or state["JobState"],
        "exit_code": f"{code}:0",
        "nodes": os.environ.get("SLURM_JOB_NODELIST"),  # Slurm's has those that have not ended
        "elapsed": state.get("RunTime"),
    }


def complete_record(folder, slurm, verdict=None):
    """Writes what Slurm tells and the verdict (status, cause, reason) into run.json, and the latter
    as the last line of the record's log, unless the run is completed."""
    path = os.path.join(folder, "run.json")
    try:
        record = json.loads(read(path))
        log = "log-{recipe}_{row}.out".format_map(record["recipe"])
    except (ValueError, LookupError):
        return
    if slurm:
        record["slurm"] = slurm
    said = verdict and record.get("status") not in (None, "completed")
    if said:
        record["status"], record["cause"], record["reason"] = verdict
    with open(path + ".verdict", "w") as file:
        file.write(json.dumps(record, indent=2) + "\n")
    os.replace(path + ".verdict", path)
    if said:
        with open(os.path.join(folder, log), "a") as file:
            file.write(f"{verdict[0]}: {verdict[2]}\n")


def restart(folder, start, cause):
    """Counts a restart by a file of this start; returns why there is none, or nothing.

    Slurm's count includes its own requeues, which are not limited. `slurm.sbatch` removes the file
    if Slurm refuses the requeue. The file has the cause and the last step: a failure that comes
    again there would come at every start.
    """
    ranks = os.path.join(folder, "ranks")
    if os.environ.get("JAXBENCH_RESUME") != "true":
        return "it does not save, so it ends"
    before = [read(os.path.join(ranks, f"start-{n + 1}", "requeued")) for n in range(start)]
    restarts = [text for text in before if text]
    if len(restarts) >= int(os.environ.get("JAXBENCH_RESTARTS", "0")):
        return "all restarts are used up"
    failure = f"{cause} {last_step(folder)}\n"
    if restarts[-1:] == [failure]:
        return "the same as in the last restart, at the same step, so it ends"
    try:
        with open(os.path.join(ranks, f"start-{start + 1}", "requeued"), "w") as file:
            file.write(failure)
    except OSError as error:
        return f"it ends, since restarts cannot be counted: {error.strerror}"
    return ""


def main(folder, start, status, messages):
    """Prints the verdict; returns the exit status."""
    state, messages = job_state(), read(messages)
    if status == 0:
        complete_record(folder, slurms(state, status, messages))
        return 0
    outcome, cause, reason, requeue = verdict(folder, start, messages, state)
    refusal = restart(folder, start, cause) if requeue else ""
    if refusal:
        reason += f"; {refusal}"
    try:
        complete_record(folder, slurms(state, status, messages, cause), (outcome, cause, reason))
    except OSError as error:
        reason += f"; run.json does not say so: {error.strerror}"
    print(f"{outcome}: {reason}")
    return REQUEUE if requeue and not refusal else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
