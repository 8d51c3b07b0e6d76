"""launch/sweep.py runs.yaml: submits the missing runs of a list of benchmarks, shows their states.

The list has one entry per line, with `repeats` and `set` if they are wanted:

    - {config: llama31_8b_bf16, gpus: [8, 16], repeats: 3, set: [execution.remat=full]}

`--show` submits nothing. `--report` compares what has run with the published figures, writes the
page `<list>.html`, and ends with the exit status of `jaxbench report`. Options after `--` go to
launch/submit.py for every job, and options after another `--` go to `train`. Submitted jobs are
stored in `<list>.jobs.json`. A failed job is submitted again. Every entry is checked before the
first one is submitted.
"""

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import sbatch
import submit

from jaxbench.base.errors import RecipeError
from jaxbench.base.files import owned, write_json, write_whole
from jaxbench.base.quantity import figure
from jaxbench.base.terminal import Parser
from jaxbench.cluster.jobs import queue, record_of, state
from jaxbench.recipe import recipes, strict_yaml
from jaxbench.report import command as report
from jaxbench.report.folders import is_run
from jaxbench.report.page import page

DONE = ("completed", "running", "pending")
"""States in which we do not submit a run again."""

KEYS = ("config", "gpus", "repeats", "set")


@dataclass(frozen=True)
class Entry:
    """One run of the list. `repeat` is its number among the repeats of its line. `where` names the
    line in messages."""

    config: str
    gpus: int
    repeat: int
    settings: tuple[str, ...]
    where: str

    def key(self, options: list[str]) -> str:
        """Identifies the run by its recipe, GPUs, repeat and settings, and by the options of all
        runs."""
        path = recipes.find(self.config).resolve()
        name = path.stem if path.parent == recipes.config_folder().resolve() else str(path)
        texts = [*(f"--set={text}" for text in self.settings), *options]
        return " ".join([name, str(self.gpus), str(self.repeat), *map(shlex.quote, texts)])

    def job(self, options: list[str]) -> submit.Job:
        """The checked job. Raises a RecipeError that names the entry."""
        settings = [part for text in self.settings for part in ("--set", text)]
        argv = [self.config, "--gpus", str(self.gpus), *settings, *options]
        try:
            args = submit.parse_arguments(argv)
            if args.gpus != self.gpus:
                raise RecipeError("--gpus after -- contradicts the list; change it there")
            if args.dry_run or submit.Variables(os.environ).flag("DRY_RUN"):
                raise RecipeError("a sweep has no dry run; use --show, which submits nothing")
            job = submit.make_job(args, os.environ)
            sbatch.check(job.results, job.settings)
        except RecipeError as error:
            raise RecipeError(f"{self.where}: {error}") from error
        return job

    def __str__(self) -> str:
        settings = "".join(f"  {text}" for text in self.settings)
        return f"{Path(self.config).stem:20} {self.gpus:5} GPUs  run {self.repeat}{settings}"


def entries(path: Path) -> list[Entry]:
    """All runs of a list. Raises a RecipeError that names the bad entry."""
    try:
        content = strict_yaml.load(path.read_text())
    except ValueError as error:
        raise RecipeError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(content, list) or not content:
        raise RecipeError(f"{path}: expected a list of {{config, gpus, repeats, set}}")
    runs = []
    for number, entry in enumerate(content, 1):
        where = f"{path}, entry {number} ({json.dumps(entry, default=str)})"
        if not (isinstance(entry, dict) and {"config", "gpus"} <= entry.keys() <= set(KEYS)):
            raise RecipeError(f"{where}: expected config, gpus and, optionally, repeats and set")
        config, repeats = entry["config"], entry.get("repeats", 1)
        counts, settings = (
            value if isinstance(value, list) else [value]
            for value in (entry["gpus"], entry.get("set", []))
        )
        if not isinstance(config, str) or type(repeats) is not int or repeats < 1:
            raise RecipeError(f"{where}: expected a recipe as config, a number above 0 as repeats")
        if not counts or not all(type(count) is int for count in counts):
            raise RecipeError(f"{where}: expected a number, or a list of numbers, as gpus")
        texts = tuple(map(str, settings))
        runs += [Entry(config, n, i, texts, where) for n in counts for i in range(repeats)]
    return runs


