"""Decides why one start of a job ended, and whether the job is requeued.

    verdict.py FOLDER START STATUS SEEN

`slurm.sbatch` runs this after `srun`. START is the number of the start from 0, which counts Slurm's
own requeues too; STATUS is the exit status of `srun`; SEEN is the number of lines of rank 0's log
that earlier starts wrote. Prints the last line of the main log, and writes the same into
`run.json`. Exit status 75: requeue the job.

If Slurm ended the job, that is the reason (`SLURM`). Otherwise the first rank that failed decides
(`RULES`): `run.sh` records its exit status, and later failures are consequences. Runs outside of
containers, with any Python from 3.7 on.
"""

import glob
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

KILLED, ABORTED = 128 + signal.SIGKILL, 128 + signal.SIGABRT
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
    (STATUS["lost"], "", "", "failed", "lost", "{where}: {message}", YES),
    (KILLED, "watchdog", "^(lost (?!.*{rank}).*)", "failed", "lost", "{quote}", YES),
    (KILLED, "watchdog", "^(?!lost )(.*)", "failed", "hang", "{quote}", YES),
    (ABORTED, "watchdog", "^(lost (?!.*{rank}).*)", "failed", "lost", "{quote}", YES),
    (ABORTED, "watchdog", "^(?!lost |no sign of life .*{rank})(.*)", "failed", "hang", "{quote}",
     YES),
    (ABORTED, "rank", JAX, "failed", "network", NETWORK + "{quote}", YES),
    (ABORTED, "rank", GLOO, "failed", "network", NETWORK + "{quote}", YES),
    (ABORTED, "rank", CUDA, "failed", "gpu", "{where}: its GPU failed: {quote}", YES),
    (None, "", "", "failed", "lost", "lost {where} ({how}){last_step}", YES),
)  # fmt: skip
"""The first rule that matches gives the verdict: exit status of the first rank that failed (None:
any), and a pattern in the watchdog's last line or in the log of that rank.

A watchdog that ends a job kills the ranks of its host, so the first failed rank may be one that it
killed; its last line then has the cause. If that line names the failed rank itself, the rank was
lost, or aborted by JAX, before the watchdog acted. JAX aborts a rank when the coordinator, or the
network to it, is gone, and when other ranks are silent, whose numbers follow in its message, one a
line. Gloo aborts it when a connection is lost, XLA when its GPU fails as an asynchronous operation
begins.
"""


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


def ended_by_slurm(start, messages):
    """(cause, whether Slurm requeues the job itself); None if Slurm did nothing to the job.

    A job that is being ended is COMPLETING, for whatever cause; one that Slurm requeues has a
    higher count of restarts than this start.
    """
    state = job_state()
    requeued = int(state.get("Restarts") or start) > start
    if not requeued and state.get("JobState") in (None, "RUNNING"):
        return None
    causes = [cause for text, cause in SLURM if text in messages]
    return (causes or ["requeued" if requeued else "cancelled"])[0], requeued


def lines_of(folder, rank, start, seen):
    """The lines that a rank printed in this start: in the logs of ranks other than 0, `run.sh`
    marks where each start begins."""
    lines = read(os.path.join(folder, "ranks", f"rank-{rank}.log")).splitlines()
    if rank != 0:
        mark = f"start {start + 1}, on "
        seen = max((n for n, line in enumerate(lines, 1) if line.startswith(mark)), default=0)
    return [line.strip() for line in lines[seen:]]


def message(lines):
    """The line of a rank's log that says why it failed, without the name of the recipe."""
    for pattern in (r"error: ", r"failed: ", r"[\w.]*(Error|Exception|Failed)\b"):
        matches = [line for line in lines[-200:] if re.match(pattern, line)]
        if matches:
            return re.sub(r"^failed: \S+, row \S+ \(\w+\): ", "", matches[-1])
    return next((line for line in reversed(lines) if line), "it said nothing")


def last_step(folder, rank):
    """The last step that a rank has completed, as the end of a message; empty if unknown."""
    beats = os.path.join(folder, "heartbeats")
    try:
        attempt = max(os.listdir(beats), key=float)
        beat = json.loads(read(os.path.join(beats, attempt, f"{rank}.json")))
        steps = read(os.path.join(folder, "steps.jsonl")).splitlines()
        recorded = json.loads(steps[-1])["step"] if steps else -1
        step = max(-1 if beat["completed"] is None else beat["completed"], recorded)
    except (OSError, ValueError, LookupError):
        return ""
    return f", after step {step}" if step >= 0 else ", before the first step"


