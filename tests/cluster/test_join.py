"""How a process joins a job of Slurm, and what it says of GPUs that it does not see."""

from argparse import Namespace

import jax
import pytest

from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import B200, H100
from jaxbench.cluster import devices, job

STEP = {
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost,n[1-3]",
    "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n7",
}  # fmt: skip


@pytest.mark.parametrize(
    ("watched", "silence"), [(True, {"heartbeat_timeout_seconds": job.SUSPENDED_S}), (False, {})]
)
def test_a_step_of_slurm_is_no_job_of_mpi(watched, silence, monkeypatch):
    """And its processes do not reach each other through a proxy. With a watchdog they may be
    suspended."""
    mpi = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    monkeypatch.setattr(job.os, "environ", STEP | mpi)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    calls, said = [], {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **named: calls.append((a, named)))
    monkeypatch.setattr(
        job, "coordination_client", lambda: Namespace(key_value_set=said.__setitem__)
    )
    job.join(watched)
    ((arguments, options),) = calls
    assert arguments == ("localhost:61447", 2, 1, [0])
    assert options.pop("initialization_timeout") > job.JOIN_S
    assert options == {"cluster_detection_method": "deactivate"} | silence
    assert said == {"jaxbench/host/1": "n7"}
    assert job.os.environ["grpc_proxy"] == ""


@pytest.mark.parametrize(
    ("taken", "visible", "says"),
    [
        ("all", "1", None), ("0", "1", None), ("0", "GPU-5c1a,GPU-77", None), ("1", None, None),
        ("1", "0,1", None), ("0,1", "3,4", None),
        ("1", "1", r"sees 1 GPU \(CUDA_VISIBLE_DEVICES=1\), but should take number 1 of its node"),
        ("0", "", r"sees 0 GPUs \(CUDA_VISIBLE_DEVICES=\)"),
        ("3", "-1", r"sees 0 GPUs \(CUDA_VISIBLE_DEVICES=-1\)"),
        ("0,1,2,3", "0,1", r"sees 2 GPUs \(CUDA_VISIBLE_DEVICES=0,1\), but should take number 0,1"),
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
        "it was submitted for H100s (GPU_TYPE, default h100), but runs on B200s"
    )
