"""The commands as child processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import quick

ROOT = Path(__file__).parents[1]
TINY = (
    "--config", "configs/llama31_8b_bf16.yaml", "--set", "model.layers=1", "--set",
    "model.embed=64", "--set", "model.mlp.ffn=64", "--set", "model.vocabulary=128", "--set",
    "batch.sequence_length=32", "--cpu-devices", "2", "--set", "parallelism.fsdp=2",
)  # fmt: skip
"""A run on two devices that starts in seconds."""


def start(*arguments, module="jaxbench.train", **environment):
    """The command in the source tree; on `communicate` everything it printed. Without a module, the
    arguments are Python's own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "SLURM_"))}
    return subprocess.Popen(
        [sys.executable, "-W", "error", *(("-m", module) if module else ()), *map(str, arguments)],
        cwd=ROOT,
        env=clean | {"XLA_FLAGS": quick.FLAGS} | quick.cache() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_two(*arguments, module="jaxbench.train", second=None, **environment):
    """The command as two processes of one job; the second may be a line of Python instead."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    job = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", **environment}
    first = start(*arguments, module=module, **job, JAX_PROCESS_ID="0")
    if second is not None:
        return [first, start("-c", second, module=None, **job, JAX_PROCESS_ID="1")]
    return [first, start(*arguments, module=module, **job, JAX_PROCESS_ID="1")]


def run(*arguments, **options):
    """(exit status, standard output, standard error) of the command."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def read(folder):
    """(run.json, the complete lines of steps.jsonl) of a run, empty where there is none yet."""
    steps = folder / "steps.jsonl"
    lines = steps.read_text().splitlines(keepends=True) if steps.exists() else []
    record = folder / "run.json"
    return (
        json.loads(record.read_text()) if record.exists() else {},
        [json.loads(line) for line in lines if line.endswith("\n")],
    )


def wait_for_steps(process, folder, count):
    """Returns when the run has recorded so many steps."""
    while len(read(folder)[1]) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def kill(processes):
    """Ends what a failed test has left."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()
