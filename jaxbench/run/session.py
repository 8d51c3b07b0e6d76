"""One run of a benchmark: the training loop, surrounded by records, checkpoints, profiles, signals
and a watchdog."""

import contextlib
import faulthandler
import signal
import sys
import traceback
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxbench import mesh
from jaxbench.base.errors import STATUS, RecipeError, RunFailed, cause_of, listed
from jaxbench.base.files import write_json
from jaxbench.base.terminal import live
from jaxbench.cluster import job
from jaxbench.cluster.devices import variables
from jaxbench.cluster.ending import exit_now, leave, refuse, tell
from jaxbench.cluster.signals import Signals, name_of
from jaxbench.cluster.watchdog import Watchdog
from jaxbench.jax_internals import compilations
from jaxbench.recipe.settings import Run
from jaxbench.results.plans import part_name
from jaxbench.run import plausible, profiling, repeatable, sampling, tune
from jaxbench.run.arguments import KEEP, Options
from jaxbench.run.cache import autotuning_identity, autotuning_notice, cache_identity, program_cache
from jaxbench.run.host_memory import check_host_memory
from jaxbench.run.records import Recorder
from jaxbench.run.start_record import new_record, start_fields
from jaxbench.run.step_errors import WatchedProgram
from jaxbench.train.loop import Pause, new_state, run_steps
from jaxbench.train.program import compile_program, offloaded_bytes
from jaxbench.train.program_checks import check_program, describe_kernels
from jaxbench.train.step import State, abstract_state


