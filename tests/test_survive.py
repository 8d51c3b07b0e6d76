"""Runs that are killed, stopped, frozen or out of disk, as child processes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from commands import ROOT, TINY, kill, read, run, start, start_two, wait_for_steps

STEPS = 300
SAVING = ("--steps", STEPS, "--checkpoint-every", 20, "--resume", "--output")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run that saved nothing."""
    folder = tmp_path_factory.mktemp("whole")
    status, _, err = run("--steps", STEPS, "--output", folder)
    assert (status, err) == (0, "")
    return read(folder)


def test_a_killed_run_resumes_to_the_same_losses(whole, tmp_path):
    process = start(*SAVING, tmp_path)
    wait_for_steps(process, tmp_path, 50)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert read(tmp_path)[0]["status"] == "running"
    status, out, err = run(*SAVING, tmp_path)
    assert (status, err) == (0, "")
    assert "Global Checkpoint Load : Rank : 0 : " in out
    record, steps = read(tmp_path)
    (resumed,) = record["resumed_at"]
    assert resumed >= 20
    assert resumed % 20 == 0
    assert f"resumed at step {resumed}" in record["not_comparable_because"]
    assert (record["status"], record["restored"]["step"]) == ("completed", resumed)
    assert [s["step"] for s in steps] == list(range(STEPS))
    assert [s["loss"] for s in steps] == [s["loss"] for s in whole[1]]
    assert record["loss"] == whole[0]["loss"]
    before = (tmp_path / "run.json").read_bytes()
    status, out, err = run(*SAVING, tmp_path)
    assert (status, out, err) == (0, f"nothing to do: the run in {tmp_path} is completed\n", "")
    assert (tmp_path / "run.json").read_bytes() == before
    another = (*SAVING, tmp_path, "--seed", 1)
    assert run(*another)[::2] == (
        2, f"error: --resume: {tmp_path / 'run.json'} is another run: its seed differs\n"
    )  # fmt: skip


def test_a_signal_to_one_process_stops_both_and_another_process_count_goes_on(whole, tmp_path):
    processes = start_two(*SAVING, tmp_path, "--steps", STEPS)
    try:
        wait_for_steps(processes[0], tmp_path, 25)
        processes[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        kill(processes)
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2, outputs
    record, steps = read(tmp_path)
    assert (record["status"], record["reason"]) == ("interrupted", "SIGTERM")
    assert record["checkpoints"][-1]["step"] == len(steps)
    ranks = record["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert rank["step_time_s"]["p95"] >= rank["step_time_s"]["median"] > 0
        assert 0 <= rank["wait_s"] <= rank["step_time_s"]["mean"]
    status, _, err = run(*SAVING, tmp_path)
    assert (status, err) == (0, "")
    after, steps = read(tmp_path)
    assert after["resumed_at"] == [record["checkpoints"][-1]["step"]]
    assert [s["step"] for s in steps] == list(range(STEPS))
    # Two processes add up in another order than two devices of one: roundings of bf16 activations.
    for step, expected in zip(steps, whole[1], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], abs=1e-3)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_the_watchdog_ends_a_job_whose_rank_is_lost(number, tmp_path):
    timeout = 5
    processes = start_two("--steps", 10**6, "--output", tmp_path, "--watchdog", timeout)
    try:
        wait_for_steps(processes[0], tmp_path, 10)
        processes[1].send_signal(number)
        at = time.monotonic()
        processes[0].wait(timeout=60)
        elapsed = time.monotonic() - at
        last = read(tmp_path)[1][-1]["step"]
    finally:
        kill(processes)
    # One heartbeat may have been under way, and the watchdog looks twice a second.
    assert elapsed < timeout + 4
    record, _ = read(tmp_path)
    assert record["status"] == "failed"
    found = re.search(r"rank 1 on (\S+) \(training, last completed step (\d+)\)", record["reason"])
    assert found[1] == os.uname().nodename
    assert abs(int(found[2]) - last) < 2000  # a heartbeat ago


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare for a small disk")
def test_a_full_disk_is_reported_and_the_last_good_checkpoint_stays(tmp_path):
    """A file system of its own that holds one checkpoint, but not three."""
    disk, result = tmp_path / "disk", tmp_path / "result"
    disk.mkdir()
    probe = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*probe, "true"], check=False, capture_output=True).returncode:
        pytest.skip("user namespaces are not allowed here")
    command = [sys.executable, "-m", "jaxbench.train", *TINY, "--steps", "60"]
    command += ["--checkpoint-every", "20", "--keep", "3", "--output", str(disk / "run")]
    script = (
        f"mount -t tmpfs -o size=1300k none {disk} && {{ {' '.join(command)}; "
        f"echo $? > {tmp_path}/status; cp -r {disk}/run {result}; }}"
    )
    subprocess.run([*probe, "sh", "-c", script], cwd=ROOT, check=True, capture_output=True)
    record, _ = read(result)
    assert (tmp_path / "status").read_text() == "1\n"
    assert record["status"] == "failed"
    assert "was not saved; the last good one is of step 20: " in record["reason"]
    assert "No space left on device" in record["reason"]
    status, _, err = run("--output", tmp_path / "next", "--restore", result)
    assert (status, err) == (0, "")
    assert read(tmp_path / "next")[0]["restored"]["step"] == 20