def verdict(folder, start, seen):
    """(status and cause for the record, reason, whether a job that saves is to be requeued)."""
    exits = os.path.join(folder, "ranks", f"start-{start + 1}")
    srun = read(os.path.join(exits, "srun.log"))
    first_log = "\n".join(lines_of(folder, 0, start, seen))
    at_limit = os.environ.get("JAXBENCH_REQUEUE_AT_LIMIT") == "true"
    by_slurm = ended_by_slurm(start, srun + first_log)
    if by_slurm:
        cause, requeued = by_slurm
        return "interrupted", cause, cause, cause == "time limit" and not requeued and at_limit
    first = read(os.path.join(exits, "first", "rank")).split()
    if len(first) != 3:  # no rank could record its failure
        errors = [line for line in srun.splitlines() if "error" in line][-1:]
        reason = "; ".join(["lost a node, or no process could be started", *errors])
        return "failed", "lost a node", reason, os.path.isdir(os.path.join(folder, "heartbeats"))
    rank, node, code = int(first[0]), first[1], int(first[2])
    lines = lines_of(folder, rank, start, seen)
    watchdog = re.findall(r"watchdog: (.*); ending the job", first_log)
    logs = {"watchdog": watchdog[-1:], "rank": ["\n".join(lines[-200:])], "": [""]}
    for exit_status, log, pattern, status, cause, reason, requeue in RULES:  # noqa: B007
        pattern = pattern.replace("{rank}", f"rank {rank} on ")
        match = re.search(pattern, logs[log][0]) if logs[log] else None
        if match and exit_status in (code, None):
            break
    quote = match.group(1) if log else ""
    if log == "rank":  # its first sentence
        quote = " ".join(quote.partition(". ")[0].split())[:300]
    try:
        how = "killed by " + signal.Signals(code - 128).name
    except ValueError:
        how = f"status {code}"
    reason = reason.format(
        where=f"rank {rank} on {node}", message=message(lines), quote=quote, how=how,
        last_step=last_step(folder, rank),
    )  # fmt: skip
    return status, cause, reason, requeue == YES or (requeue == AT_LIMIT and at_limit)


def complete_record(folder, status, cause, reason):
    """Writes the verdict into run.json, unless the run is completed."""
    path = os.path.join(folder, "run.json")
    try:
        record = json.loads(read(path))
    except ValueError:
        return
    if record.get("status") in (None, "completed"):
        return
    record.update(status=status, cause=cause, reason=reason)
    with open(path + ".verdict", "w") as file:
        file.write(json.dumps(record, indent=2) + "\n")
    os.replace(path + ".verdict", path)


def restart(folder, start):
    """Counts a restart by an empty file of this start; returns why there is none, or nothing.

    Slurm's count includes its own requeues, which are not limited. `slurm.sbatch` removes the file
    if Slurm refuses the requeue.
    """
    ranks = os.path.join(folder, "ranks")
    if os.environ.get("JAXBENCH_RESUME") != "true":
        return "it does not save, so it ends"
    restarts = len(glob.glob(os.path.join(glob.escape(ranks), "start-*", "requeued")))
    if restarts >= int(os.environ.get("JAXBENCH_RESTARTS", "0")):
        return "all restarts are used up"
    try:
        open(os.path.join(ranks, f"start-{start + 1}", "requeued"), "w").close()
    except OSError as error:
        return f"it ends, since restarts cannot be counted: {error.strerror}"
    return ""


def main(folder, start, status, seen):
    """Prints the verdict; returns the exit status."""
    if status == 0:
        return 0
    outcome, cause, reason, requeue = verdict(folder, start, seen)
    try:
        complete_record(folder, outcome, cause, reason)
    except OSError as error:
        reason += f"; run.json does not say so: {error.strerror}"
    refusal = restart(folder, start) if requeue else ""
    print(f"{outcome}: {reason}; {refusal}" if refusal else f"{outcome}: {reason}")
    return REQUEUE if requeue and not refusal else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
