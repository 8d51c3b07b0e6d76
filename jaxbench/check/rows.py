"""The last stage of `jaxbench qualify`: benchmarks on nodes that pass, each a job of
`launch/submit.sh`. Needs no JAX."""

import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jaxbench
from jaxbench.base.errors import RecipeError, counted
from jaxbench.base.files import json_object, write_json
from jaxbench.check.qualify_options import Options
from jaxbench.cluster.jobs import environment, queue, slurm
from jaxbench.recipe import recipes
from jaxbench.report import command as reporting
from jaxbench.report import formats
from jaxbench.report.runs import Result

FILE = "rows.json"
"""Jobs with their folders and nodes, by row."""


def gpus_of(recipe: str, words: Sequence[str], have: int) -> int | None:
    """The GPUs of a benchmark: as its options say, or else of the largest row of its recipe that
    fits. None if no row does."""
    if named := re.search(r"--gpus[ =](\d+)", " ".join(words)):
        return int(named[1])
    rows = (number for number in recipes.load(recipe).rows if isinstance(number, int))
    return max((number for number in rows if min(2, have) <= number <= have), default=None)


def submit(
    row: str, nodes: Sequence[str], options: Options, dry_run: bool = False
) -> tuple[str, str, list[str]]:
    """Submits a benchmark on the first of some nodes with `launch/submit.sh`. Returns the job's id,
    its folder and its nodes; with `dry_run` id and folder are empty. Raises
    RecipeError with the launcher's message."""
    try:
        recipe, *words = shlex.split(row) or [""]
    except ValueError as error:
        raise RecipeError(f"--row {row!r}: {error}") from error
    per_node = options.devices_per_node
    have = len(nodes) * per_node
    gpus = gpus_of(recipe, words, have)
    if gpus is None:
        raise RecipeError(f"--row {row!r}: no row of it is for 2 to {have} GPUs; add --gpus")
    if gpus > have:
        message = f"{gpus} GPUs, but {counted(len(nodes), 'node')} have {have}"
        raise RecipeError(f"--row {row!r}: {message}")
    first = [*nodes[: -(-gpus // per_node)]]
    variables = {
        "GPUS_PER_NODE": per_node, "SBATCH_ACCOUNT": options.account,
        "SBATCH_PARTITION": options.partition, "SBATCH_GPUS_PER_NODE": options.gres,
    }  # fmt: skip
    own = {name: str(value) for name, value in variables.items() if value is not None}
    launcher = Path(jaxbench.__file__).parents[1] / "launch" / "submit.sh"
    command = [str(launcher), recipe, f"--gpus={gpus}", "--check=off"]
    command += [*["--dry-run"] * dry_run, *["--cpu"] * bool(options.cpu_devices)]
    command += [f"--sbatch={text}" for text in (f"nodelist={','.join(first)}", *options.srun)]
    command += words  # last, since what follows -- is for train
    own["DRY_RUN"] = "false"  # the shell's own may say otherwise
    done = subprocess.run(command, capture_output=True, text=True, env=environment() | own)
    if done.returncode:
        raise RecipeError(f"--row {row!r}: {done.stderr.strip().removeprefix('error: ')}")
    job = re.match(r"job (\d+): (.+)", done.stdout)
    return (job[1], str(Path(job[2]).absolute()), first) if job else ("", "", first)


def run(row: str, nodes: Sequence[str], options: Options) -> dict[str, Any]:
    """The result of a benchmark, as `jaxbench report` has it: of the job in `rows.json` if that was
    made on nodes among these, and is in Slurm's queue or has a result; else of a new job. Cancels
    the job if it is interrupted."""
    path = options.output / FILE
    jobs = json_object(path)
    try:
        job, folder, made_on = jobs.get(row, ("", "", []))
        if not (set(made_on) <= set(nodes) and (job in queue() or ended_well(folder))):
            job, folder, _ = jobs[row] = submit(row, nodes, options)
            write_json(path, jobs)
        print(f"row: {row} is job {job}: {folder}")
        try:
            while waits(job):
                time.sleep(2)
        except KeyboardInterrupt:
            slurm("scancel", job)
            raise
        return formats.line(result_of(folder), "published")
    except RecipeError as error:
        return {"recipe": row, "verdict": "failed", "reason": str(error), "gpus": None,
                "step_time_s": None, "published_s": None}  # fmt: skip


def waits(job: str) -> bool:
    """True if a job is in Slurm's queue, or if Slurm does not answer."""
    try:
        return job in queue()
    except RecipeError:
        return True


def ended_well(folder: str) -> bool:
    """True if a run in this folder has a result that counts."""
    with suppress(RecipeError):
        return bool(folder) and result_of(folder).complete
    return False


def result_of(folder: str) -> Result:
    """The result of the run in a folder. Raises RecipeError if there is none."""
    (result,) = reporting.report([Path(folder)], None)
    return result
