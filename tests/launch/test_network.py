"""A job on two nodes with networks of their own that loses the one between its processes."""

import re
import time

import network
import pytest
import slurm
from commands import read
from test_slurm import LONG, ended, main_log, running, submit, wait

REASON = slurm.missing() or network.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
WATCHDOG = 8


@pytest.fixture
def cluster(tmp_path):
    with network.Hosts(tmp_path) as hosts, slurm.Cluster(tmp_path / "s", hosts) as running:
        yield running


@pytest.mark.nightly
def test_a_job_that_loses_the_network_says_so_and_comes_back(cluster, tmp_path):
    """A cut of two seconds is none. When connections are reset, processes notice at once; when what
    is sent arrives no more, the watchdog ends the job; Slurm ends the rest in 20 s."""
    saving = ("--checkpoint-every", "40", "--restarts", "1", "--watchdog", str(WATCHDOG))
    number, folder = submit(cluster, tmp_path / "stage", *saving, **LONG)
    running(cluster, number, folder, 5)
    cluster.hosts.cut("data")
    time.sleep(2)
    cluster.hosts.mend("data")
    running(cluster, number, folder, 60)
    cluster.hosts.reset("data")
    wait(cluster, number, lambda job: job["Restarts"] == "1")
    wait(cluster, number, lambda job: read(folder)[0]["resumed_at"] != [])
    lost = r"failed: rank \d on n\d: it lost the network or another process: \S.*"
    told = main_log(folder)
    assert re.search(rf"(?m)^{lost}\nresuming as start 2, in 0 s$", told), told
    resumed = read(folder)[0]["resumed_at"][0]
    running(cluster, number, folder, resumed + 15)
    cluster.hosts.cut("data")
    wait(cluster, number, ended)
    last, (record, _) = main_log(folder).splitlines()[-1], read(folder)
    hung = rf"failed: no sign of life for {WATCHDOG / 2:g} s from rank \d on n1 \(training, "
    assert re.match(hung if record["cause"] == "hang" else lost, last), last
    assert (record["status"], record["cause"]) in {("failed", "hang"), ("failed", "network")}
