"""How a process joins a job of Slurm, and what it says of GPUs that it does not see."""

import jax
import pytest

from jaxbench.cluster import job
from jaxbench.errors import RecipeError, RunFailed
from jaxbench.hardware import B200, H100
from jaxbench.run import devices

STEP = {
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost,n[1-3]",
    "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n7",
}  # fmt: skip


@pytest.fixture
def joined(monkeypatch):
    """Variables of a step of Slurm; the arguments with which JAX is told to join its job."""
    monkeypatch.setattr(job.os, "environ", dict(STEP))
    monkeypatch.setattr(job, "_say_host", lambda rank: None)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **named: calls.append((a, named)))
    return calls


def test_a_step_of_slurm_is_no_job_of_mpi(joined, monkeypatch):
    """And its processes do not reach each other through a proxy."""
    monkeypatch.setitem(job.os.environ, "OMPI_MCA_orte_hnp_uri", "1.0;tcp://127.0.0.1:9")
    monkeypatch.setitem(job.os.environ, "https_proxy", "http://127.0.0.1:9")
    job.join()
    assert joined == [((), {"cluster_detection_method": "slurm"})]
    assert job.os.environ["grpc_proxy"] == ""


def test_a_name_that_does_not_resolve_is_said_at_once(joined, monkeypatch):
    monkeypatch.setitem(job.os.environ, "SLURM_STEP_NODELIST", "no-node[001-002].invalid")
    with pytest.raises(
        RunFailed, match=r"^node n7: the name no-node001 of the job's first node do"
    ):
        job.join()
    assert joined == []


@pytest.mark.parametrize(
    ("taken", "visible", "says"),
    [
        ("all", "1", None), ("0", "1", None), ("0", "GPU-5c1a,GPU-77", None), ("1", None, None),
        ("1", "0,1", None), ("0,1", "3,4", None),
        ("1", "1", r"sees 1 GPU \(CUDA_VISIBLE_DEVICES=1\), but takes number 1 of its node"),
        ("0", "", r"sees 0 GPUs \(CUDA_VISIBLE_DEVICES=\)"),
        ("3", "-1", r"sees 0 GPUs \(CUDA_VISIBLE_DEVICES=-1\)"),
        ("0,1,2,3", "0,1", r"sees 2 GPUs \(CUDA_VISIBLE_DEVICES=0,1\), but takes number 0,1,2,3"),
    ],
)  # fmt: skip
def test_a_task_that_sees_too_few_gpus_is_no_broken_gpu(taken, visible, says):
    """It is a user's or a site's mistake: nobody tries again, no node is left out."""
    if says is None:
        devices.check_visible(taken, visible)
        return
    with pytest.raises(RecipeError, match=says):
        devices.check_visible(taken, visible)


def test_other_gpus_than_the_launcher_was_told_of_are_said(monkeypatch):
    monkeypatch.delenv("JAXBENCH_GPU", raising=False)
    assert devices.other_gpu(B200) is None
    monkeypatch.setenv("JAXBENCH_GPU", "H100")
    assert devices.other_gpu(H100) is None
    assert devices.other_gpu(None) is None
    assert devices.other_gpu(B200) == (
        "submitted for H100s (GPU_TYPE, default h100), it runs on B200s"
    )
