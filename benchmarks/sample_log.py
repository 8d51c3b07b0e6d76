"""Writes the sample of a job's log into docs/guide/slurm.md, from a job on a virtual Slurm.

    python benchmarks/sample_log.py

Needs what `tests/slurm.py` needs. The job is submitted, watched and cancelled; the script writes
the commands and the log, with `...` for all steps but the first two.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import slurm

GUIDE = slurm.ROOT / "docs" / "guide" / "slurm.md"
COMMANDS = """\
$ export GPUS_PER_NODE=2
$ launch/submit.sh llama31_8b_bf16 --gpus 4 --cpu -- --checkpoint --steps 50
"""


def transcript(cluster: slurm.Cluster, stage: Path) -> str:
    """The commands and what they print, with `/shared/stage` for the stage."""
    number, folder = slurm.submit(cluster, stage, "--", "--checkpoint", "--steps", "50")
    log = folder / f"sbatch_jaxbench_llama31_8b_bf16_4_{number}.out"
    slurm.wait(cluster, number, lambda _: log.exists() and "\nstep 10" in log.read_text(), 600)
    subprocess.run(["scancel", number], env=cluster.environment, check=True)
    slurm.wait(cluster, number, slurm.ended, 600)
    text = re.sub(r"(?m)^step +[2-9]  .*\n(step .*\n)*", "...\n", log.read_text())
    text = re.sub(r"(?m)^\[Gloo\].*\n", "", text)
    head = f"job {number}: {folder}\nwatch it: tail -F {log}\n$ tail -F {log}\n"
    return COMMANDS + (head + text).replace(str(stage), "/shared/stage")


def main() -> None:
    """Runs the job and replaces the sample."""
    with (
        tempfile.TemporaryDirectory() as temporary,
        slurm.Cluster(Path(temporary, "slurm")) as cluster,
    ):
        sample = transcript(cluster, Path(temporary, "stage"))
    before, start, rest = GUIDE.read_text().partition(f"```text\n{COMMANDS}")
    assert start, f"{GUIDE} has no sample of these commands"
    after = rest.partition("\n```\n")[2]
    GUIDE.write_text(f"{before}```text\n{sample}```\n{after}")


if __name__ == "__main__":
    main()
