"""One benchmark run from its first record to its last: what surrounds the training loop.

Checkpoints, profiles, signals, heartbeats and records meet here, so that `train` holds nothing but
the training.
"""

import json
import math
import os
import platform
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax

from jaxbench import hardware as gpus
from jaxbench import mesh
from jaxbench.cluster import job, watchdog
from jaxbench.cluster.causes import cause_of
from jaxbench.cluster.heartbeat import Heartbeat
from jaxbench.cluster.signals import Signals
from jaxbench.cluster.signals import reason as stop_reason
from jaxbench.cluster.watched import watched
from jaxbench.errors import STATUS, RunFailed
from jaxbench.files import write_json
from jaxbench.hardware import identify
from jaxbench.recipe import flops, published, recipes
from jaxbench.recipe.settings import Run
from jaxbench.recipe.window import spread
from jaxbench.run import profiling, repeatable
from jaxbench.run.cache import program_cache
from jaxbench.run.devices import hardware, variables
from jaxbench.run.records import SCHEMA, Recorder, read
from jaxbench.train.loop import Pause, run_steps
from jaxbench.train.program import check_program, compile_program, kernels
from jaxbench.train.step import State, abstract_state
from jaxbench.versions import versions
from jaxbench.xla import flags


@dataclass(frozen=True, kw_only=True)
class Session:
    """How a run is surrounded; `Run` says what is computed.

    `folder` takes the records; with `resume` they continue those that are there. `checkpoint` saves
    at the end and before a stop, `checkpoint_every` also every so many steps; the last `keep` stay.
    `restore` is the checkpoint to start from. `watchdog` is the number of seconds without progress
    after which the job is ended.

    `profile` is a profiler, for the steps of `profile_steps` (first, and the one behind the last)
    in the processes of `profile_ranks`. `pgle` compiles the step with a profile of itself.
    `check_repeatable` runs some steps twice first, and compares bits.
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
    check_repeatable: bool = False
    compilation_cache: Path | None = None

    @property
    def start(self) -> int:
        """Steps that are completed before the first one of this session."""
        return int(self.restore.name) if self.restore else 0


def new_record(run: Run, session: Session) -> dict[str, Any]:
    """run.json as it stands before the first step."""
    devices = hardware()
    reasons = published.differences(run, devices["device"])
    if session.checkpoint_every is not None:
        reasons.append("checkpoints are written while it trains")
    if session.profile:
        reasons.append(f"it was profiled ({session.profile})")
    if session.nccl_trace:
        reasons.append("NCCL wrote a trace")
    resumed = resumed_at(session)
    if resumed:
        reasons.append(f"resumed at step {', '.join(map(str, resumed))}")
    row = published.lookup(run, identify(devices["device"]))
    return {
        "schema": SCHEMA,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "status": "running",
        "reason": None,
        "cause": None,
        "label": run.label,
        "comparable": not reasons,
        "not_comparable_because": reasons,
        "recipe": recipes.describe(run),
        "hardware": devices,
        # One process asks for all: its answer is part of what a cached program is known by, and
        # thousands would ask the file system at once.
        "versions": json.loads(job.from_first("versions", lambda: json.dumps(versions()))),
        "flags": {
            "compiler_options": flags.options(run, devices["platform"]),
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
    return [*read(path)["resumed_at"], session.start]


def benchmark(run: Run, session: Session) -> int:
    """Runs and records; returns the exit status. Only the first process of a job writes records."""
    first = jax.process_index() == 0
    try:
        record = new_record(run, session)
        if first:
            write_json(session.folder / "environment.json", variables())
        recorder = Recorder(session.folder if first else None, run, record, session.start)
        with watched(session.folder, session.watchdog) as beat:
            signals = Signals(partial(abandon, recorder, beat))
            status, reason, cause = Attempt(run, session, recorder, signals, beat).outcome()
        if cause and not first:
            print(f"error: {reason}", file=sys.stderr)  # the first process has its result
        peak = gpus.peak_tflops(record["hardware"]["device"], run.precision.dtype)
        recorder.finish(status, reason, peak, cause)
        signals.close()
    except (RunFailed, OSError, jax.errors.JaxRuntimeError) as error:  # of the records, the others
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return leave(STATUS[cause_of(error)], alone=True)
    if status == "interrupted":
        return leave(128 + (signals.agreed or signal.SIGINT), alone=signals.agreed is None)
    return leave(STATUS[cause] if cause else 0, alone=cause is not None)


def abandon(recorder: Recorder, beat: Heartbeat, number: signal.Signals) -> None:
    """Ends a process that has not begun to train, with its record."""
    try:
        beat.end()  # first: what the main thread does meanwhile must not become the record's end
        recorder.finish("interrupted", stop_reason(number), None)
    finally:
        sys.stdout.flush()
        os._exit(128 + number)


def leave(code: int, alone: bool) -> int:
    """The exit status; does not return where a process of several is `alone` with its end."""
    if alone and job.client() is not None:
        # To leave the job in order, it would wait for the others, and they wait for it.
        sys.stdout.flush()
        os._exit(code)
    return code


@dataclass
class Attempt:
    """One process's part in a run: compiles, restores, trains and saves as the session asks."""

    run: Run
    session: Session
    recorder: Recorder
    signals: Signals
    beat: Heartbeat

    def outcome(self) -> tuple[str, str | None, str | None]:
        """Trains and records every step; returns status, reason and the cause of a failure for
        run.json, whatever happens."""
        try:
            on = mesh.make_mesh(self.run.mesh_shape)
            with jax.set_mesh(on), jax.transfer_guard("disallow"):
                self._train()
            if self.signals.agreed:
                return "interrupted", stop_reason(self.signals.agreed), None
            return "completed", None, None
        except RunFailed as error:
            if error.cause == "network" and (lost := self._lost()):
                return "failed", lost, "lost"
            return "failed", str(error), error.cause
        except KeyboardInterrupt:
            return "interrupted", "SIGINT", None
        except Exception as error:
            traceback.print_exc()
            if lost := self._lost():
                return "failed", lost, "lost"
            reason = traceback.format_exception_only(error)[0].splitlines()[0]
            return "failed", reason, cause_of(error)

    def _lost(self) -> str | None:
        """The processes beside this one that are gone, and so may be why it fails."""
        own = self.beat.path
        return watchdog.lost(own) if own and jax.process_count() > 1 else None

    def _train(self) -> None:
        program = self._compiled()
        self._enter("loading", "the last checkpoint" if self.session.restore else "new weights")
        state, saver = self._restored(), self._saver()
        self._enter("training", f"steps {self.session.start} to {self.run.steps - 1}")
        self.recorder.start_steps()
        times = []
        for step in run_steps(self.run, program, self._stop, state, list(self._pauses(saver))):
            self.beat.completed = step["step"]
            times.append((step["step_time_s"], step["wait_s"]))
            self.recorder.step(step)
            for name in ("loss", "grad_norm"):
                if not math.isfinite(step[name]):
                    text = f"{name} is {step[name]} at step {step['step']}"
                    raise RunFailed(text, "numbers")
        if saver is not None:
            saver.wait()
            self.recorder.add(checkpoints=saver.saved)
        self.recorder.add(ranks=stragglers(times))

    def _enter(self, phase: str, detail: str) -> None:
        """Another phase begins, for the watchdog and for whoever reads the log."""
        # The first step counts as training; until it is queued, weights are made.
        self.beat.phase = "loading" if phase == "training" else phase
        self.recorder.phase(phase, detail)

    def _stop(self, step: int) -> bool:
        self.beat.phase, self.beat.started = "training", step
        return self.signals.stop(step)

    def _compiled(self) -> Any:
        """The step's program, checked, and recompiled with a profile of itself for PGLE."""
        run, session, recorder = self.run, self.session, self.recorder
        self._enter("compiling", f"{run.recipe}, row {run.row}, mesh {run.mesh_text()}")
        with program_cache(session.compilation_cache, cached_by(recorder.record)) as cached:
            compiled, lower_s, compile_s = compile_program(run)
        recorder.add(lower_s=lower_s, compile_s=compile_s, compiled_before=cached)
        recorder.say(f"lowered in {lower_s:.1f} s, compiled in {compile_s:.1f} s")
        check_program(compiled, run)
        recorder.add(kernels=kernels(run))
        recorder.say(", ".join(f"{part}: {by}" for part, by in kernels(run).items()))
        if session.pgle:
            compiled, pgle = profiling.guided(run, compiled, session.folder, recorder.say)
            recorder.add(pgle=pgle)
            check_program(compiled, run)
        if session.check_repeatable:
            recorder.add(repeatable=repeatable.check(run, compiled, recorder.say))
        return compiled

    def _restored(self) -> State | None:
        """The state to start from, if it is not the initial one."""
        if self.session.restore is None:
            return None
        from jaxbench.run import checkpoint  # Orbax, which no other run needs

        like = abstract_state(self.run)
        state, loaded = checkpoint.restore(self.session.restore, like, self.recorder.say)
        self.recorder.add(restored=loaded)
        return state

    def _saver(self) -> Any:
        """Saves the run's checkpoints, if it is to have any."""
        session = self.session
        if not session.checkpoint:
            return None
        from jaxbench.run import checkpoint

        return checkpoint.Checkpoints(
            session.folder, self.recorder.record["recipe"], session.start,
            session.checkpoint_every, session.keep, self.recorder.say,
        )  # fmt: skip

    def _pauses(self, saver: Any) -> Iterator[Pause]:
        session = self.session
        if session.profile and jax.process_index() in session.profile_ranks:
            yield profiling.window(session.profile, *session.profile_steps, session.folder)
        if saver is not None:
            yield Saving(saver, self.recorder, self.beat)


