"""Jobs of Slurm on null GPUs: two nodes with a process each, and a GPU that fails in one."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import null_gpus
import pytest
import slurm
from cases import tiered
from commands import ROOT, read

from jaxbench.report import command as report
from jaxbench.report.gpus import gpus, slow_nodes

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

    def __init__(self, cluster, stage, *options, fault, steps, model="h100", kernel_us=20,
                 **settings):  # fmt: skip
        self.cluster, self.arm = cluster, stage / "arm"
        pairs = [word for text in null_gpus.TINY for word in ("--set", text)]
        done = subprocess.run(
            ["launch/submit.sh", "configs/llama31_8b_bf16.yaml", "--watchdog", str(WATCHDOG_S),
             *pairs, "--check", "off", *options],
            cwd=ROOT, capture_output=True, text=True,
            env=cluster.environment | {
                "STAGE_PATH": str(stage), "JOB_TOTAL_GPUS": "2", "GPUS_PER_NODE": "1",
                "JAXBENCH_VENV": sys.prefix, "MAX_STEPS": str(steps),
                **null_gpus.environment(
                    1, model=model, memory_mb=2048, arm=self.arm, kernel_us=kernel_us, fault=fault,
                    **settings
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
        return "".join(path.read_text() for path in self.folder.glob("sbatch_jaxbench_*.out"))


FAULTS = {
    "illegal_address": ("gpu", "rank 1 on n1: its GPU failed: ", "CUDA_ERROR_ILLEGAL_ADDRESS"),
    "nccl_remote": ("network", "rank 1 on n1: ", "remote process exited"),
    "nccl_hang": ("hang", "no progress within the time limit of 20 s: ", "rank 1 on "),
}
"""Cause, and what the reason begins with and contains."""


@pytest.mark.parametrize("fault", tiered([], FAULTS))
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


@pytest.mark.nightly
def test_a_slow_gpu_names_its_rank_and_node(cluster, tmp_path):
    """The job completes, and the report finds the node in its record."""
    state = tmp_path / "state"
    state.write_text("* sm_mhz 1980\n* power_w 600\n1 sm_mhz 1683\n1 reasons 4\n")
    job = Job(cluster, tmp_path, fault="slow:rank=1", steps=40, kernel_us=1000, state=state)
    job.train(12)
    job.arm.touch()
    assert job.ended() == "COMPLETED", job.log()
    record, _ = read(job.folder)
    assert (record["status"], record["cause"]) == ("completed", None)
    (other,), (slow,) = (rank["products_s"] for rank in record["ranks"])
    assert slow > 2 * other
    assert slow_nodes(gpus(record)).keys() == {"n1"}
    clocks = [(r["host"], r["gpus"][0]["clock_ratio"]) for r in record["ranks"]]
    assert clocks == [("n0", 1.0), ("n1", pytest.approx(0.85))]
    assert record["ranks"][1]["gpus"][0]["throttled_s"]["power cap"] > 0
    page = tmp_path / "page.html"
    report.main([str(job.folder), "--format", "html", "--output", str(page)])
    assert "SM clock under load" in page.read_text()
    figures = record["summary"]
    assert figures["joules_per_token"] == pytest.approx(1200 / figures["tokens_per_s"])


@pytest.mark.nightly
def test_a_node_that_lacks_its_gpu_is_named(cluster, tmp_path):
    """As after a GPU was lost, until the machine starts again."""
    (tmp_path / "arm").touch()
    job = Job(cluster, tmp_path, fault="lost:rank=1", steps=100)
    assert job.ended() == "FAILED"
    node = r"failed: rank 1 on n1: node \S+, process 1 sees 0 GPUs.*, but 1 was expected: .*"
    assert re.fullmatch(node, job.log().splitlines()[-1])


@pytest.mark.nightly
def test_nodes_with_other_gpus_are_named(cluster, tmp_path):
    job = Job(cluster, tmp_path, fault="slow", steps=100, model="h100,b200")
    assert job.ended() == "FAILED"
    differ = r"1 x NVIDIA H100 80GB HBM3 \(null\) on \S+, 1 x NVIDIA B200 \(null\) on \S+; choose"
    assert re.search(differ, job.log().splitlines()[-1])


@pytest.mark.nightly
def test_a_node_that_the_check_names_is_left_out(cluster, tmp_path):
    """The job is requeued without it; here no other node is left."""
    (tmp_path / "state").write_text("* kernel_us 1000\n* host_gb_s 20\n1 ecc_uncorrected 3\n")
    job = Job(cluster, tmp_path, "--check", "on", "--exclude-slow", fault="slow", steps=20,
              still=1, state=tmp_path / "state")  # fmt: skip
    state = job.wait(lambda state: state["ExcNodeList"] == "n1" and state["JobState"] == "PENDING")
    assert state["Restarts"] == "1"
    *_, verdict, without = job.log().splitlines()
    assert verdict == "failed: check: n1 gpu 0: uncorrected ECC errors: 3"
    assert without == "requeued without n1"
    assert not (job.folder / "run.json").exists()
    assert json.loads((job.folder / "check.json").read_text())["status"] == 6
    cluster.run("scancel", job.number)


@pytest.mark.nightly
def test_a_job_that_saves_leaves_out_the_node_of_a_lost_gpu(cluster, tmp_path):
    (tmp_path / "state").write_text("* kernel_us 1000\n* host_gb_s 20\n")
    saving = ("--checkpoint-every", "10", "--check", "on", "--exclude-slow")
    job = Job(cluster, tmp_path, *saving, fault="lost:rank=1", steps=1000, state=tmp_path / "state")
    job.wait(lambda _: "compiling: " in job.log(), 400)  # checked
    job.train(12)
    job.arm.touch()
    state = job.wait(lambda state: state["ExcNodeList"] == "n1" and state["JobState"] == "PENDING")
    assert state["Restarts"] == "1"
    *_, verdict, resuming, without = job.log().splitlines()
    assert verdict.startswith("failed: rank 1 on n1: its GPU failed: ")
    assert resuming.startswith("resuming as start 2")
    assert without == "requeued without n1"
    cluster.run("scancel", job.number)


@pytest.mark.nightly
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