def new(run: Entry, jobs: Mapping[str, Any]) -> str:
    """`new`. If the run was submitted before with other options, adds these options."""
    base = run.key([])
    rests = [key[len(base) :] for key in jobs if key.startswith(f"{base} ") or key == base]
    others = [rest.strip() or "no options" for rest in rests if not rest.startswith(" --set=")]
    return f"new; submitted with {', with '.join(others)}" if others else "new"


def result(job: dict[str, str]) -> str:
    """The step time and the rate of a completed run."""
    record = record_of(Path(job["folder"]))
    seconds = figure(record, "summary", "step_time_s", "mean")
    rate = figure(record, "summary", "tokens_per_s_per_gpu")
    return f"{seconds:.4g} s, {rate:.1f} tokens/s per GPU" if seconds and rate else ""


def read_jobs(store: Path) -> dict[str, dict[str, str]]:
    """The submitted jobs, by `Entry.key`."""
    try:
        jobs = json.loads(store.read_text()) if store.exists() else {}
        return {
            key: {name: str(job[name]) for name in ("id", "folder")} for key, job in jobs.items()
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RecipeError(f"{store}: not what a sweep wrote ({error}); move it away") from error


def submitted(run: Entry, job: submit.Job) -> dict[str, str]:
    """Submits the job of a run. Returns its id and its folder. Raises a RecipeError that names the
    entry."""
    try:
        number = submit.submit(job)
    except RecipeError as error:
        raise RecipeError(f"{run.where}: {error}") from error
    return {"id": number, "folder": str(job.folder(number))}


def sweep(path: Path, show: bool, options: list[str]) -> list[str]:
    """Submits the missing runs of a list and prints the state of every run. Returns the folders of
    the runs that have a record."""
    store = path.with_suffix(".jobs.json")
    queued, jobs = queue(), read_jobs(store)
    runs: dict[str, Entry] = {}
    for run in entries(path):
        if (first := runs.setdefault(run.key(options), run)) is not run:
            raise RecipeError(f"{run.where}: the same run as {first.where}; use repeats")
    states: dict[str, str] = {}
    for key, run in runs.items():
        if job := jobs.get(key):
            states[key] = state(job["id"], record_of(Path(job["folder"])), queued)
        else:
            states[key] = new(run, jobs)
    missing = [key for key, value in states.items() if value not in DONE and not show]
    checked = {key: runs[key].job(options) for key in missing}
    for key, run in runs.items():
        if key in checked:
            warnings = sbatch.refusal(checked[key].script())
            jobs[key] = submitted(run, checked[key])
            write_json(store, jobs)
            states[key] += ", submitted"
            for line in warnings:
                print(f"warning: {run.where}: job {jobs[key]['id']}: {line}", file=sys.stderr)
        done = states[key] == "completed"
        text = result(jobs[key]) if done else jobs.get(key, {}).get("id", "")
        print(f"{run}  {states[key]:27} {text}")
    folders = [jobs[key]["folder"] for key in runs if key in jobs]
    return [folder for folder in folders if is_run(Path(folder))]


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns 0, or 2 for a mistake; with `--report`, the report's exit
    status."""
    arguments = sys.argv[1:] if argv is None else argv
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = Parser(
        prog="launch/sweep.py", description=__doc__.splitlines()[0], allow_abbrev=False,
        usage="%(prog)s LIST [--show] [--report] [-- options of launch/submit.sh [-- options of "
        "train]]",
    )  # fmt: skip
    parser.add_argument("list", type=Path)
    parser.add_argument(
        "--show", action="store_true", help="show the state of each run; submit nothing"
    )
    parser.add_argument("--report", action="store_true", help="compare with published figures")
    try:
        args = parser.parse_args(arguments[:at])
        store = args.list.with_suffix(".jobs.json")
        # Another sweep of the same list at the same time would submit its jobs again.
        with contextlib.nullcontext() if args.show else owned(store):
            folders = sweep(args.list, args.show, arguments[at + 1 :])
        if args.report and folders:
            path = args.list.with_suffix(".html")
            results = report.report([Path(folder) for folder in folders], None)
            write_whole(path, page(results, "published"))
            print(f"page: {path}")
            return report.main(folders)
    except (RecipeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
