"""One benchmark run from its first record to its last: what surrounds the training loop.

Checkpoints, profiles, signals, heartbeats and records meet here, so that `train` holds nothing but
the training.
"""

import json
import math
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax

from jaxbench import (
    environment,
    flops,
    job,
    mesh,
    metrics,
    ops,
    profiling,
    published,
    recipes,
    train,
    watchdog,
    xla_flags,
)
from jaxbench.config import Run, RunFailed
from jaxbench.heartbeat import Heartbeat, read


@dataclass(frozen=True, kw_only=True)
class Session:
    """How a run is surrounded; `Run` says what is computed.

    `folder` takes the records; with `resume` they continue those that are there. `checkpoint` saves
    at the end and before a stop, `checkpoint_every` also every so many steps; the last `keep` stay.
    `restore` is the checkpoint to start from. `watchdog` is the number of seconds without progress
    after which the job is ended.

    `profile` is a profiler, for the steps of `profile_steps` (first, and the one behind the last)
    in the processes of `profile_ranks`. `pgle` compiles the step with a profile of itself.
    `compilation_cache` is the folder in which compiled programs stay.
    """

    folder: Path
    resume: bool = False
    checkpoint: bool = False
    checkpoint_every: int | None = None
    keep: int = 2
    restore: Path | None = None
    watchdog: float | None = None
    profile: Literal["jax", "nsys"] | None = None
    profile_steps: tuple[int, int] = (20, 25)
    profile_ranks: tuple[int, ...] = ()
    nccl_trace: bool = False
    pgle: bool = False
    compilation_cache: Path | None = None

    @property
    def start(self) -> int:
        """Steps that are completed before the first one of this session."""
        return int(self.restore.name) if self.restore else 0


def new_record(run: Run, session: Session) -> dict[str, Any]:
    """run.json as it stands before the first step."""
    hardware = environment.hardware()
    reasons = published.differences(run, hardware["device"])
    if session.checkpoint_every is not None:
        reasons.append("checkpoints are written while it trains")
    if session.profile:
        reasons.append(f"it was profiled ({session.profile})")
    if session.nccl_trace:
        reasons.append("NCCL wrote a trace")
    resumed = resumed_at(session)
    if resumed:
        reasons.append(f"resumed at step {', '.join(map(str, resumed))}")
    row = published.lookup(run)
    return {
        "status": "running",
        "reason": None,
        "label": run.label,
        "comparable": not reasons,
        "not_comparable_because": reasons,
        "recipe": recipes.describe(run),
        "hardware": hardware,
        "versions": environment.versions(),
        "flags": {
            "compiler_options": xla_flags.options(run, hardware["platform"]),
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        },
        "parameters": flops.parameters(run.model)["total"],
        "published": row and asdict(row),
        "resumed_at": resumed,
    }


def resumed_at(session: Session) -> list[int]:
    """The steps at which the run in the session's folder was taken up again, this time included."""
    path = session.folder / "run.json"
    if not (session.resume and path.exists()):
        return []
    return [*json.loads(path.read_text())["resumed_at"], session.start]


def benchmark(run: Run, session: Session) -> int:
    """Runs and records; returns the exit status. Only the first process of a job writes records."""
    signals = job.Signals()
    record = new_record(run, session)
    recorder: metrics.Recorder | metrics.Silent = metrics.Silent()
    if jax.process_index() == 0:
        metrics.write_json(session.folder / "environment.json", environment.variables())
        recorder = metrics.Recorder(session.folder, run, record, session.start)
    with heartbeat(session) as beat:
        status, reason = attempt(run, session, record, recorder, signals, beat)
    peak = flops.peak_tflops(record["hardware"]["device"], run.precision.dtype)
    recorder.finish(status, reason, peak)
    if status == "interrupted":
        code = 128 + (signals.agreed or signal.SIGINT)
    else:
        code = int(status == "failed")
    if status != "completed" and not signals.agreed and jax.process_count() > 1:
        # This process is alone with its failure: to leave the job in order, it would wait for the
        # others, and they wait for it.
        sys.stdout.flush()
        os._exit(code)
    return code


def attempt(
    run: Run,
    session: Session,
    record: dict[str, Any],
    recorder: metrics.Recorder | metrics.Silent,
    signals: job.Signals,
    beat: Heartbeat,
) -> tuple[str, str | None]:
    """Trains and records every step; returns status and reason for run.json, whatever happens."""
    try:
        with jax.set_mesh(mesh.make_mesh(run.mesh_shape)), jax.transfer_guard("disallow"):
            for step in steps(run, session, record, recorder, signals, beat):
                recorder.step(step)
                for name in ("loss", "grad_norm"):
                    if not math.isfinite(step[name]):
                        raise RunFailed(f"{name} is {step[name]} at step {step['step']}")
        if signals.agreed:
            return "interrupted", signals.agreed.name
        return "completed", None
    except RunFailed as error:
        return "failed", str(error)
    except KeyboardInterrupt:
        return "interrupted", "SIGINT"
    except Exception as error:
        traceback.print_exc()
        lost = beat.path and watchdog.dead(read(beat.path.parent))
        return "failed", lost or traceback.format_exception_only(error)[0].splitlines()[0]


