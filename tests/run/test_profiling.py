"""Windows of profiles, what excludes what, and what a profile does to a compiled schedule."""

import ctypes
import os
import re
import shutil
import struct
import subprocess
from types import SimpleNamespace

import jax
import pytest
from commands import TINY, kill, read, run, start_two
from compiled import needs_compiler
from mistakes import assert_mistake
from tiny import mesh_of, tiny_run

from jaxbench import mesh
from jaxbench.base.errors import RecipeError, RunFailed
from jaxbench.base.hardware import H100
from jaxbench.jax_internals import kernel_names
from jaxbench.plan.absent import compile_only_devices
from jaxbench.run import command, profiling
from jaxbench.train import program
from jaxbench.train.program import compile_program
from jaxbench.xla import flags


def edges(window, steps, stopped_at=None):
    """The boundaries at which the window acts in a run of so many steps."""
    acted = []
    for step in range(steps + 1):
        ending = step in (steps, stopped_at)
        if window.due(step, ending):
            window.act(step, None, ending)
            acted.append(step)
        if ending:
            break
    return acted


@pytest.mark.parametrize(
    ("start", "steps", "stopped_at", "acted"),
    [(0, 50, None, [20, 25]), (0, 25, None, [20, 25]), (0, 50, 22, [20, 22]), (0, 20, None, [])],
)
def test_a_window_opens_once_and_always_closes(start, steps, stopped_at, acted):
    calls = []
    window = profiling.Window(20, 25, lambda: calls.append("on"), lambda: calls.append("off"))
    assert edges(window, steps, stopped_at) == acted
    assert calls == ["on", "off"][: len(acted)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--profile", "jax", "--pgle"), "--profile and --pgle exclude each other"),
        (("--nccl-trace", "--pgle"), "--nccl-trace and --pgle exclude each other"),
        (("--profile", "nsys"), "start it with launch/run.sh, or under nsys profile"),
        (("--profile", "jax", "--steps", "20"), "--profile-steps 20 comes after the last step"),
        (("--resume",), "--resume needs --output"),
        (("--keep", "0"), "--keep = 0 must be above 0"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(options, message, capsys):
    assert_mistake(command.main, [*TINY[:2], *options], message, capsys)


@pytest.mark.parametrize(("rank", "message"), [("8", "joined"), ("7", "--profile nsys: start it")])
def test_only_processes_that_are_profiled_have_to_be_under_nsys(rank, message, monkeypatch, capsys):
    """launch/run.sh starts no other one under it, by default none beyond the first eight."""

    def join(*_):
        raise RecipeError("joined")

    monkeypatch.setattr(command, "join_and_resolve", join)
    for name, value in (("COORDINATOR_ADDRESS", "n0:99"), ("NUM_PROCESSES", "16")):
        monkeypatch.setenv(f"JAX_{name}", value)
    monkeypatch.setenv("JAX_PROCESS_ID", rank)
    assert_mistake(command.main, [*TINY[:2], "--profile", "nsys"], message, capsys)


@pytest.mark.slow
def test_pgle_and_wrong_devices_are_refused_in_a_line():
    assert run(*TINY, "--pgle")[::2] == (
        2,
        "error: --pgle needs GPUs: a CPU has no latencies to hide\n",
    )
    status, _, err = run(*TINY, "--local-devices", 3)
    assert status == 2
    assert re.fullmatch(r"error: node \S+, process 0 sees 2 devices, but 3 were expected\n", err)
    without = ("--config", "llama31_8b_bf16", "--local-devices", 4)
    status, _, err = run(*without, JAX_PLATFORMS="cpu")
    assert status == 2
    assert re.fullmatch(
        r"error: node \S+, process 0 sees 0 GPUs \(JAX_PLATFORMS=cpu\), but 4 were .*\n",
        err,
    )


@pytest.mark.slow
def test_a_profiled_run_is_marked_and_its_program_cached(tmp_path):
    """Both in one run, for its start-up time; the second run finds the program."""
    cache = (*TINY, "--compilation-cache", tmp_path / "cache", "--steps", 6)
    profile = ("--profile", "jax", "--profile-steps", "2-4")
    status, _, err = run(*cache, *profile, "--output", tmp_path / "first")
    assert (status, err) == (0, "")
    record, steps = read(tmp_path / "first")
    assert "it was profiled (--profile jax)" in record["not_comparable_because"]
    assert record["compiled_before"] is False
    assert list((tmp_path / "first").glob("profile/rank-0/plugins/profile/*/*.xplane.pb"))
    status, _, err = run(*cache, "--output", tmp_path / "second")
    assert (status, err) == (0, "")
    again, steps_again = read(tmp_path / "second")
    assert again["compiled_before"] is True
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert len(list((tmp_path / "cache").glob("*/jit_step-*-cache"))) == 1
    assert [s["loss"] for s in steps_again] == [s["loss"] for s in steps]


def test_nccl_is_told_where_to_write(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling.os, "environ", environment := {})
    profiling.trace_nccl(tmp_path)
    assert environment == {
        "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL,P2P,NET",
        "NCCL_DEBUG_FILE": f"{tmp_path}/nccl-trace/%h.%p.log",
    }  # fmt: skip


@pytest.mark.slow
def test_processes_that_read_different_profiles_do_not_train(tmp_path):
    """As on a file system that shows one of them an older file: their programs would differ."""
    for index in range(2):
        (tmp_path / f"{index}.pb").write_bytes(b"profile" * index)
    ask = f"""
from pathlib import Path
import jax; jax.config.update("jax_platforms", "cpu")
from jaxbench.cluster import job
from jaxbench.run import profiling
job.join()
path = Path({str(tmp_path)!r}, f"{{jax.process_index()}}.pb")
profiling.check_digest(path, job.broadcast("pgle", lambda: profiling._digest(path)))
"""
    processes = start_two("-c", ask, module=None)
    try:
        errors = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        kill(processes)
    for index, error in enumerate(errors):
        assert "RunFailed: PGLE: not every process reads the same profile in " in error
        assert f"{index}.pb" in error


def test_a_program_is_compiled_again_with_the_profile_of_the_first(monkeypatch):
    options = []
    lowered = SimpleNamespace(compile=lambda compiler_options: options.append(compiler_options))
    making = SimpleNamespace(lower=lambda state: lowered)
    monkeypatch.setattr(program, "make_program", lambda run: making)
    monkeypatch.setattr(program, "parse_program", lambda compiled, run: None)
    monkeypatch.setattr(program, "forecast_gpu", lambda run: H100)
    monkeypatch.setattr(program.flags, "guided", lambda run: True)
    tiny = tiny_run()
    with mesh_of(tiny):
        program.compile_program(tiny, guide=lambda program, gpu: gpu.name)
        program.compile_program(tiny)
    assert [of.get("fdo_profile") for of in options] == [None, b"H100", None]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler: apt-get install gcc")
def test_a_profiler_that_does_not_start_is_one_line(tmp_path, monkeypatch):
    """As where another tool holds CUPTI: the runtime says so by its return code alone."""
    (tmp_path / "cudart.c").write_text("int cudaProfilerStart(void) { return 999; }")
    library = tmp_path / "cudart.so"
    subprocess.run(["cc", "-shared", "-o", library, tmp_path / "cudart.c"], check=True)
    monkeypatch.setattr(profiling, "cuda_runtime", lambda: ctypes.CDLL(library))
    window = profiling.nsys_window((2, 4))
    with pytest.raises(RunFailed, match=r"cudaProfilerStart failed with CUDA error 999$"):
        window.act(2, None, ending=False)


def test_a_profile_without_gpu_instructions_covers_nothing(tmp_path):
    """As on a CPU, and where another tool holds CUPTI: `guided` fails the run then."""
    jax.profiler.start_trace(tmp_path)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.numpy.zeros(8)))
    jax.profiler.stop_trace()
    program = jax.jit(jax.numpy.linalg.cholesky).lower(jax.numpy.eye(8)).compile()
    assert list(kernel_names(program))  # LAPACK
    assert profiling._collect(tmp_path, tmp_path / "profile.pb", program)[0] == 0.0
    assert (tmp_path / "profile.pb").exists()