@dataclass(frozen=True, kw_only=True)
class Session:
    """Where a process of a run begins: folder, checkpoint and options.

    `folder` has the records. The run starts from the first of the `checkpoints`, or from an older
    one if it cannot be read; `skipped` says why newer ones are not used. `options` are from the
    command line.
    """

    folder: Path
    options: Options
    checkpoints: tuple[Path, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint to start from; None for a new run."""
        return self.checkpoints[0] if self.checkpoints else None

    @property
    def start(self) -> int:
        """The number of steps that were completed before this session."""
        return int(self.checkpoint.name) if self.checkpoint else 0


class Outcome(NamedTuple):
    """How a run ended: status, reason and cause for run.json. Only a failure has a cause."""

    status: str
    reason: str | None = None
    cause: str | None = None

    def code(self, number: signal.Signals) -> int:
        """The exit status. An interrupted run was interrupted by this signal."""
        if self.status == "interrupted":
            return 128 + number
        return STATUS[self.cause] if self.cause else 0


def benchmark(run: Run, session: Session) -> int:
    """Runs and records. Returns the exit status. Only rank 0 writes records."""
    first = jax.process_index() == 0
    try:
        path = session.folder / "run.json"
        record = new_record(run, path, session.options, session.start)
        if first:
            write_json(session.folder / "environment.json", variables())
        folder = session.folder if first else None
        recorder = Recorder(folder, run, record, session.start)
        with Watchdog(session.options.watchdog, partial(hung, recorder)) as watchdog:

            def interrupted(number: signal.Signals) -> None:  # before the first step
                end(recorder, watchdog, Outcome("interrupted", name_of(number)), number)

            signals = Signals(interrupted)
            outcome = Attempt(run, session, recorder, signals, watchdog).outcome()
        conclude(recorder, outcome)
        signals.close()
    except (RecipeError, RunFailed, OSError, jax.errors.JaxRuntimeError) as error:
        # Outside of training.
        return refuse(error, wait=False)
    together = outcome.status == "interrupted" and signals.agreed is not None
    number = signals.agreed or signals.received or signal.SIGINT
    return leave(outcome.code(number), wait=outcome.status == "completed" or together)


def conclude(recorder: Recorder, outcome: Outcome) -> None:
    """Says and records how the run ended."""
    if outcome.cause:
        tell(f"error: {outcome.reason}")
    recorder.finish(*outcome)


def hung(recorder: Recorder, reason: str) -> None:
    """Says and records why the watchdog ends this process, and where its threads are."""
    faulthandler.dump_traceback(sys.stderr.fileno())
    conclude(recorder, Outcome("failed", reason, "hang"))


def end(recorder: Recorder, watchdog: Watchdog, outcome: Outcome, number: signal.Signals) -> None:
    """Ends the process at once, even if the main thread is blocked, with a complete record.
    `number` is the signal of an interrupted run."""
    try:
        watchdog.end()  # first: only one thread ends the process
        conclude(recorder, outcome)
    finally:
        exit_now(outcome.code(number))


@dataclass
class Attempt:
    """One process's part in a run: compiles, restores, trains and saves."""

    run: Run
    session: Session
    recorder: Recorder
    signals: Signals
    watchdog: Watchdog
    program: WatchedProgram | None = None

    def outcome(self) -> Outcome:
        """Trains and records every step. Raises nothing."""
        try:
            with (
                jax.set_mesh(mesh.make_mesh(self.run.mesh_shape)),
                jax.transfer_guard("disallow"),
            ):
                self._train()
            if self.signals.agreed:
                return Outcome("interrupted", name_of(self.signals.agreed))
            return Outcome("completed")
        except KeyboardInterrupt:
            return Outcome("interrupted", name_of(self.signals.received or signal.SIGINT))
        except Exception as error:
            return self._failure(error)

    def _failure(self, error: Exception) -> Outcome:
        """How an error ends the run. Prints the traceback only if the cause is unknown; for a known
        cause the library's message is enough."""
        self.watchdog.claim()
        number = self.signals.received
        if number and cause_of(error) == "network":
            # Another process that is before its first step ends at once on the job's signal.
            return Outcome("interrupted", name_of(number))
        reason, cause = one_line(error), cause_of(error)
        is_ours = isinstance(error, RecipeError | RunFailed)
        if is_ours:
            reason = str(error)
        elif cause == "failed":
            traceback.print_exception(error)
        if cause in ("gpu", "network") and self.program and (gpu := self.program.failed_gpus()):
            reason = f"{gpu}: {reason}"
        lost = None if is_ours and cause != "network" else self.watchdog.lost()
        return Outcome("failed", lost, "lost") if lost else Outcome("failed", reason, cause)

    def _train(self) -> None:
        with self._kernel_sizes():
            compiled = self._compile()
        self.program = WatchedProgram(compiled, self._failed_launch)
        self._enter("loading", "the last checkpoint" if self.session.checkpoint else "new weights")
        state, saver = self._restore(), self._saver()
        pauses = self._pauses(saver, compiled)
        self._enter("training", f"steps {self.session.start} to {self.run.steps - 1}")
        times: list[tuple[float, float]] = []
        recompiled = compilations()
        sampler = sampling.sampler(self.recorder.say)
        with contextlib.ExitStack() as sampled:
            for step in run_steps(self.run, self.program, self._stop, state, pauses):
                self.watchdog.completed = step["step"]
                if recompiled and times:
                    step["compiled_s"] = sum(recompiled)
                recompiled.clear()
                times.append((step["step_time_s"], step["wait_s"]))
                self.recorder.step(step)
                if sampler and len(times) == 1:  # initialization is over
                    sampled.enter_context(sampler)
                initial = self.session.checkpoint is None and not step["step"]
                self._check(plausible.problem(self.run, step, initial))
        if saver is not None:
            saver.wait()
            self.recorder.add(checkpoints=saver.saved)
        summaries = sampler.summaries if sampler else []
        ranks = sampling.gather_ranks(times, not self.signals.agreed, summaries)
        self.recorder.add(ranks=ranks)
        if self.session.options.nccl_trace and not self.signals.agreed:
            profiling.check_nccl_trace(self.session.folder, self.recorder.say)
        self._check(job.broadcast("rate", lambda: plausible.rate_problem(self.recorder.summary())))

    def _check(self, problem: str | None) -> None:
        """Raises RunFailed if there is a problem with figures, except on a null GPU."""
        if problem and not self.recorder.record["hardware"]["null"]:
            raise RunFailed(problem, "numbers")

    def _failed_launch(self, error: Exception) -> None:
        """Ends the process for the error of a step that the blocked main thread cannot see."""
        outcome = self._failure(error)
        end(self.recorder, self.watchdog, outcome, self.signals.received or signal.SIGINT)

    def _enter(self, phase: str, detail: str) -> None:
        """Begins a phase, for the watchdog and in the log."""
        self.watchdog.phase = phase
        self.recorder.phase(phase, detail)

    def _stop(self, step: int) -> bool:
        self.watchdog.phase, self.watchdog.started = "training", step
        stopping = self.signals.stop(step)
        number = self.signals.agreed or self.signals.received
        if number and self.recorder.record["status"] == "running":
            # The last save may take longer than Slurm waits before it kills.
            reason = f"{name_of(number)}, and it did not end by itself"
            self.recorder.add(status="interrupted", reason=reason)
        return stopping

    def _kernel_sizes(self) -> contextlib.AbstractContextManager[None]:
        """With `--tune-kernels`, a context with the sizes of kernels that are the fastest here."""
        record, folder = self.recorder.record, self.session.options.compilation_cache
        if not self.session.options.tune_kernels:
            return contextlib.nullcontext()
        if mesh.platform() != "gpu":
            self.recorder.say("--tune-kernels: there is nothing to time without a GPU")
            return contextlib.nullcontext()
        self._enter("tuning kernels", "sizes of Pallas kernels")
        identity = autotuning_identity(record) | {"jaxbench": record["versions"]["jaxbench"]}
        with_sizes, known = tune.tune(self.run, folder, identity, self.recorder.say)
        self.recorder.add(kernel_sizes=known)
        return with_sizes

    def _compile(self) -> Any:
        """The checked program of a step. With `pgle`, it is compiled again with its own profile."""
        run, options, recorder = self.run, self.session.options, self.recorder
        self._enter("compiling", f"{run.recipe}, row {run.row}, mesh {run.mesh_text()}")
        on_gpu = mesh.platform() == "gpu"
        for_profiler = options.profile == "jax" and on_gpu
        compile_step = profiling.compile_without_graphs if for_profiler else compile_program
        spinner = live("compiling", shown=recorder.folder is not None)
        identity = cache_identity(recorder.record)
        autotuning = autotuning_identity(recorder.record) if on_gpu else None
        cache = program_cache(options.compilation_cache, identity, recorder.say, autotuning)
        with cache as cached, spinner:
            was_cached = cached.program and not for_profiler
            if on_gpu and not was_cached:
                recorder.say(autotuning_notice(cached))
            compiled, lower_s, compile_s = compile_step(
                run, cached.options, profiling.broadcast_guide("schedule")
            )
        recorder.add(
            lower_s=lower_s, compile_s=compile_s, compiled_before=was_cached,
            autotuned_before=cached.autotuned,
        )  # fmt: skip
        recorder.say(f"lowered in {lower_s:.1f} s, compiled in {compile_s:.1f} s")
        if for_profiler:
            recorder.say("compiled without CUDA graphs, since they hide kernels from the profiler")
        job.meet("before the first collective")
        check_program(compiled, run)
        check_host_memory(offloaded_bytes(compiled), "after compiling")
        by = describe_kernels(run)
        recorder.add(kernels=by)
        recorder.say(", ".join(f"{part_name(part)}: {name}" for part, name in by.items()))
        if options.pgle:
            compiled, pgle = profiling.compile_with_pgle(
                run, compiled, self.session.folder, recorder.say
            )
            recorder.add(pgle=pgle)
            check_program(compiled, run)
        if options.check_repeatable:
            recorder.add(repeatable=repeatable.check(run, compiled, recorder.say))
        return compiled

    def _restore(self) -> State:
        """The state of the checkpoint to start from, or the initial state without one."""
        if self.session.checkpoint is None:
            return new_state(self.run)
        from jaxbench.run import checkpoint  # slow to import, and only needed here

        like, skipped = abstract_state(self.run), list(self.session.skipped)
        for path in self.session.checkpoints:
            try:
                reason, restored = "", checkpoint.restore(path, like, self.recorder.say)
            except RunFailed as error:
                if error.cause in ("gpu", "network"):
                    raise
                reason = str(error)
            job.meet(f"after {path.name} was restored")
            reasons = filter(None, job.all_gather(f"restored {path.name}", reason))
            if reason := next(reasons, ""):
                skipped.append(reason)
                continue
            self._start_from(path, skipped)
            state, loaded = restored
            self.recorder.add(restored=loaded | {"skipped": skipped})
            return state
        raise RunFailed(listed(skipped, 3, "; "), "storage")

    def _start_from(self, path: Path, skipped: list[str]) -> None:
        """Records the checkpoint that was restored. It may be older than the one that was
        planned."""
        for reason in skipped:
            self.recorder.say(f"warning: {reason}")
        if skipped:
            self.recorder.say(f"starting from {path}")
        if path != self.session.checkpoint:
            self.session = replace(self.session, checkpoints=(path,))
            start, record = self.session.start, self.recorder.record
            fields = start_fields(self.run, self.session.options, record, start)
            self.recorder.begin(start, fields)

    def _saver(self) -> Any:
        """The run's `Checkpoints`; None if it saves none."""
        folder, options = self.session.folder, self.session.options
        if not options.checkpoint and options.checkpoint_every is None:
            return None
        from jaxbench.run.checkpoint import Checkpoints

        start, every, keep = self.session.start, options.checkpoint_every, options.keep or KEEP
        return Checkpoints(folder, start, every, keep, self.recorder, self.watchdog)

    def _pauses(self, saver: Pause | None, program: Any) -> list[Pause]:
        options, pauses = self.session.options, [] if saver is None else [saver]
        if options.profile and jax.process_index() in options.profile_ranks:
            steps = options.profile_steps
            if options.profile == "nsys":
                window = profiling.nsys_window(steps)
            else:
                window = profiling.jax_window(steps, self.session.folder, program)
            pauses.insert(0, window)
        return pauses


def one_line(error: Exception) -> str:
    """The type and the first line of an error. If the first line ends with a colon, the next line
    too."""
    lines = filter(None, map(str.strip, traceback.format_exception_only(error)[0].splitlines()))
    first = next(lines)
    return f"{first} {next(lines, '')}".rstrip() if first.endswith(":") else first