def steps(
    run: Run,
    session: Session,
    record: dict[str, Any],
    recorder: metrics.Recorder | metrics.Silent,
    signals: job.Signals,
    beat: Heartbeat,
) -> Iterator[dict[str, Any]]:
    """Compiles, restores, trains and saves as the session asks; yields completed steps."""
    beat.phase = "compiling"
    recorder.say(f"compiling {run.recipe}, row {run.row}, mesh {run.mesh_text()} ...")
    with environment.program_cache(session.compilation_cache, cached_by(record)) as cached:
        compiled, lower_s, compile_s = train.compile_program(run)
    record |= {"lower_s": lower_s, "compile_s": compile_s, "compiled_before": cached}
    recorder.say(f"lowered in {lower_s:.1f} s, compiled in {compile_s:.1f} s; training")
    train.check_program(compiled, run)
    record["kernels"] = ops.kernels(run.execution, run.precision, run.model.softcap)
    recorder.say(", ".join(f"{part}: {by}" for part, by in record["kernels"].items()))
    if session.pgle:
        compiled, record["pgle"] = profiling.guided(run, compiled, session.folder, recorder.say)
        train.check_program(compiled, run)
    beat.phase = "loading"
    state: train.State | None = None
    pauses: list[train.Pause] = []
    if session.profile and jax.process_index() in session.profile_ranks:
        pauses.append(profiling.window(session.profile, *session.profile_steps, session.folder))
    if session.restore or session.checkpoint:
        from jaxbench import checkpoint  # Orbax, which no other run needs

        if session.restore:
            like = jax.eval_shape(partial(train.init_state, run))
            state, record["restored"] = checkpoint.restore(session.restore, like, recorder.say)
        if session.checkpoint:
            saver = checkpoint.Checkpoints(
                session.folder, record["recipe"], session.start, session.checkpoint_every,
                session.keep, recorder.say,
            )  # fmt: skip
            record["checkpoints"] = saver.saved
            pauses.append(Phase(saver, "saving", beat))
    recorder.start_steps()

    def stop(step: int) -> bool:
        beat.phase, beat.started = "training", step
        return signals.stop(step)

    times = []
    for step in train.run_steps(run, compiled, stop, state, pauses):
        beat.completed = step["step"]
        times.append((step["step_time_s"], step["wait_s"]))
        yield step
    if session.checkpoint:
        saver.wait()
    record["ranks"] = stragglers(times)


def cached_by(record: dict[str, Any]) -> dict[str, Any]:
    """What a compiled program depends on; JAX's own key is finer, this one chooses a folder."""
    hardware = {k: v for k, v in record["hardware"].items() if k != "host"}
    return {"hardware": hardware, **{k: record[k] for k in ("recipe", "versions", "flags")}}


@dataclass
class Phase:
    """A pause of training that the heartbeat knows of."""

    pause: train.Pause
    name: str
    beat: Heartbeat

    def due(self, step: int, ending: bool) -> bool:
        return self.pause.due(step, ending)

    def act(self, step: int, state: train.State, ending: bool) -> None:
        with self.beat.during(self.name):
            self.pause.act(step, state, ending)


@contextmanager
def heartbeat(session: Session) -> Iterator[Heartbeat]:
    """This process's heartbeat, and in the first process the watchdog, if the session has one."""
    if session.watchdog is None:
        yield Heartbeat()
        return
    # A folder for each attempt: the heartbeats of a killed one are still there when it is resumed.
    attempt = job.from_first("attempt", lambda: f"{time.time():.3f}")
    folder = session.folder / "heartbeats" / attempt
    beat = Heartbeat(folder / f"{jax.process_index()}.json", min(10.0, session.watchdog / 5))
    dog = None
    if jax.process_index() == 0:
        dog = watchdog.start(session.folder, folder, jax.process_count(), session.watchdog)
    yield beat
    beat.end()
    if dog is not None:
        dog.kill()
        dog.wait()


def stragglers(times: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """Step times (mean, deviation, median, p95, in s) as each process measured them, without the
    first.

    Collectives make all processes as slow as the slowest one, so its mark is `wait_s`: the mean
    time for which a process waited for its device. A slow host waits least.
    """
    own: dict[str, Any] = {"rank": jax.process_index(), "host": platform.node()}
    if len(times) > 1:
        measured, waits = zip(*times[1:], strict=True)
        own |= {"step_time_s": metrics.spread(list(measured)), "wait_s": sum(waits) / len(waits)}
    return [json.loads(text) for text in job.gather("stragglers", json.dumps(own))]