@dataclass
class Saving:
    """The saver as a pause of which heartbeat and record know."""

    saver: Any
    recorder: Recorder
    beat: Heartbeat

    def due(self, step: int, ending: bool) -> bool:
        """As the saver."""
        return self.saver.due(step, ending)

    def act(self, step: int, state: State, ending: bool) -> None:
        """As the saver."""
        self.recorder.phase("saving", f"the state after {step} steps")
        with self.beat.during("saving"):
            self.saver.act(step, state, ending)
        self.recorder.add(checkpoints=self.saver.saved)


def cached_by(record: dict[str, Any]) -> dict[str, Any]:
    """What a compiled program depends on; JAX's own key is finer, this one chooses a folder."""
    devices = {k: v for k, v in record["hardware"].items() if k != "host"}
    versions = {k: v for k, v in record["versions"].items() if k != "commit"}
    return {"hardware": devices, "versions": versions} | {k: record[k] for k in ("recipe", "flags")}


def stragglers(times: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """Step times (mean, deviation, median, p95, in s) as each process measured them, without the
    first.

    Collectives make all processes as slow as the slowest one, so its mark is `wait_s`: the mean
    time for which a process waited for its device. A slow host waits least.
    """
    own: dict[str, Any] = {"rank": jax.process_index(), "host": platform.node()}
    if len(times) > 1:
        measured, waits = zip(*times[1:], strict=True)
        own |= {"step_time_s": spread(list(measured)), "wait_s": sum(waits) / len(waits)}
    return [json.loads(text) for text in job.gather("stragglers", json.dumps(own))]
