"""The job that this process belongs to, according to the variables of its launcher, and whether its
coordinator can be reached."""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from jaxbench.base.errors import RecipeError, RunFailed

ADDRESS, COUNT, RANK = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
SLURM = "SLURM_STEP_NUM_TASKS"
NODES = "SLURM_STEP_NODELIST"

LAUNCHERS = {
    COUNT: RANK,
    SLURM: "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "WORLD_SIZE": "RANK",
}
"""The variable by which a launcher says how many processes it started, and the variable of the
rank: JAX's own, srun, Open MPI, other MPIs, torchrun."""

FIRST_PORT, PORTS = 61440, 4096
"""Ports of a coordinator under Slurm: the upper end of the ephemeral ports."""


@dataclass(frozen=True)
class Membership:
    """Process `rank` of `count`, and the coordinator's host and port. `source` is the variable that
    names the coordinator. `local_devices` are the GPUs of this process, None for all."""

    host: str
    port: int
    count: int
    rank: int
    source: str
    local_devices: list[int] | None = None

    @property
    def address(self) -> str:
        """The coordinator's address as JAX takes it."""
        return f"{self.host}:{self.port}"

    def check(self, node: str) -> None:
        """Raises an error on this node if the coordinator's host has no address. Rank 0 is the
        coordinator, so it also raises one if its port is in use. JAX would abort the process
        instead."""
        where = f"{self.source}: node {node}: coordinator {self.address}"
        try:
            socket.getaddrinfo(self.host.strip("[]"), self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise RecipeError(f"{where}: {getattr(error, 'strerror', None) or error}") from error
        if self.rank > 0:
            return
        six = socket.has_dualstack_ipv6()
        with socket.socket(socket.AF_INET6 if six else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("::" if six else "0.0.0.0", self.port))
            except OSError as error:
                text = f"{where}: {error.strerror}"
                if self.source == NODES:  # another start takes another port
                    raise RunFailed(text, "network") from error
                raise RecipeError(text) from error

    def others(self) -> str:
        """The processes that this one waits for, in words."""
        if self.rank == 0:
            return f"the other {self.count - 1} of {self.count} processes at {self.address}"
        try:
            socket.create_connection((self.host.strip("[]"), self.port), timeout=2).close()
        except OSError as error:
            return f"rank 0 at {self.address} ({error.strerror or error})"
        return f"the other processes of {self.count}; rank 0 at {self.address} answers"


def membership(variables: Mapping[str, str]) -> Membership | None:
    """The job of this process; None for a process of its own. Raises RecipeError for variables that
    are set only in part, are not numbers, or contradict each other."""
    asked = [name for name in (ADDRESS, COUNT, RANK) if variables.get(name)]
    if 0 < len(asked) < 3:
        (missing, *_) = (name for name in (ADDRESS, COUNT, RANK) if name not in asked)
        raise RecipeError(
            f"{asked[0]}={variables[asked[0]]} is set without {missing}: set all of {ADDRESS}, "
            f"{COUNT} and {RANK}, or none"
        )
    found: dict[str, tuple[int, int]] = {}
    for name in LAUNCHERS:
        if name == "WORLD_SIZE" and (found or not variables.get("RANK")):
            continue  # also a variable of other programs
        if variables.get(name) and ((place := _place(variables, name))[0] > 1 or name == COUNT):
            found[name] = place
    (first, place), *others = [*found.items()] or [("", (1, 0))]
    for name, other in others:
        if other != place:
            raise RecipeError(
                f"{_shown(first, place)} contradict {_shown(name, other)}: unset the variables of "
                "the launcher that did not start this process"
            )
    if first == COUNT:
        return Membership(*_address(variables[ADDRESS]), *place, ADDRESS, own_devices(variables))
    if first == SLURM:
        return Membership(*_of_slurm(variables), *place, NODES, own_devices(variables))
    if found:
        raise RecipeError(
            f"{_shown(first, place)}: this launcher does not say where rank 0 is; set {ADDRESS}, "
            f"{COUNT} and {RANK} too, or start the processes by srun"
        )
    return None


def _place(variables: Mapping[str, str], name: str) -> tuple[int, int]:
    """The number of processes and the rank, by a launcher's variables."""
    count, rank = _whole(variables, name), 0
    if count > 1 or name == COUNT:
        rank = _whole(variables, LAUNCHERS[name], f" with {name}={count}")
    if rank >= count:
        raise RecipeError(f"{_shown(name, (count, rank))}: expected a rank below the count")
    return count, rank


def _whole(variables: Mapping[str, str], name: str, given: str = "") -> int:
    text = variables.get(name, "")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        is_what = f"{name}={text}" if text else f"{name} is not set{given}"
        raise RecipeError(f"{is_what}: expected a whole number")
    return int(text)


def _shown(name: str, place: tuple[int, int]) -> str:
    return f"{name}={place[0]}, {LAUNCHERS[name]}={place[1]}"


def _address(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[0-9a-fA-F:.%\w]+\]|[^\s:\[\]/]+):([0-9]{1,5})", text)
    if match is None or not 0 < int(match[2]) < 2**16:
        raise RecipeError(f"{ADDRESS}={text}: expected HOST:PORT, such as node1:9998")
    return match[1], int(match[2])


def _of_slurm(variables: Mapping[str, str]) -> tuple[str, int]:
    """The host and port of a step's coordinator. The host is the step's first node. The port
    depends on job, step and start, so a second start does not meet a port that was in use."""
    nodes = variables.get(NODES, "")
    match = re.match(r"([^\s,\[\]]*)(?:\[(\d+)[^\]]*\]([^\s,\[\]]*))?", nodes)
    host = "".join(part or "" for part in match.groups()) if match else ""
    if not host:
        raise RecipeError(f"{NODES}={nodes}: expected the nodes of the step, with {SLURM}")
    if variables.get("JAX_COORDINATOR_PORT"):
        return _address(f"{host}:{variables['JAX_COORDINATOR_PORT']}")
    job = _whole(variables, "SLURM_JOB_ID", f" with {SLURM}")
    step, start = (variables.get(name, "") for name in ("SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    later = sum(int(text) for text in (step, start) if text.isdecimal())
    return host, FIRST_PORT + (job + 1009 * later) % PORTS


def own_devices(variables: Mapping[str, str]) -> list[int] | None:
    """The GPUs of this process: the ones in `JAX_LOCAL_DEVICE_IDS`, or under srun its own one. None
    for all. Raises RecipeError for a value that is no list of numbers."""
    name = "JAX_LOCAL_DEVICE_IDS"
    if text := variables.get(name):
        if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
            raise RecipeError(f"{name}={text}: expected numbers of GPUs, such as 0,1,2,3")
        return [int(number) for number in text.split(",")]
    if variables.get(SLURM, "1") != "1" and variables.get("SLURM_LOCALID"):
        return [_whole(variables, "SLURM_LOCALID")]
    return None
