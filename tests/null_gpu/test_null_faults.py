"""Faults of GPUs on purpose: how the command reports each, its status and cause, and how soon."""

import platform
import re
import signal
import time
from dataclasses import dataclass
from statistics import median

import null_gpus
import pytest
from cases import tiered

from jaxbench.report.gpus import gpus, slow_nodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(null_gpus.missing() is not None, reason=str(null_gpus.missing())),
]

WATCHDOG_S = 20
TOLERANCE_S = 20
"""Seconds by which a busy machine may be late."""


@dataclass(frozen=True)
class Expected:
    """GPUs of the process, and how its run ends: exit status, cause and reason, and within how many
    seconds."""

    gpus: int
    status: int
    cause: str
    reason: str
    seconds: float


GPU = r"(jax.errors.JaxRuntimeError|the checkpoint of step \d+ was not saved; .*): INTERNAL: .*"
HUNG = rf"no progress within the time limit of {WATCHDOG_S} s: rank 0 on \S+ \(training, last "
FAULTS = {
    "illegal_address": Expected(2, 6, "gpu", GPU + "CUDA_ERROR_ILLEGAL_ADDRESS", 15),
    "ecc": Expected(8, 6, "gpu", GPU + "CUDA_ERROR_ECC_UNCORRECTABLE", 15),
    "lost": Expected(8, 6, "gpu", GPU + "CUDA_ERROR_UNKNOWN", 15),
    "hang": Expected(8, 9, "hang", HUNG, WATCHDOG_S + 3),
    "nccl_system": Expected(2, 7, "network", GPU + "NCCL operation .*unhandled system error", 15),
    "nccl_remote": Expected(8, 7, "network", GPU + "NCCL operation .*remote process exited", 15),
    "nccl_hang": Expected(2, 9, "hang", HUNG, WATCHDOG_S + 3),
}
"""What happens once training has begun."""


def broken_run(folder, fault, gpus):
    """A run that saves, whose last GPU fails after ten steps; (it, seconds until its end)."""
    mesh = (f"parallelism.fsdp={gpus}", f"batch.global_batch={gpus}")
    command = null_gpus.start(
        *null_gpus.tiny("llama31_8b_bf16", *mesh, gpus=gpus, steps=100_000),
        "--checkpoint-every", 4, "--watchdog", WATCHDOG_S, folder=folder,
        **null_gpus.environment(
            gpus, fault=f"{fault}:device={gpus - 1}", arm=folder / "arm", kernel_us=20
        ),
    )  # fmt: skip
    command.wait_for_steps(10)
    (folder / "arm").touch()
    began = time.monotonic()
    command.wait()
    return command, time.monotonic() - began


ABORTED = re.compile(r"^F\d{4} .* Check failed: .*CUDA_ERROR_", re.M)
"""XLA aborts a process whose GPU fails as an asynchronous operation begins, and nothing is left to
record it; in a job `launch/verdict.py` reads this line."""


def check(command, seconds, expected):
    """The end is as expected, with the GPU's number where one gives an error, and what was saved is
    complete, but for the save that the fault broke."""
    record = command.record
    where = "" if expected.cause == "hang" else f"GPU {expected.gpus - 1}: "
    if expected.cause == "gpu" and command.status == -signal.SIGABRT:
        assert ABORTED.search(command.err), command.text
        assert record["status"] == "running"
        return
    assert (command.status, record["status"], record["cause"]) == (
        expected.status, "failed", expected.cause,
    ), command.text  # fmt: skip
    assert re.match(where + expected.reason, record["reason"]), record["reason"]
    assert record["hardware"]["null"]
    assert "Traceback" not in command.err
    assert seconds < expected.seconds + TOLERANCE_S
    saved = [entry["step"] for entry in record["checkpoints"] if "save_s" in entry]
    assert saved
    assert all((command.folder / "checkpoints" / str(step)).is_dir() for step in saved[-1:])


@pytest.mark.parametrize("fault", tiered([], FAULTS, slow=["nccl_hang"]))
def test_a_fault_in_one_process_is_named(fault, tmp_path):
    command, seconds = broken_run(tmp_path, fault, FAULTS[fault].gpus)
    check(command, seconds, FAULTS[fault])
    if fault == "lost":
        check_restored(command, tmp_path / "restored")


