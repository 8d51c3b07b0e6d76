"""What Slurm says about one start of a job: whether it ended the job, which process it could not
start, and what its own tools will show. `verdict.py` uses this, with any Python from 3.7 on."""

import os
import re
import subprocess

SLURM = (
    ("DUE TO JOB REQUEUE", "requeued"),
    ("DUE TO PREEMPTION", "preempted"),
    ("DUE TO NODE FAILURE", "lost a node"),
    ("srun: error: Node failure on", "lost a node"),
    ("DUE TO TIME LIMIT", "time limit"),
)
"""Messages of slurmstepd and srun when Slurm ends a step, and the cause that each message stands
for."""

ENDS = {
    "cancelled": "CANCELLED", "time limit": "TIMEOUT", "preempted": "PREEMPTED",
    "lost a node": "NODE_FAIL", "requeued": "REQUEUED",
}  # fmt: skip
"""Slurm's state of a job, by the cause for which Slurm ended the job."""

OF_MEMORY = "out of host memory: the kernel killed the process"
COULD_NOT = "it cannot be started: {what}"
SRUN = (
    (r"execve\(\): (?P<what>.+)", "launch", COULD_NOT),
    (r"task (?P<rank>\d+) launch failed: (?P<what>.+)", "launch", COULD_NOT),
    (r"Task launch for \S+ failed on node (?P<node>[^\s:]+): (?P<what>.+)", "launch", COULD_NOT),
    (r"(?i)oom[_-]?kill|out of memory|exceeded .*memory limit", "memory", OF_MEMORY),
)
"""Errors of srun and slurmstepd (22.05) about a process that says nothing itself: the pattern, the
cause of the failure, and the reason."""

TASK = r"srun: error: (?P<node>\S+): tasks? (?P<rank>\d+)[\d,-]*: (?P<what>.+)"
"""srun's line about a process that failed."""


def answer(*command):
    """What `scontrol show` prints. Empty if Slurm does not answer."""
    try:
        done = subprocess.run(["scontrol", "show", *command], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def job_state():
    """The fields of `scontrol show job`."""
    fields = answer("job", "--oneliner", os.environ.get("SLURM_JOB_ID", "")).split()
    return dict(field.partition("=")[::2] for field in fields)


def ended_by_slurm(state, start, messages):
    """The cause, and whether Slurm requeues the job itself. None if Slurm did nothing to the job.

    A job that is being ended is COMPLETING, whatever the cause. A job that Slurm requeues has a
    higher count of restarts than this start. In a partition's grace time (GraceTime) a preempted
    job still runs, but its processes have got SIGTERM.
    """
    requeued = int(state.get("Restarts") or start) > start
    if not requeued and still_runs(state):
        return ("preempted", False) if in_grace(state) else None
    causes = [cause for text, cause in SLURM if text in messages]
    return (causes or ["requeued" if requeued else "cancelled"])[0], requeued


def still_runs(state):
    """True for a job that Slurm is not ending."""
    return state.get("JobState") in (None, "RUNNING", "SIGNALING")


def in_grace(state):
    """True if Slurm has preempted the job since it started."""
    preempted = state.get("PreemptTime", "None")
    return preempted not in ("None", "Unknown") and preempted >= state.get("StartTime", "")


def first_error(lines):
    """The parts, the cause and the reason of the first line that is in `SRUN`; None without one."""
    for line in lines:
        for pattern, cause, reason in SRUN:
            match = re.search(pattern, line)
            if match:
                return match.groupdict(), cause, reason
    return None


def srun_error(messages):
    """The cause, the reason and the node of srun's first error about a process that could not say
    itself what happened. None if there is no such error."""
    lines = [line for line in messages.splitlines() if not line.startswith("rank ")]
    error = first_error(lines)
    if error is None:
        return None
    found, cause, reason = error
    if not (found.get("rank") or found.get("node")):  # another line may say which process it was
        tasks = (re.search(TASK, line) for line in lines)
        task = next(filter(None, tasks), None)
        found = dict(task.groupdict() if task else {}, **found)
    rank = found.get("rank")
    node = one_node(found.get("node") or "") or node_of(rank)
    where = f"rank {rank} on {node or 'a node'}" if rank else node or "a node"
    return cause, f"{where}: {reason.format(**found)}", node


def one_node(name):
    """The name, if srun names one node; empty for several, as in `n[1-2]`."""
    return "" if "[" in name or "," in name else name


def node_of(rank):
    """The node of a rank, as `srun --distribution=block` places the ranks; empty if we do not
    know it."""
    names = answer("hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()
    try:
        return names[int(rank) // int(os.environ["SLURM_NTASKS_PER_NODE"])]
    except (LookupError, TypeError, ValueError):
        return ""


def slurms(state, verdict):
    """The record's `slurm`: what Slurm says about the job while its batch script ends. If the
    script still runs, its exit status decides the state that Slurm will show. If it does not, the
    cause for which Slurm ended the job decides it."""
    if "JobState" not in state:
        return {}
    running = "FAILED" if verdict.code else "COMPLETED"
    states = {"RUNNING": running, "COMPLETING": ENDS.get(verdict.cause)}
    return {
        "job": state.get("JobId"),
        "state": states.get(state["JobState"]) or state["JobState"],
        "exit_code": f"{verdict.code}:0",
        "nodes": os.environ.get("SLURM_JOB_NODELIST"),  # Slurm's list lacks nodes that have ended
        "elapsed": state.get("RunTime"),
    }
