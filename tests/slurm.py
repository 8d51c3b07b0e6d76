"""A real Slurm controller with virtual nodes on this host, for tests."""

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import quick
from commands import ROOT
from network import Hosts, Started

HOSTS = Path("/etc/hosts")
TINY = (
    "--set", "model.layers=1", "--set", "model.embed=64", "--set", "model.mlp.ffn=64", "--set",
    "model.vocabulary=128", "--set", "batch.sequence_length=32", "--set", "parallelism.fsdp=4",
)  # fmt: skip
"""Settings of a job on four devices that starts in seconds."""

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")


def missing() -> str | None:
    """Why no Slurm can be started here; None if one can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
    if any(shutil.which(name, path=path) is None for name in PROGRAMS):
        return "needs Slurm: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "needs root for Slurm's daemons: run the tests as root"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def first_job() -> int:
    """The number of the first job."""
    return 1 + os.getpid() % 64 * 64


class Cluster(Started):
    """Nodes n0, n1 and so on, two unless `nodes` says otherwise, with two CPUs each; everything it
    writes is in `folder`. With `hosts` each node is one of them, and lost after 30 s without a
    word, else all are this one. `prolog` is a script whose output gives a task variables."""

    def __init__(
        self, folder: Path, hosts: Hosts | None = None, nodes: int = 2, prolog: Path | None = None
    ):
        self.folder, self.hosts, self.prolog = folder, hosts, prolog
        self.names = [f"n{number}" for number in range(nodes)]
        self.environment = (
            os.environ
            | quick.cache()
            | {
                "SLURM_CONF": str(folder / "slurm.conf"),
                "PATH": f"{os.environ['PATH']}:/usr/sbin",
            }
        )
        self._daemons: list[subprocess.Popen] = []

    def _start(self) -> None:
        for name in ("state", *(f"spool-{name}" for name in self.names)):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        self._start_munge()
        if self.hosts is None:
            self._hosts(*self.names)
        addresses = [self.hosts.control(n) if self.hosts else "127.0.0.1" for n in self.names]
        host, (port, *ports) = os.uname().nodename, free_ports(1 + len(self.names))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={its} CPUs=2 "
            "RealMemory=1000"
            for name, address, its in zip(self.names, addresses, ports, strict=True)
        )
        names, prolog = ",".join(self.names), f"TaskProlog={self.prolog}" if self.prolog else ""
        # JAX derives its coordinator's port from the job's number, modulo 4096: 64 numbers that no
        # other cluster uses, also one that another worker of pytest started next.
        # A requeued job waits until its old credentials have expired (120 s unless told otherwise).
        # A signal whose message timed out is sent again a minute later, perhaps to the next start.
        (self.folder / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={host}({addresses[0]})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge.socket,cred_expire=8
CredType=cred/munge
SlurmctldPort={port}
FirstJobId={first_job()}
SlurmctldParameters=enable_configless
SlurmdParameters=config_overrides
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=20
SlurmdTimeout={30 if self.hosts else 300}
MessageTimeout={10 if self.hosts else 60}
MinJobAge=3600
JobRequeue=1
{prolog}
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=graceful Nodes={names} MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
""")
        self._daemon("slurmctld", "-D")
        for node in self.names:
            on = self.hosts.on(node) if self.hosts else ()
            self._daemon(*on, "slurmd", "-D", "-N", node)
        idle = ("sinfo", "-h", "-t", "idle", "-o", "%D")
        self._wait(lambda: self.run(*idle).strip() == str(len(self.names)), 60)

    def __exit__(self, *_):
        try:
            self.run("scancel", "--me")
            self._wait(lambda: not self.run("squeue", "--noheader"), 60)
        finally:
            for process in reversed(self._daemons):
                process.terminate()
            for process in self._daemons:
                process.wait(timeout=30)
                process.stderr.close()
            self._hosts()

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        folder.mkdir(mode=0o700)
        subprocess.run(["mungekey", "-c", "-k", folder / "key"], check=True, env=self.environment)
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={folder}/key",
            f"--socket={self.folder}/munge.socket", f"--pid-file={folder}/pid",
            f"--log-file={folder}/log", f"--seed-file={folder}/seed",
        )  # fmt: skip
        self._wait((self.folder / "munge.socket").exists, 20)

    @property
    def _mark(self) -> str:
        return f"# {self.folder}\n"

    def _hosts(self, *names: str) -> None:
        """Replaces this cluster's lines of /etc/hosts: JAX's coordinator has its node's name."""
        with HOSTS.open("r+") as hosts:
            fcntl.flock(hosts, fcntl.LOCK_EX)
            lines = [line for line in hosts if self._mark not in line]
            hosts.seek(0)
            hosts.writelines([*lines, *(f"127.0.0.1 {name} {self._mark}" for name in names)])
            hosts.truncate()

    def _daemon(self, *command: str) -> None:
        self._daemons.append(subprocess.Popen(
            command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ))  # fmt: skip

    def _wait(self, condition, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            for process in self._daemons:
                assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < end, self.log()
            time.sleep(0.2)

    @property
    def second(self) -> int:
        """The process of the second node's daemon."""
        return self._daemons[-1].pid

    def run(self, *command: str) -> str:
        """What a Slurm command prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says about a job."""
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.partition("=")[::2] for word in words)

    def log(self) -> str:
        """All logs of the daemons."""
        return "\n".join(path.read_text() for path in self.folder.glob("slurm*.log"))


def submit(cluster: Cluster, stage: Path, *options: str, **variables: str) -> tuple[str, Path]:
    """(job id, run folder) of a job that `launch/submit.sh` submits: two processes on each node."""
    done = subprocess.run(
        ["launch/submit.sh", "configs/llama31_8b_bf16.yaml", "--cpu", *TINY, *options],
        cwd=ROOT, capture_output=True, text=True,
        env=cluster.environment | {
            "STAGE_PATH": str(stage), "JOB_TOTAL_GPUS": "4", "GPUS_PER_NODE": "2",
            "JAXBENCH_VENV": sys.prefix, "HF_TOKEN": "hf_secret", **variables,
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    number, folder = done.stdout.splitlines()[0].removeprefix("job ").split(": ")
    return number, Path(folder)


def wait(cluster, number, condition, seconds=300) -> dict[str, str]:
    """Waits for a condition on what Slurm says about a job; returns that."""
    end = time.monotonic() + seconds
    while not condition(job := cluster.job(number)):
        assert time.monotonic() < end, (job, cluster.log()[-3000:])
        time.sleep(0.3)
    return job


def processes(number: str) -> dict[int, int]:
    """Process ids of a job's ranks that run Python, by rank."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"jaxbench.train" not in (folder / "cmdline").read_bytes().split(b"\0"):
                continue
            words = (folder / "environ").read_bytes().decode().split("\0")
        except OSError:  # the process has ended
            continue
        environment = dict(word.partition("=")[::2] for word in words)
        if (
            environment.get("SLURM_JOB_ID") == number
            and (folder / "exe").resolve().stem[:6] == "python"
        ):
            pids[int(environment["SLURM_PROCID"])] = int(folder.name)
    return pids


def ended(job: dict[str, str]) -> bool:
    """True for a job that has ended, by what Slurm says about it."""
    return job["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
