"""Variables of launchers: the job that a process joins, and what names none."""

import re
import socket
import threading

import pytest

from jaxbench.base.errors import RecipeError, RunFailed
from jaxbench.cluster import job
from jaxbench.cluster.membership import Membership, membership

SRUN = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_NODELIST": "gpu-[003-004,7],x",
    "SLURM_JOB_ID": "5000", "SLURM_LOCALID": "1",
}  # fmt: skip
JAX = {
    "JAX_COORDINATOR_ADDRESS": "node1:9998", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "address", "local"),
    [
        (JAX, "node1:9998", None),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "[::1]:9998"}, "[::1]:9998", None),
        (JAX | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, "node1:9998", [0, 1]),
        (SRUN, "gpu-003:62344", [1]),
        (SRUN | {"SLURM_STEP_NODELIST": "a1,b[2-3]"}, "a1:62344", [1]),
        (SRUN | {"SLURM_STEP_NODELIST": "n[2-3]-ib"}, "n2-ib:62344", [1]),
        (SRUN | {"JAX_COORDINATOR_PORT": "77"}, "gpu-003:77", [1]),
        (SRUN | {"SLURM_STEP_ID": "1"}, "gpu-003:63353", [1]),
        (SRUN | {"SLURM_RESTART_COUNT": "1"}, "gpu-003:63353", [1]),
        (SRUN | JAX, "node1:9998", [1]),
        (SRUN | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}, "gpu-003:62344", [1]),
        (SRUN | {"WORLD_SIZE": "2", "RANK": "0"}, "gpu-003:62344", [1]),
    ],
)
def test_the_job_of_a_process(variables, address, local):
    found = membership(variables)
    assert (found.address, found.count, found.rank) == (address, 4, 2)
    assert found.local_devices == local


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"},
        {"WORLD_SIZE": "8"},
        {"JAX_COORDINATOR_ADDRESS": ""},
    ],
)
def test_a_process_of_its_own(variables):
    assert membership(variables) is None


def without(variables, name):
    return {key: value for key, value in variables.items() if key != name}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        *((without(JAX, name), f"without {name}: set all of") for name in JAX),
        ({"JAX_PROCESS_ID": "0"}, "JAX_PROCESS_ID=0 is set without JAX_COORDINATOR_ADDRESS"),
        (JAX | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "1"}, "=1: expected a rank below"),
        (JAX | {"JAX_NUM_PROCESSES": "0", "JAX_PROCESS_ID": "0"}, "=0: expected a rank below"),
        (JAX | {"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID=-1: expected a whole number"),
        (JAX | {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES=two: expected a whole number"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "node1"}, "=node1: expected HOST:PORT"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "node1:99999"}, "expected HOST:PORT"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "http://node1:1"}, "expected HOST:PORT"),
        (JAX | {"JAX_LOCAL_DEVICE_IDS": "0;1"}, "JAX_LOCAL_DEVICE_IDS=0;1: expected numbers of"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID is not set with SLURM_STEP_NUM_TASKS=2"),
        (SRUN | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4: expected a rank below"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS=many: expected a whole"),
        (SRUN | {"SLURM_LOCALID": "x"}, "SLURM_LOCALID=x: expected a whole number"),
        (SRUN | {"JAX_COORDINATOR_PORT": "x"}, "expected HOST:PORT"),
        (without(SRUN, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST=: expected the nodes"),
        (without(SRUN, "SLURM_JOB_ID"), "SLURM_JOB_ID is not set with SLURM_STEP_NUM_TASKS"),
        (
            SRUN | JAX | {"JAX_PROCESS_ID": "0"},
            "JAX_PROCESS_ID=0 contradict SLURM_STEP_NUM_TASKS=4",
        ),
        (SRUN | JAX | {"JAX_NUM_PROCESSES": "3"}, "JAX_NUM_PROCESSES=3, .* contradict SLURM"),
        (
            JAX | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
            "contradict OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_RANK=1: unset",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "does not say where rank 0"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "PMI_SIZE=2, PMI_RANK=1: this launcher does not say"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE=2, RANK=1: this launcher does not say"),
    ],
)
def test_variables_that_name_no_job_are_one_line(variables, message):
    with pytest.raises(RecipeError, match=message) as error:
        membership(variables)
    assert "\n" not in str(error.value)


def test_a_host_without_an_address_is_named_at_once(monkeypatch):
    def fail(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    of_slurm = Membership("gone", 1, 2, 1, "SLURM_STEP_NODELIST")
    with pytest.raises(RecipeError, match=r"SLURM_STEP_NODELIST: node n7: .* gone:1: Name or"):
        of_slurm.check("n7")


@pytest.mark.parametrize(
    ("source", "error"),
    [("JAX_COORDINATOR_ADDRESS", RecipeError), ("SLURM_STEP_NODELIST", RunFailed)],
)
def test_a_port_in_use_is_found_by_the_coordinator(source, error):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(error, match=rf"^{source}: node n0: .*:{port}: Address already in use"):
            Membership("127.0.0.1", port, 2, 0, source).check("n0")
        Membership("127.0.0.1", port, 2, 1, source).check("n0")
    Membership("127.0.0.1", port, 2, 0, source).check("n0")


def test_who_waits_says_for_whom_and_ends_in_time(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(job, "REMINDER_S", 0.01)
    monkeypatch.setattr(job, "JOIN_S", 0.02)
    monkeypatch.setattr(job.os, "_exit", ended.append)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        job._wait(threading.Event(), Membership("127.0.0.1", port, 3, 0, ""))
        job._wait(threading.Event(), Membership("127.0.0.1", port, 3, 1, ""))
    job._wait(threading.Event(), Membership("127.0.0.1", port, 3, 1, ""))
    first, second, third = capsys.readouterr().err.replace(str(port), "PORT").splitlines()[::2]
    assert ended == [7, 7, 7]
    assert first == "waiting for the other 2 of 3 processes at 127.0.0.1:PORT"
    assert second == "waiting for the other processes of 3; rank 0 at 127.0.0.1:PORT answers"
    assert re.fullmatch(r"waiting for rank 0 at 127.0.0.1:PORT \(Connection refused\)", third)