def test_a_profile_without_an_event_on_a_device_is_none(tmp_path):
    with pytest.raises(RunFailed, match="no event on a device"):
        profiling.check_profile(tmp_path, "cpu")
    jax.profiler.start_trace(tmp_path)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.numpy.zeros(8)))
    jax.profiler.stop_trace()
    profiling.check_profile(tmp_path, "cpu")
    with pytest.raises(RunFailed, match="no event on a device"):
        profiling.check_profile(tmp_path, "gpu")


def test_a_trace_of_nccl_is_looked_at(tmp_path, monkeypatch):
    said = []
    profiling.check_nccl_trace(tmp_path, said.append)
    monkeypatch.setattr(profiling.mesh, "platform", lambda: "gpu")
    file = tmp_path / "nccl-trace" / f"node7.{os.getpid()}.log"
    file.parent.mkdir()
    file.touch()
    with pytest.raises(RunFailed, match="--nccl-trace: NCCL wrote nothing into"):
        profiling.check_nccl_trace(tmp_path, said.append)
    file.write_text("NCCL INFO AllGather")
    profiling.check_nccl_trace(tmp_path, said.append)
    assert said == [
        "NCCL wrote no trace, since a CPU or a single GPU does not use it",
        f"NCCL wrote a trace: {file.parent}",
    ]


