"""The command `jaxbench jobs`: jobs of all recipes that `launch/submit.sh` submitted, read from the
folder of their results and from Slurm's queue."""

import argparse
import os
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from jaxbench.base import files
from jaxbench.base.errors import RecipeError, counted
from jaxbench.base.quantity import figure
from jaxbench.base.terminal import Parser, command, console, plain_table
from jaxbench.base.untrusted import count_lines, printable

EXAMPLES = """
    jaxbench jobs                            every job of the stage folder
    jaxbench jobs --since 2d --state failed,lost --json    for scripts: of the last two days
    jaxbench jobs status 2242                one job: its state, and why it ended
    jaxbench jobs log 2242                   its log, followed until it ends
    jaxbench jobs cancel 2242 2243           cancels jobs; a job that saves does so first
"""

Queue = dict[str, list[str]]
"""For each queued job by id: Slurm's state, the elapsed time, and its nodes or the reason why it
waits."""


def make_parser() -> Parser:
    """The parser of all options; `--help` documents them."""
    parser = Parser(
        prog="jaxbench jobs", examples=EXAMPLES,
        description="Lists jobs of launch/submit.sh, shows their status and logs, or cancels them.",
    )  # fmt: skip
    add = parser.add_argument_group("what to do").add_argument
    add(
        "action", nargs="?", default="list", choices=("list", "status", "log", "cancel"),
        help="list jobs (default), show all about a job, follow its log, or cancel it",
    )  # fmt: skip
    add("jobs", nargs="*", metavar="JOB", help="Slurm's job ids; without any, list shows all")
    add(
        "--stage",
        type=Path,
        metavar="FOLDER",
        help="stage folder (default STAGE_PATH, or all below LLMB_INSTALL)",
    )
    add = parser.add_argument_group("which jobs to list, and how").add_argument
    add(
        "--state", type=states, default=STATES, metavar="STATE,..",
        help=f"only jobs in these states: {', '.join(STATES)}",
    )  # fmt: skip
    add(
        "--since", type=moment, metavar="WHEN",
        help="only jobs that began since then: 2d or 12h ago, or a day such as 2026-11-20; a job "
        "that has not begun counts from its submission",
    )  # fmt: skip
    add("--json", action="store_true", help="print a JSON list")
    return parser


STATES = "pending", "running", "completed", "failed", "interrupted", "lost"


