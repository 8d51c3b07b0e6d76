"""launch/sweep.py runs.yaml: submits a list of benchmarks, skips what is there, shows the state.

The list has one entry per line:

    - {config: configs/llama31_8b_bf16.yaml, gpus: [8, 16], repeats: 3}

`--show` submits nothing. Options behind `--` go to launch/submit.py for every job. What was
submitted is kept in `<list>.jobs.json` beside the list; a job that failed is submitted again.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent))

import submit

from jaxbench.errors import RecipeError
from jaxbench.files import write_json

DONE = ("completed", "running", "pending")
"""States of which no second job is wanted."""


def entries(path: Path) -> list[tuple[str, int, int]]:
    """(recipe, GPUs, repeat) of every run in the list. Raises RecipeError for anything else."""
    try:
        runs = []
        for entry in yaml.safe_load(path.read_text()):
            config, gpus, repeats = entry["config"], entry["gpus"], entry.get("repeats", 1)
            counts = gpus if isinstance(gpus, list) else [gpus]
            runs += [(config, count, n) for count in counts for n in range(repeats)]
        return runs
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise RecipeError(
            f"{path}: expected a list of {{config, gpus, repeats}}: {error}"
        ) from error


def state(job: dict[str, str], queued: set[str]) -> str:
    """`completed`, `failed`, `interrupted`, `running` or `pending`, or `lost`: neither in Slurm's
    queue nor ended with a record."""
    path = Path(job["folder"]) / "run.json"
    recorded = json.loads(path.read_text())["status"] if path.exists() else "pending"
    if recorded in ("running", "pending", "interrupted") and job["id"] not in queued:
        return "lost" if recorded != "interrupted" else recorded
    return recorded


def result(job: dict[str, str]) -> str:
    """The step time and rate of a completed run."""
    summary = json.loads((Path(job["folder"]) / "run.json").read_text()).get("summary")
    if summary is None:
        return ""
    rate, time = summary["tokens_per_s_per_gpu"], summary["step_time_s"]["mean"]
    return f"{time:.4g} s, {rate:.1f} tokens/s per GPU"


def main(argv: list[str] | None = None) -> int:
    """The command; returns 0, or 2 for a mistake."""
    arguments = sys.argv[1:] if argv is None else argv
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="launch/sweep.py", description=__doc__.splitlines()[0])
    parser.add_argument("list", type=Path)
    parser.add_argument("--show", action="store_true", help="submit nothing")
    args = parser.parse_args(arguments[:at])
    store = args.list.with_suffix(".jobs.json")
    jobs = json.loads(store.read_text()) if store.exists() else {}
    squeue = ["squeue", "--me", "--noheader", "--format=%A"]
    try:
        queued = set(subprocess.run(squeue, capture_output=True, text=True).stdout.split())
        for config, gpus, repeat in entries(args.list):
            key = f"{Path(config).stem} {gpus} {repeat}"
            now = state(jobs[key], queued) if key in jobs else "new"
            if now not in DONE and not args.show:
                job = submit.make_job(
                    submit.parse_arguments([config, "--gpus", str(gpus), *arguments[at + 1 :]]),
                    os.environ,
                )  # fmt: skip
                number = submit.submit(job)
                jobs[key] = {"id": number, "folder": str(job.results / number)}
                write_json(store, jobs)
                now = f"{now}, submitted"
            text = result(jobs[key]) if now == "completed" else jobs.get(key, {}).get("id", "")
            print(f"{Path(config).stem:20} {gpus:5} GPUs  run {repeat}  {now:18} {text}")
    except (RecipeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