def encode(costs):
    """A serialized tensorflow.profiler.ProfiledInstructionsProto: repeated (name, microseconds)."""
    entries = []
    for name, cost in costs.items():
        entry = bytes([0x0A, len(name)]) + name.encode() + b"\x11" + struct.pack("<d", cost)
        entries.append(bytes([0x0A, len(entry)]) + entry)
    return b"".join(entries)


@needs_compiler
def test_a_profile_reaches_the_scheduler(tmp_path):
    """For absent GPUs: long gathers are started earlier or waited for later."""
    overrides = ("parallelism.fsdp=8", "precision.dtype=bf16", "execution.remat=full")
    tiny = tiny_run(*overrides, devices=8)
    instruction = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = ", re.MULTILINE)
    # In a module's protocol buffer: a name, and behind it the opcode of what a kernel runs.
    profiled = re.compile(
        rb"\n(?:[\x80-\xff].|.)([\w.-]+)\x12.(custom-call|fusion|(?:all|reduce)-[a-z-]+)", re.DOTALL
    )
    with jax.set_mesh(mesh.make_mesh(tiny.mesh_shape, compile_only_devices(H100, 8))):
        program = compile_program(tiny).program
        orders = [instruction.findall(program.as_text())]
        (module,) = program.runtime_executable().hlo_modules()
        names = profiled.findall(module.as_serialized_hlo_module_proto())
        costs = {n.decode(): 10_000.0 if op.startswith(b"all-g") else 1.0 for n, op in names}
        # The profile has this one, the text the start that wraps it.
        assert any(name.startswith("unreduced_reduce_scatter") for name in costs)
        path = tmp_path / "profile.pb"
        path.write_bytes(encode(costs))
        for _ in range(2):
            assert profiling.coverage(path.read_bytes(), program) == 1.0
            compiled = compile_program(tiny, {flags.PGLE: str(path)}).program
            orders.append(instruction.findall(compiled.as_text()))
    assert profiling.coverage(encode({"another": 1.0}), program) == 0.0
    assert orders[1] == orders[2]
    # jax 0.12 also fuses a little differently: compared is the order of what both have.
    common = set(orders[0]) & set(orders[1])
    assert len(common) > 0.95 * len(orders[0])
    first, second = ([name for name in order if name in common] for order in orders[:2])
    assert first != second


def test_an_instruction_that_is_called_as_its_opcode_is_keeps_the_opcode():
    """XLA calls the first of its asynchronous slices so; a forecast of the profiled program would
    take it for a kernel that waits."""
    text = "  %fusion-start = ((f32[4]), f32[1], u32[]) fusion-start(%x), calls=%body\n"
    text += "  %y = f32[1] fusion-done(%fusion-start)\n"
    renamed = profiling.renamed(text, {"fusion-start": "loop_slice"})
    assert "%loop_slice = ((f32[4]), f32[1], u32[]) fusion-start(%x)" in renamed
    assert "fusion-done(%loop_slice)" in renamed
