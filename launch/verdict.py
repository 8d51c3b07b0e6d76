"""How a start of a job ended, and whether the job goes on: the last lines of its main log.

    verdict.py FOLDER START STATUS SEEN

Run by `slurm.sbatch` when all processes have ended, with the start's number from 0, the exit status
of `srun`, and the lines of the first process's log that are older than the start. Slurm knows what
was done to the job, the first rank that failed (`run.sh`) why it failed, by its exit status; what
the others said in its wake does not count. Completes a `run.json` that nobody could complete. Exit
status 75: the job should be requeued. Runs with any Python from 3.7 on, outside of containers, and
so imports nothing of jaxbench.
"""

import json
import os
import re
import signal
import subprocess
import sys

REQUEUE = 75
TIME_LIMIT = 128 + signal.SIGUSR1

CAUSES = {
    1: ("failed", ""), 2: ("mistake", ""), 3: ("numbers", ""), 4: ("memory", ""),
    5: ("storage", ""), 6: ("gpu", "its GPU failed: "),
    7: ("network", "it lost the network or another process: "), 8: ("lost", ""),
}  # fmt: skip
"""What the exit status of a process says (`jaxbench.errors.STATUS`), and what goes before the
process's own words."""

MENDED = ("gpu", "network", "lost", "hang")
"""Causes after which a job that saves goes on: its work was not at fault."""


