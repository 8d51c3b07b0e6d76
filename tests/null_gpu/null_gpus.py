"""Commands on null GPUs: JAX's CUDA client on a driver whose kernels compute nothing (`driver/`).

Nothing that such a run prints is a measurement. Memory holds what the host copied to it, or zeros.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import null_libraries
import quick
from commands import ROOT, read

TINY = (
    "model.layers=1", "model.embed=64", "model.vocabulary=128", "batch.sequence_length=32",
    "model.attention={heads: 4, kv_heads: 4, head_dim: 16}", "batch.global_batch=4",
    "parallelism.fsdp=2",
)  # fmt: skip
"""Overrides of a Llama that compiles in seconds, for two devices."""


def missing() -> str | None:
    """Why null GPUs cannot be built here; None if they can."""
    if not null_libraries.PLUGIN.exists():
        return "needs the compiler for GPUs: pip install -c constraints.txt -e '.[plan]'"
    return None if shutil.which("g++") else "needs a C++ compiler: apt-get install g++"


def environment(
    gpus: int = 2, *, model: str = "h100", memory_mb: int = 4096, **settings: object
) -> dict[str, str]:
    """Variables with which a process has null GPUs. `model` is h100, h200, b200, gb200, b300 or
    gb300, or one for each device in turn, separated by commas; `settings` are the driver's other
    variables without their NULL_GPU_, in lower case. XLA takes 8 bytes of host memory for each 256
    of a GPU's."""
    settings |= {"devices": gpus, "model": model, "memory_mb": memory_mb}
    return {"LD_PRELOAD": ":".join(map(str, null_libraries.libraries()))} | {
        f"NULL_GPU_{name.upper()}": str(value) for name, value in settings.items()
    }


@dataclass
class Command:
    """A command that was started on null GPUs; `folder` is its run's."""

    process: subprocess.Popen
    folder: Path
    began: float = field(default_factory=time.monotonic)
    out: str = ""
    err: str = ""
    seconds: float = 0.0

    def wait(self, seconds: float = 600) -> "Command":
        """Waits for its end and keeps what it printed."""
        try:
            self.out, self.err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.out, self.err = self.process.communicate()
            raise AssertionError(f"still running after {seconds} s: {self.text}") from None
        self.seconds = time.monotonic() - self.began
        return self

    def wait_for_steps(self, count: int) -> None:
        """Returns when so many steps are recorded, or the command has ended."""
        while len(self.steps) < count and self.process.poll() is None:
            time.sleep(0.1)

    @property
    def status(self) -> int:
        return self.process.returncode

    @property
    def text(self) -> str:
        """The end of what it printed."""
        return (self.out + self.err)[-3000:]

    @property
    def record(self) -> dict:
        """Its run.json."""
        return read(self.folder)[0]

    @property
    def steps(self) -> list[dict]:
        """Its complete steps."""
        return read(self.folder)[1]


def start(
    *arguments: object, folder: Path, program: tuple[str, ...] = (), python: str = sys.executable,
    **variables: str,
) -> Command:  # fmt: skip
    """Starts `train` with its output in the folder, or another program of a Python, with the
    variables of `environment`. Variables of JAX and Slurm are not inherited."""
    others = ("JAX_", "XLA_", "SLURM_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    command = program or ("-m", "jaxbench.train", "--output", str(folder))
    process = subprocess.Popen(
        [python, *command, *map(str, arguments)], cwd=ROOT,
        env=inherited | quick.cache() | variables,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    return Command(process, folder)


def job_of(processes: int = 2) -> dict[str, str]:
    """Variables of the processes of a job, but for their numbers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    return {
        "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes),
        # If one process found the program and the other did not, it would autotune alone.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }  # fmt: skip


def start_two(*arguments: object, program: tuple[str, ...] = (), **options) -> list[Command]:
    """Starts two processes of one job. Another program than `train` gets the coordinator's address
    and its number as arguments. Faults know a process by SLURM_PROCID."""
    job = job_of()
    address = job["JAX_COORDINATOR_ADDRESS"]
    return [
        start(*arguments, *((address, rank) if program else ()), program=program,
              **(({} if program else job | {"JAX_PROCESS_ID": str(rank)}) | options),
              SLURM_PROCID=str(rank))
        for rank in range(2)
    ]  # fmt: skip


def tiny(recipe: str, *overrides: str, gpus: int = 2, steps: int = 12) -> tuple[object, ...]:
    """Arguments of `train` for a recipe of Llama at tiny sizes. The number of steps is part of the
    program, so runs of the same one are compiled once."""
    pairs = [word for text in (*TINY, *overrides) for word in ("--set", text)]
    return ("--config", recipe, "--gpus", gpus, "--steps", steps, *pairs)
