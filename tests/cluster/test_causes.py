"""Why a run ended: as data, in run.json and as its exit status."""

import signal

import jax
import pytest
from commands import TINY, kill, read, start_two, wait_for_steps

from jaxbench.base.errors import STATUS, RecipeError, RunFailed, cause_of
from jaxbench.cluster import job

NCCL = "INTERNAL: NCCL operation ncclGroupEnd() failed: {}. Last NCCL warning(error) log entry "


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        # As reported in jax-ml/jax 19307 and 17399, and by the plugin's own strings.
        (NCCL.format("remote process exited or there was a network error"), "network"),
        (NCCL.format("unhandled system error (run with NCCL_DEBUG=INFO for details)"), "network"),
        (NCCL.format("unhandled cuda error"), "gpu"),
        ("INTERNAL: Failed to launch CUDA kernel: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal", "gpu"),
        ("INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered", "gpu"),
        ("UNAVAILABLE: failed to connect to all addresses", "network"),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes", "memory"),
        ("INTERNAL: Failed to allocate: CUDA_ERROR_OUT_OF_MEMORY: out of memory", "memory"),
        ("INTERNAL: CUBLAS_STATUS_EXECUTION_FAILED", "gpu"),
        ("INTERNAL: CUDNN_STATUS_NOT_SUPPORTED: no engine for this graph", "failed"),
        ("INVALID_ARGUMENT: Executable expected parameter 0 of size 4", "failed"),
    ],
)  # fmt: skip
def test_errors_of_the_runtime_by_their_text(text, cause):
    assert cause_of(RuntimeError(text)) == cause


def test_errors_of_ours_know_their_cause():
    assert cause_of(RecipeError("NCCL")) == "mistake"
    assert cause_of(RunFailed("loss is nan", "numbers")) == "numbers"
    assert cause_of(OSError(28, "No space left on device")) == "storage"


@pytest.mark.slow
def test_a_lost_peer_is_no_fault_of_the_numbers(tmp_path):
    """What Gloo raises in the process that is left, without a watchdog that would know better."""
    tiny = (*TINY, "--cpu-devices", 1, "--steps", 10**6, "--output", tmp_path)
    processes = start_two(*tiny)
    try:
        wait_for_steps(processes[0], tmp_path, 3)
        processes[1].send_signal(signal.SIGKILL)
        assert processes[0].wait(timeout=60) == STATUS["network"]
    finally:
        kill(processes)
    record, _ = read(tmp_path)
    assert (record["status"], record["cause"]) == ("failed", "network")


class Service:
    """A coordination service of three processes, of which the last one does not come."""

    def __init__(self):
        self.values = {"jaxbench/host/0": "n0", "jaxbench/host/2": "n1", "jaxbench/meeting/1": ""}

    def key_value_set(self, key, value):
        self.values[key] = value

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]

    def wait_at_barrier(self, key, milliseconds):
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out")


def test_who_does_not_come_to_a_collective_is_named(monkeypatch):
    service = Service()
    monkeypatch.setattr(job, "coordination_client", lambda: service)
    monkeypatch.setattr(job.jax, "process_count", lambda: 3)
    with pytest.raises(RunFailed, match=r"meeting: .* rank 2 on n1$") as error:
        job.meet("meeting", 5)
    assert error.value.cause == "network"