def text(path):
    """The content of a file; nothing if there is none."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def job_state():
    """What Slurm says of this job, by name; nothing where it does not answer."""
    command = ["scontrol", "show", "job", "--oneliner", os.environ.get("SLURM_JOB_ID", "")]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    words = done.stdout.decode(errors="replace").split()
    return dict(word.partition("=")[::2] for word in words)


SLURM = (
    ("DUE TO JOB REQUEUE", "requeued"),
    ("DUE TO PREEMPTION", "preempted"),
    ("DUE TO NODE FAILURE", "lost a node"),
    ("srun: error: Node failure on", "lost a node"),
    ("DUE TO TIME LIMIT", "time limit"),
)
"""What the daemon of a step says when Slurm ends it, or `srun` of a daemon that says nothing more,
and what that is called here."""


def done_by_slurm(start, messages):
    """(what Slurm did to the job, whether it runs the job again by itself); (None, False) if it did
    nothing.

    A job that is being ended is COMPLETING, whatever for; one that will run again has a higher
    count of restarts than this start.
    """
    state = job_state()
    again = int(state.get("Restarts") or start) > start
    if not again and state.get("JobState") in (None, "RUNNING"):
        return None, False
    told = [reason for words, reason in SLURM if words in messages]
    return (told or ["requeued" if again else "cancelled"])[0], again


def first_failure(exits):
    """(rank, node, status) of the first rank that failed; None if none could say so."""
    found = text(os.path.join(exits, "first", "rank")).split()
    return (int(found[0]), found[1], int(found[2])) if len(found) == 3 else None


def said_by(folder, rank, start, seen):
    """The lines that a rank printed in this start: after its first process's older ones, or after
    the line by which `run.sh` begins in the others."""
    lines = text(os.path.join(folder, "ranks", f"rank-{rank}.log")).splitlines()
    if rank != 0:
        mark = f"start {start + 1}, on "
        seen = max((n for n, line in enumerate(lines, 1) if line.startswith(mark)), default=0)
    return [line.strip() for line in lines[seen:]]


def message(lines):
    """What a rank said last of its failure."""
    for pattern in (r"error: ", r"failed: ", r"[\w.]*(Error|Exception|Failed)\b"):
        found = [line for line in lines[-200:] if re.match(pattern, line)]
        if found:  # a run that fails names its recipe first
            return re.sub(r"^failed: \S+, row \S+ \(\w+\): ", "", found[-1])
    return next((line for line in reversed(lines) if line), "it said nothing")


def alone(lines):
    """Why JAX or Gloo aborted a rank; empty if neither did. JAX does where the first process or the
    network to it is gone, and where others give no sign of life: their numbers are lines of their
    own."""
    said = "\n".join(lines[-200:])
    jax = r"distributed service detected fatal errors\..* absl::Status: "
    gloo = r"instance of 'gloo::IoException'\nwhat\(\):\s*"
    found = re.search(rf"(?:{jax}|{gloo})(.*(?:\n\S*\d)*)", said)
    return " ".join(found[1].partition(". ")[0].split())[:300] if found else ""


def last_step(folder, rank):
    """The last step that a rank is known to have completed, for a message."""
    beats = os.path.join(folder, "heartbeats")
    try:
        attempt = max(os.listdir(beats), key=float)
        beat = json.loads(text(os.path.join(beats, attempt, f"{rank}.json")))
        steps = text(os.path.join(folder, "steps.jsonl")).splitlines()
        recorded = json.loads(steps[-1])["step"] if steps else -1
        known = max(-1 if beat["completed"] is None else beat["completed"], recorded)
    except (OSError, ValueError, LookupError):
        return ""
    return f", after step {known}" if known >= 0 else ", before the first step"


def verdict(folder, start, seen):
    """(status and cause for the record, reason, whether what happened should not end the job)."""
    exits = os.path.join(folder, "ranks", f"start-{start + 1}")
    srun = text(os.path.join(exits, "srun.log"))
    said = "\n".join(said_by(folder, 0, start, seen))
    done, by_itself = done_by_slurm(start, srun + said)
    failed = first_failure(exits)
    if done is not None:
        again = not by_itself and done == "time limit" and at_limit()
        return "interrupted", done, done, again
    if failed is None:
        last = [line for line in srun.splitlines() if "error" in line][-1:]
        began = os.path.isdir(os.path.join(folder, "heartbeats"))
        words = ["lost a node, or no process could be started", *last]
        return "failed", "lost a node", "; ".join(words), began
    rank, node, code = failed
    where, lines = f"rank {rank} on {node}", said_by(folder, rank, start, seen)
    if code == TIME_LIMIT:
        return "interrupted", "time limit", "time limit", at_limit()
    if code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        name = signal.Signals(code - 128).name
        return "interrupted", name, name + " to " + where, True
    if code in CAUSES:
        cause, words = CAUSES[code]
        return "failed", cause, f"{where}: {words}{message(lines)}", cause in MENDED
    told = re.findall(r"watchdog: (.*); ending the job", said)[-1:]
    aborted = code == 128 + signal.SIGABRT
    if told and (aborted or code == 128 + signal.SIGKILL):
        lost = told[0].startswith("lost ")
        missed = lost or (aborted and told[0].startswith("no sign of life "))
        if not (missed and f"rank {rank} on " in told[0]):  # else the one that it killed others for
            return "failed", "lost" if lost else "hang", told[0], True
    if aborted and alone(lines):
        return "failed", "network", f"{where}: {CAUSES[7][1]}{alone(lines)}", True
    try:
        how = "killed by " + signal.Signals(code - 128).name
    except ValueError:
        how = f"status {code}"
    return "failed", "lost", f"lost {where} ({how}){last_step(folder, rank)}", True


def at_limit():
    """Whether a job that reaches its time limit goes on."""
    return os.environ.get("JAXBENCH_REQUEUE_AT_LIMIT") == "true"


def record_of(folder):
    """The record of the run; nothing where there is none."""
    try:
        return json.loads(text(os.path.join(folder, "run.json")))
    except ValueError:
        return {}


def complete(folder, status, cause, reason):
    """Puts the verdict into the record, unless it is complete."""
    path, record = os.path.join(folder, "run.json"), record_of(folder)
    if record.get("status") in (None, "completed"):
        return
    record.update(status=status, cause=cause, reason=reason)
    with open(path + ".verdict", "w") as file:
        file.write(json.dumps(record, indent=2) + "\n")
    os.replace(path + ".verdict", path)


def main(folder, start, status, seen):
    """Prints the verdict; the exit status."""
    if status == 0:
        return 0
    outcome, cause, reason, again = verdict(folder, start, seen)
    try:
        complete(folder, outcome, cause, reason)
    except OSError as error:
        reason += f"; run.json does not say so: {error.strerror}"
    saves = os.environ.get("JAXBENCH_RESUME") == "true"
    left = int(os.environ.get("JAXBENCH_RESTARTS", "0")) - start
    if again and saves and left <= 0:
        reason += "; all restarts are used up"
    elif again and not saves:
        reason += "; it does not save, so it ends"
    print(f"{outcome}: {reason}")
    return REQUEUE if again and saves and left > 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
