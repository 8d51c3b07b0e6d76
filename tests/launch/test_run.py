"""`launch/run.sh`, what one process of a job runs, on a node that lacks something."""

import os
import subprocess

from commands import ROOT


def test_a_node_without_the_environment_says_so_in_one_line(tmp_path):
    """And is the first that fails, with the status of a mistake: the job ends."""
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")  # one that cannot find jax
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "launch" / "run.sh", "--config", "llama31_8b_bf16"], capture_output=True, text=True,
        env=os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "JAXBENCH_VENV": str(tmp_path / "none"),
            "JAXBENCH_EXITS": str(tmp_path), "SLURM_PROCID": "5", "SLURMD_NODENAME": "n7",
        },
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: node n7: no Python with jax, neither ")
    assert (tmp_path / "first" / "rank").read_text() == "5 n7 2\n"