def check_restored(broken, folder):
    """Another run, on the two GPUs that it has, goes on from the last complete save of a broken one
    of eight."""
    saved = max(entry["step"] for entry in broken.record["checkpoints"] if "save_s" in entry)
    command = null_gpus.start(
        *null_gpus.tiny("llama31_8b_bf16", "batch.global_batch=8", steps=saved + 2),
        "--restore", broken.folder, folder=folder, **null_gpus.environment(),
    ).wait()  # fmt: skip
    assert command.status == 0, command.text
    assert command.record["restored"]["step"] == saved
    assert [step["step"] for step in command.steps] == [saved, saved + 1]


def test_a_slow_gpu_slows_all_ranks_and_is_named(tmp_path):
    """Its process waits for its kernels as long as the other one for the collective behind them, so
    only what it does alone shows it.

    Had only one of them waited for the slow kernels, the waits would differ as the steps do.
    """
    commands = null_gpus.start_two(
        *null_gpus.tiny("llama31_8b_bf16", steps=40), folder=tmp_path,
        **null_gpus.environment(1, fault="slow:rank=1", arm=tmp_path / "arm", kernel_us=1000),
    )  # fmt: skip
    commands[0].wait_for_steps(12)
    (tmp_path / "arm").touch()
    begun = len(commands[0].steps)
    for command in commands:
        assert command.wait().status == 0, command.text
    seconds = [step["step_time_s"] for step in commands[0].steps]
    slower = median(seconds[begun + 3 :]) / median(seconds[2:begun])
    assert slower > 1.5
    other, slow = (rank["wait_s"] for rank in commands[0].record["ranks"])
    assert max(other, slow) / min(other, slow) < 1 + (slower - 1) / 2
    (why,) = slow_nodes(gpus(commands[0].record)).values()
    assert re.fullmatch(r"rank 1 on \S+, GPU 0: [\d.]+ times the typical GPU's time", why)


def test_a_gpu_that_others_use_has_no_memory_left(tmp_path):
    command = null_gpus.start(
        *null_gpus.tiny("llama31_8b_bf16"), folder=tmp_path,
        **null_gpus.environment(fault="memory:bytes=200000,device=1"),
    ).wait()  # fmt: skip
    assert (command.status, command.record["cause"]) == (4, "memory"), command.text


def test_a_profile_that_the_driver_refuses_fails(tmp_path):
    command = null_gpus.start(
        *null_gpus.tiny("llama31_8b_bf16"), "--profile", "jax", "--profile-steps", "5-8",
        folder=tmp_path, **null_gpus.environment(fault="cupti"),
    ).wait()  # fmt: skip
    assert command.status == 1
    assert "the profile has no event on a device" in command.record["reason"]


def test_gpus_of_two_models_are_refused(tmp_path):
    command = null_gpus.start(
        *null_gpus.tiny("llama31_8b_bf16"), folder=tmp_path / "run",
        **null_gpus.environment(model="h100,h200"),
    ).wait()  # fmt: skip
    assert command.status == 2
    assert command.err == (
        f"error: the job's devices differ: 1 x NVIDIA H100 80GB HBM3 (null) on {platform.node()}, "
        f"1 x NVIDIA H200 (null) on {platform.node()}; choose nodes with the same GPUs\n"
    )


def test_a_resumed_run_that_lacks_a_gpu_says_so(tmp_path):
    saving = (*null_gpus.tiny("llama31_8b_bf16"), "--checkpoint-every", 4, "--resume")
    whole = null_gpus.start(*saving, folder=tmp_path, **null_gpus.environment()).wait()
    assert whole.status == 0, whole.err
    before = (tmp_path / "run.json").read_bytes()
    less = null_gpus.start(*saving, folder=tmp_path, **null_gpus.environment(1)).wait()
    assert less.status == 2
    assert less.err == "error: --gpus 2 was asked for, but this job sees 1 GPU\n"
    assert (tmp_path / "run.json").read_bytes() == before


@pytest.mark.nightly
def test_a_device_that_computes_nothing_is_no_result(tmp_path):
    """Were it not marked as null, as no real GPU is."""
    command = null_gpus.start(
        *null_gpus.tiny("llama31_8b_bf16"), folder=tmp_path,
        **null_gpus.environment(unmarked=1),
    ).wait()  # fmt: skip
    assert command.status == 3
    assert command.record["cause"] == "numbers"
    assert "grad_norm is 0 at step 0: nothing was computed" in command.record["reason"]
