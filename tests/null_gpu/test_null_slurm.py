"""Jobs of Slurm on null GPUs: two nodes with a process each, and a GPU that fails in one."""

import re
import subprocess
import sys
import time
from pathlib import Path

import null_gpus
import pytest
import slurm
from commands import ROOT, read

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(null_gpus.missing() is not None, reason=str(null_gpus.missing())),
    pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing())),
]

WATCHDOG_S = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm.Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


class Job:
    """A submitted job in which a GPU fails once `arm` is there."""

    def __init__(self, cluster, stage, *options, fault, steps, model="h100"):
        self.cluster, self.arm = cluster, stage / "arm"
        pairs = [word for text in null_gpus.TINY for word in ("--set", text)]
        done = subprocess.run(
            ["launch/submit.sh", "configs/llama31_8b_bf16.yaml", "--watchdog", str(WATCHDOG_S),
             *pairs, *options],
            cwd=ROOT, capture_output=True, text=True,
            env=cluster.environment | {
                "STAGE_PATH": str(stage), "JOB_TOTAL_GPUS": "2", "GPUS_PER_NODE": "1",
                "JAXBENCH_VENV": sys.prefix, "MAX_STEPS": str(steps),
                **null_gpus.environment(
                    1, model=model, memory_mb=2048, arm=self.arm, kernel_us=20, fault=fault
                ),
            },
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        number, folder = done.stdout.splitlines()[0].removeprefix("job ").split(": ")
        self.number, self.folder = number, Path(folder)

    def wait(self, condition, seconds=180):
        """Waits for a condition on Slurm's view of the job; returns that."""
        end = time.monotonic() + seconds
        while not condition(job := self.cluster.job(self.number)):
            assert time.monotonic() < end, (job, self.log())
            time.sleep(0.3)
        return job

    def ended(self):
        """Waits for the end; returns the state in which Slurm leaves it."""
        states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return self.wait(lambda job: job["JobState"] in states)["JobState"]

    def train(self, steps):
        """Waits until so many steps are recorded."""
        self.wait(lambda _: len(read(self.folder)[1]) >= steps)

    def log(self):
        return "".join(path.read_text() for path in self.folder.glob("log-jaxbench_*.out"))


FAULTS = {
    "illegal_address": ("gpu", "rank 1 on n1: its GPU failed: ", "CUDA_ERROR_ILLEGAL_ADDRESS"),
    "nccl_remote": ("network", "rank 1 on n1: ", "remote process exited"),
    "nccl_hang": ("hang", "no progress within the time limit of 20 s: ", "rank 1 on "),
}
"""Cause, and what the reason begins with and contains."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_its_rank_and_node(fault, cluster, tmp_path):
    job = Job(cluster, tmp_path, fault=f"{fault}:rank=1", steps=100_000)
    job.train(10)
    job.arm.touch()
    assert job.ended() == "FAILED"
    cause, start, part = FAULTS[fault]
    record, _ = read(job.folder)
    assert (record["status"], record["cause"]) == ("failed", cause)
    assert record["reason"].startswith(start)
    assert part in record["reason"]
    assert job.log().splitlines()[-1].startswith(f"failed: {start}")


def test_a_node_that_lacks_its_gpu_is_named(cluster, tmp_path):
    """As after a GPU was lost, until the machine starts again."""
    (tmp_path / "arm").touch()
    job = Job(cluster, tmp_path, fault="lost:rank=1", steps=100)
    assert job.ended() == "FAILED"
    node = r"failed: rank 1 on n1: error: node \S+, process 1: 0 GPUs, 1 was expected: .*"
    assert re.fullmatch(node, job.log().splitlines()[-1])


def test_nodes_with_other_gpus_are_named(cluster, tmp_path):
    job = Job(cluster, tmp_path, fault="slow", steps=100, model="h100,b200")
    assert job.ended() == "FAILED"
    differ = r"1 x NVIDIA H100 80GB HBM3 \(null\) on \S+, 1 x NVIDIA B200 \(null\) on \S+; choose"
    assert re.search(differ, job.log().splitlines()[-1])


def test_a_saving_job_comes_back_from_a_lost_gpu(cluster, tmp_path):
    """Its restart finds the GPU well again, as another node's would be."""
    saving = ("--checkpoint-every", "10", "--restarts", "1")
    job = Job(cluster, tmp_path, *saving, fault="lost:rank=1", steps=120)
    job.train(25)
    job.arm.touch()
    job.wait(lambda state: state["Restarts"] == "1")
    job.arm.unlink()
    assert job.ended() == "COMPLETED", job.log()
    record, steps = read(job.folder)
    assert (record["hardware"]["processes"], record["hardware"]["devices"]) == (2, 2)
    assert record["hardware"]["null"]
    assert len(record["resumed_at"]) == 1
    assert record["resumed_at"][0] >= 20
    assert [step["step"] for step in steps] == list(range(120))
