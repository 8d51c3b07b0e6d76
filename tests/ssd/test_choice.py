"""Which implementation computes Mamba-2, and what it refuses."""

import pytest
from tiny import tiny_run

from jaxbench import mesh
from jaxbench.base.errors import RecipeError
from jaxbench.ops.implementations import Task
from jaxbench.ops.ssd import choose
from jaxbench.train.program_checks import check_run, describe_kernels

PALLAS = (
    "execution.ssd=pallas", "precision.dtype=bf16", "batch.sequence_length=128",
    "model.mamba={heads: 8, head_dim: 16, state: 32, groups: 4}",
)  # fmt: skip


def run_of(*overrides, family="nemotronh_56b_bf16"):
    return tiny_run(*PALLAS, *overrides, family=family)


def chosen(run, platform, capability=None):
    length = run.batch.sequence_length
    task = Task(run.model, run.precision.dtype, length, platform, capability)
    return choose(run.execution, task)


def test_kernels_run_when_asked_for():
    assert chosen(run_of(), "gpu") == "pallas"
    assert chosen(run_of("execution.ssd=xla"), "gpu") == "xla"
    assert chosen(run_of("execution.ssd=xla"), "cpu") == "xla"


def test_the_kernels_run_by_default_where_they_can():
    assert chosen(run_of("execution.ssd=auto"), "gpu") == "pallas"
    assert chosen(run_of("execution.ssd=auto"), "cpu") == "xla"


def test_a_gpu_before_hopper_has_too_little_shared_memory_for_the_kernels():
    assert chosen(run_of("execution.ssd=auto"), "gpu", (9, 0)) == "pallas"
    assert chosen(run_of("execution.ssd=auto"), "gpu", (8, 0)) == "xla"
    with pytest.raises(RecipeError, match=r"needs compute capability 9\.0 or later, not 8\.0"):
        chosen(run_of(), "gpu", (8, 0))


def test_a_gpu_whose_kernels_cannot_says_why(monkeypatch):
    """The record and the log of a run have this text."""
    monkeypatch.setattr(mesh, "platform", lambda: "gpu")
    assert describe_kernels(run_of("execution.ssd=auto"))["Mamba-2"] == "pallas"
    short = run_of("execution.ssd=auto", "batch.sequence_length=64")
    reason = "64 tokens per sequence, not a multiple of 128"
    assert describe_kernels(short)["Mamba-2"] == f"xla (pallas cannot compute {reason})"
    asked = run_of("execution.ssd=xla", "batch.sequence_length=64")
    assert describe_kernels(asked)["Mamba-2"] == "xla"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.mamba={heads: 8, head_dim: 24, state: 32, groups: 4}", "head_dim = 24, not a"),
        ("model.mamba={heads: 8, head_dim: 16, state: 8, groups: 4}", "state = 8, not a"),
        ("model.mamba={heads: 12, head_dim: 16, state: 32, groups: 4}", "48 features per group"),
        ("model.mamba={heads: 8, head_dim: 128, state: 256, groups: 4}", "state = 32768, more"),
        ("precision.dtype=fp32", "in fp32"),
        ("batch.sequence_length=64", "64 tokens per sequence, not a multiple of 128"),
    ],
)
def test_what_kernels_cannot_do_is_a_mistake(change, message):
    with pytest.raises(RecipeError, match=f"execution.ssd = pallas cannot compute .*{message}"):
        chosen(run_of(change), "gpu")


def test_a_cpu_has_no_such_kernels():
    with pytest.raises(RecipeError, match="ssd = pallas does not run on a cpu"):
        check_run(run_of(), "cpu")
