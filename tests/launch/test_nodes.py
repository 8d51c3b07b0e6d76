"""A job on two nodes with networks and file systems of their own, of which one lacks something."""

import contextlib
import json
import re
import subprocess
from pathlib import Path

import network
import pytest
import slurm
from commands import ROOT
from slurm import ended, submit, wait

from jaxbench.report import command as report

REASON = slurm.missing() or network.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


@pytest.fixture
def cluster(tmp_path):
    with network.Hosts(tmp_path) as hosts, slurm.Cluster(tmp_path / "s", hosts) as running:
        yield running


@contextlib.contextmanager
def hidden(cluster, path):
    """The second node sees nothing in a folder, or another file in the place of one."""
    space = ["nsenter", f"--target={cluster.second}", "--mount"]
    place = ["-t", "tmpfs", "none"] if path.is_dir() else ["--bind", "/etc/hostname"]
    subprocess.run([*space, "mount", *place, path], check=True)
    try:
        yield
    finally:
        subprocess.run([*space, "umount", "--lazy", path], check=True)


def test_the_node_that_lacks_something_is_named_at_once(cluster, tmp_path):
    """The clone, the stage, or the name of the other node; nobody waits for it."""
    stage = tmp_path / "stage"
    stage.mkdir()
    run, name = f"{ROOT}/launch/run.sh", Path("/etc/hosts")
    faults = [
        (ROOT, "launch", f"it cannot be started: {run}: No such file or directory"),
        (stage, "storage", f"its log {stage}/results/"),
        (name, "mistake", "SLURM_STEP_NODELIST: node n1: coordinator n0:"),
    ]
    for path, cause, reason in faults:
        with hidden(cluster, path):
            number, folder = submit(cluster, stage, "--check", "on")
            job = wait(cluster, number, ended, seconds=90)
        record = json.loads((folder / "job.json").read_text())
        assert (record["status"], record["cause"]) == ("failed", cause)
        expected = rf"check: rank [23] on n1: {re.escape(reason)}"
        assert re.match(expected, record["reason"]), record["reason"]
        assert job["JobState"] == "FAILED"
        (found,) = report.report([folder], None)
        assert (found.verdict.name, found.verdict.reason) == ("failed", record["reason"])