def states(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if unknown := [name for name in found if name not in STATES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(STATES)}")
    return found


def moment(text: str) -> datetime:
    """The time of `2d` or `12h` ago, or the beginning of a day here."""
    if ago := re.fullmatch(r"(\d{1,4})([dh])", text):
        hours = int(ago[1]) * (24 if ago[2] == "d" else 1)
        return datetime.now(UTC) - timedelta(hours=hours)
    try:
        return datetime.strptime(text, "%Y-%m-%d").astimezone()
    except ValueError:
        message = f"{text!r}: expected 2d, 12h or a day such as 2026-11-20"
        raise argparse.ArgumentTypeError(message) from None


OPTIONS = re.compile(
    r"SLURM_(?!CONF$|CLUSTERS$|JWT$)|(SBATCH|SRUN|SALLOC|SQUEUE|SCANCEL|SCONTROL)_"
)
"""Beginnings of variables that are options of Slurm's commands. They come from a shell's profile,
or from an allocation around it."""


NO_SLURM = "there is no {} here; on one host use launch/run.sh --config RECIPE"


def environment() -> dict[str, str]:
    """The environment for a command of Slurm, without options: we give all of these on the command
    line."""
    return {name: value for name, value in os.environ.items() if not OPTIONS.match(name)}


def slurm(*command: str, script: str | None = None) -> str:
    """Returns the output of a command of Slurm, which gets a batch script as its input. If it
    fails, raises RecipeError with its message."""
    try:
        done = subprocess.run(
            command, input=script, capture_output=True, text=True, env=environment()
        )
    except FileNotFoundError as error:
        raise RecipeError(NO_SLURM.format(command[0])) from error
    if done.returncode:
        raise RecipeError(f"{command[0]}: {' '.join(done.stderr.split())}")
    return done.stdout


def queue() -> Queue:
    """This user's jobs in Slurm's queue. Raises RecipeError if Slurm does not answer, since jobs
    would seem lost."""
    answer = slurm("squeue", "--me", "--noheader", "--format=%A|%T|%M|%R")
    # With SLURM_CLUSTERS there is also a line with the name of the cluster.
    lines = [line for line in answer.split("\n") if line and not line.startswith("CLUSTER:")]
    return {number: rest for number, *rest in (line.split("|") for line in lines)}


def record_of(folder: Path) -> dict[str, Any]:
    """The record of a job. For a job that has not begun, a record that says only this. A record
    that cannot be read, or that is malformed, is a failed job's."""
    try:
        record = files.recorded(folder)
        if record.get("status") not in STATES:
            raise ValueError(f"status is {record.get('status')!r}")
        for name in ("recipe", "slurm"):
            if not isinstance(record.get(name) or {}, dict):
                raise ValueError(f"{name} is {record[name]!r}")
    except FileNotFoundError:
        return {"status": "pending"}
    except (OSError, ValueError) as error:
        return {"status": "failed", "reason": f"its record cannot be read: {error}"}
    return record


LOST = "it left Slurm's queue without an end in its record: its first node may be lost"


def state(number: str, record: dict[str, Any], queued: Queue) -> str:
    """The state of a job: `completed`, `running`, `pending`, `lost`, or `failed` or `interrupted`
    with the cause. A job is lost if it has not ended in its record and is not in Slurm's queue. A
    job that ended in its record and waits in the queue was requeued, and is pending. A job that
    ended in its record and that Slurm still runs saves its last state, and is running."""
    recorded = record["status"]
    if recorded == "completed":
        return recorded
    if number in queued:
        ends = recorded != "pending" and queued[number][:1] in (["RUNNING"], ["COMPLETING"])
        return "running" if ends or recorded == "running" else "pending"
    if recorded in ("running", "pending"):
        return "lost"
    cause = record.get("cause")
    return f"{recorded}: {cause}" if cause else recorded


def folders(stage: Path | None) -> dict[str, Path]:
    """The folder of each job in the results of a stage folder, by id, in the order of ids. Raises
    RecipeError if no stage folder is named, or if it has no results."""
    named, install = stage or os.environ.get("STAGE_PATH"), os.environ.get("LLMB_INSTALL")
    if not named and not install:
        raise RecipeError("give --stage FOLDER, or set STAGE_PATH, as for launch/submit.sh")
    stages = [Path(named)] if named else [*Path(install or "", "workloads").glob("*")]
    found = [path for s in stages for path in s.glob("results/*/*/*/*/*") if path.name.isdecimal()]
    if not found:
        raise RecipeError(f"no job has results in {', '.join(map(str, stages)) or install}")
    return {path.name: path for path in sorted(found, key=lambda path: int(path.name))}


def began(folder: Path) -> datetime:
    """When a job began; before that, when its folder was made."""
    try:
        return datetime.fromisoformat(record_of(folder)["started"]).astimezone()
    except (KeyError, TypeError, ValueError, OverflowError):
        return datetime.fromtimestamp(folder.stat().st_mtime, UTC)


def log(folder: Path) -> Path:
    """The main log of a job. Raises RecipeError if there is none yet."""
    for path in folder.glob(f"sbatch_jaxbench_*_{folder.name}.out"):
        return path
    raise RecipeError(f"job {folder.name} has not begun")


def described(folder: Path, queued: Queue) -> dict[str, str]:
    """A job in words: state, Slurm's state, time and nodes, the completed steps, its step time or
    the reason why it ended, and its folder."""
    record, number = record_of(folder), folder.name
    recipe, ended = record.get("recipe") or {}, record.get("slurm") or {}
    kept = [str(ended.get(key) or "") for key in ("state", "elapsed", "nodes")]
    seconds = figure(record, "summary", "step_time_s", "mean")
    told, count = state(number, record, queued), count_lines(folder / "steps.jsonl")
    return {
        "job": number,
        "run": f"{recipe.get('recipe', '')} {recipe.get('gpus', folder.parent.name)} GPUs",
        "state": told,
        **dict(zip(("Slurm", "elapsed", "nodes"), queued.get(number) or kept, strict=False)),
        "steps": f"{count} of {recipe['steps']}" if recipe.get("steps") else "",
        "step s": f"{seconds:.4g}" if seconds else "",
        "why": str(record.get("reason") or (LOST if told == "lost" else "")),
        "folder": printable(str(folder)),
    }


@command
def main(argv: Sequence[str] | None) -> int:
    """Prints, follows or cancels jobs; returns the exit status."""
    args = make_parser().parse_args(argv)
    if args.action != "list" and not args.jobs:
        raise RecipeError(f"jobs {args.action} needs the id of a job")
    filters = args.state != STATES or args.since or args.json
    if args.action != "list" and filters:
        raise RecipeError(f"jobs {args.action} takes no --state, --since and --json")
    known = folders(args.stage)
    if unknown := [number for number in args.jobs if number not in known]:
        last = ", ".join([*known][-3:])
        raise RecipeError(f"job {unknown[0]} has no results; the last jobs that have some: {last}")
    jobs = {number: known[number] for number in args.jobs or known}
    if args.action == "log":
        paths = [str(log(folder)) for folder in jobs.values()]
        follow = ["-F"] if jobs.keys() & queue().keys() else []
        return subprocess.run(["tail", "-n", "+1", *follow, *paths]).returncode
    if args.action == "cancel":
        slurm("scancel", *jobs)
        return 0
    queued = queue()
    found = [
        described(folder, queued) for folder in jobs.values()
        if not args.since or began(folder) >= args.since
    ]  # fmt: skip
    found = [line for line in found if line["state"].split(":")[0] in args.state]
    if args.json:
        print(files.as_json(found), end="")
    elif args.action == "status":
        for line in found:
            for name, value in line.items():
                print(f"{name:8} {value}")
    elif not found:
        print(f"none of {counted(len(known), 'job')} is as asked")
    else:
        *columns, _ = found[0]  # without the folder
        grid = plain_table(*columns)
        for line in found:
            grid.add_row(*(line.get(name, "") for name in columns))
        console().print(grid)
    return 0
