"""The processes of one job: how they join, and how they decide together.

They use JAX's coordination service on the hosts' network. No device is involved, so nothing here
waits for a device or disturbs a step.
"""

import json
import os
import platform
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax

from jaxbench.base.errors import STATUS, RecipeError, RunFailed, cause_of, listed
from jaxbench.cluster.ending import tell
from jaxbench.cluster.membership import Membership, membership, own_devices
from jaxbench.jax_internals import coordination_client

ARRIVAL_S = 900.0
"""The longest time for which a process waits for others that compile. They may take some minutes
more on a busy host, but Gloo waits for only half a minute."""

JOIN_S, REMINDER_S = 300.0, 10.0
"""The longest time for which a process waits for the others to start, and the time after which it
says that it waits."""

TIMEOUT_MS = 300_000
"""The longest time for which a process waits for a value of another one."""


SUSPENDED_S = 7 * 24 * 3600
"""The longest time for which a job with a watchdog may be suspended (`scontrol suspend`). By
default JAX aborts all processes after 100 s without a sign of life. Its clock goes on while they
are stopped, so it would end a healthy job when the job continues."""


def join(watched: bool = False) -> None:
    """Connects this process to the others that a launcher started, and takes the GPUs that it gave
    to this process. With a watchdog, which does this better, JAX does not look for silent
    processes.

    Launchers are Slurm's srun, and any that sets `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`. Raises RecipeError for variables that name no job, and for a coordinator that
    cannot be one.
    """
    # Until `Signals` handles SIGTERM, JAX's preemption service would catch it and do nothing.
    jax.config.update("jax_enable_preemption_service", False)
    # The processes of a job reach each other directly, so JAX need not warn of proxies.
    os.environ.setdefault("grpc_proxy", "")
    jax.config.update("jax_check_proxy_envs", False)
    found = membership(os.environ)
    if found is None:
        # JAX reads the variable itself only in a job of several processes.
        if own := own_devices(os.environ):
            jax.config.update("jax_cuda_visible_devices", ",".join(map(str, own)))
        return
    found.check(node())
    silence: dict[str, Any] = {"heartbeat_timeout_seconds": SUSPENDED_S} if watched else {}
    joined = threading.Event()
    threading.Thread(target=_wait, args=(joined, found), daemon=True).start()
    jax.distributed.initialize(
        found.address, found.count, found.rank, found.local_devices,
        cluster_detection_method="deactivate", initialization_timeout=2 * round(JOIN_S), **silence,
    )  # fmt: skip
    joined.set()
    # The others learn where this process is. Asking JAX for its rank would look for devices.
    coordination_client().key_value_set(f"jaxbench/host/{found.rank}", node())


def _wait(joined: threading.Event, found: Membership) -> None:
    """Says which processes this one waits for, and ends it if they do not come in time. JAX would
    abort it without a line that says so."""
    if joined.wait(REMINDER_S):
        return
    print(f"waiting for {found.others()}", file=sys.stderr, flush=True)
    if not joined.wait(JOIN_S - REMINDER_S):
        text = f"error: still waiting after {JOIN_S:g} s for {found.others()}"
        tell(text)
        print(text, file=sys.stderr, flush=True)
        os._exit(STATUS["network"])


def node() -> str:
    """The name of this node: Slurm's name, which Slurm's options take, or the host's."""
    return os.environ.get("SLURMD_NODENAME", platform.node())


def one_of_node(name: str) -> bool:
    """Returns True in the first process of each node that asks. A name can be used once."""
    if (client := coordination_client()) is not None:
        try:
            client.key_value_set(f"jaxbench/{name}/{node()}", "")
        except jax.errors.JaxRuntimeError:
            return False
    return True


def broadcast(name: str, make: Callable[[], Any]) -> Any:
    """Returns in every process the JSON value that rank 0 makes.

    All processes raise an error of rank 0: a RecipeError as it is, any other error as a RunFailed
    with the same cause.
    """
    if jax.process_count() == 1:
        return make()
    key = f"jaxbench/{name}"
    if jax.process_index() == 0:
        try:
            value = make()
        except Exception as error:
            failure = (cause_of(error), str(error) or type(error).__name__)
            coordination_client().key_value_set(key, json.dumps(failure))
            raise
        coordination_client().key_value_set(key, json.dumps((None, value)))
        return value
    cause, value = json.loads(coordination_client().blocking_key_value_get(key, TIMEOUT_MS))
    if cause == "mistake":
        raise RecipeError(value)
    if cause is not None:
        raise RunFailed(f"the first process failed: {value}", cause)
    return value


def gather(name: str, value: Any) -> list[Any]:
    """Returns the JSON values of all processes, by rank, in rank 0. Returns an empty list
    elsewhere."""
    count, key = jax.process_count(), f"jaxbench/{name}"
    if count == 1:
        return [value]
    coordination_client().key_value_set(f"{key}/{jax.process_index()}", json.dumps(value))
    if jax.process_index() != 0:
        return []
    return [
        json.loads(coordination_client().blocking_key_value_get(f"{key}/{rank}", TIMEOUT_MS))
        for rank in range(count)
    ]


def all_gather(name: str, value: Any) -> list[Any]:
    """Returns the JSON values of all processes, by rank, in every process."""
    values = gather(name, value)
    return broadcast(f"{name} of all", lambda: values)


def barrier(name: str, seconds: float) -> bool:
    """Waits for all processes. Returns whether they came in time. A name can be used once."""
    if coordination_client() is None:
        return True
    try:
        coordination_client().wait_at_barrier(f"jaxbench/{name}", round(1000 * seconds))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def meet(name: str, seconds: float = ARRIVAL_S) -> None:
    """Waits until all processes have come to the same point. A name can be used once. If some do
    not come in time, raises RunFailed with their names, before a collective fails because they are
    missing."""
    client = coordination_client()
    if client is None:
        return
    client.key_value_set(f"jaxbench/{name}/{jax.process_index()}", "")
    if barrier(name, seconds):
        return
    hosts, here = (_by_rank(prefix) for prefix in ("jaxbench/host", f"jaxbench/{name}"))
    missing = [rank for rank in range(jax.process_count()) if rank not in here]
    named = listed((f"rank {rank} on {hosts.get(rank, '?')}" for rank in missing), 8)
    came = f"still waiting after {seconds:g} s for {named}" if missing else "the barrier failed"
    raise RunFailed(f"{name}: {came}", "network")


def _by_rank(prefix: str) -> dict[int, str]:
    values = coordination_client().key_value_dir_get(prefix)
    return {int(key.rpartition("/")[2]): value for key, value in values}
