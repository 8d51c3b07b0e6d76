"""`plan --hlo`: a program that any code has compiled, read from a file."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from compiled import needs_compiler
from mistakes import assert_mistake
from parsed import said_by

from jaxbench.base.hardware import H100
from jaxbench.plan import command
from jaxbench.plan.absent import compile_only_devices

PROGRAM = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {2}: (1, {}, \
must-alias) }, entry_computation_layout={()}, num_partitions=8

%body (c: (f32[64], bf16[8192,8192])) -> (f32[64], bf16[8192,8192]) {
  %c = (f32[64]{0}, bf16[8192,8192]{1,0}) parameter(0)
  %v = f32[64]{0} get-tuple-element(%c), index=0
  %w = bf16[8192,8192]{1,0} get-tuple-element(%c), index=1
  %dot = bf16[8192,8192]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %next = (f32[64]{0}, bf16[8192,8192]{1,0}) tuple(%v, %dot)
}

%condition (d: (f32[64], bf16[8192,8192])) -> pred[] {
  %d = (f32[64]{0}, bf16[8192,8192]{1,0}) parameter(0)
  %u = f32[64]{0} get-tuple-element(%d), index=0
  ROOT %more = pred[] fusion(%u), kind=kLoop, calls=%test
}

%test (p: f32[64]) -> pred[] {
  %p = f32[64]{0} parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[64], w: bf16[8192,8192]) -> (f32[64], f32[1024], bf16[64,8192]) {
  %x = f32[64]{0} parameter(0)
  %y = bf16[8192,8192]{1,0} parameter(1)
  %state = (f32[64]{0}, bf16[8192,8192]{1,0}) tuple(%x, %y)
  %loop = (f32[64]{0}, bf16[8192,8192]{1,0}) while(%state), condition=%condition, body=%body
  %out = bf16[8192,8192]{1,0} get-tuple-element(%loop), index=1
  %gathered = f32[1024]{0} all-gather(%x), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %attention = bf16[64,8192]{1,0} custom-call(%out), custom_call_target="__cudnn$norm"
  ROOT %result = (f32[64]{0}, f32[1024]{0}, bf16[64,8192]{1,0}) tuple(%x, %gathered, %attention)
}
"""
UNKNOWN = PROGRAM.replace("__cudnn$norm", "their_attention")
"""The same with a call that computes something."""

UNKNOWN_S = (8192 + 64) * 8192 * 2 / 2.85e12
"""The bytes, at the rate of a kernel that moves as many on an H100."""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "step.txt"
    path.write_text(PROGRAM)
    return path


def read(path, capsys, *options):
    assert command.main(["--hlo", str(path), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_program_is_read(program, capsys):
    found = read(program, capsys)
    array = 8192 * 8192 * 2
    assert (found["devices"], found["arguments"], found["outputs"]) == (8, 256 + array, 4096)
    assert found["flops"] == {"product bf16": 2 * 8192**3}
    assert found["assumed"] == ["loop: a loop without a trip count, counted once"]
    (gather,) = found["collectives"]
    assert (gather["kind"], gather["axes"], gather["count"]) == ("all-gather", "4 GPUs, 2 apart", 1)
    assert found["forecast"]["unknown"] == {}
    assert found["peak"] is None
    slower = read(program, capsys, "--system", "nvlink=45")
    assert slower["bound_parts_s"]["exposed"] == pytest.approx(
        10 * found["bound_parts_s"]["exposed"]
    )


def test_arrays_in_host_memory_are_not_on_the_device(program, capsys):
    on_host = PROGRAM.replace("%x = f32[64]{0} parameter", "%x = f32[64]{0:S(5)} parameter")
    program.write_text(
        on_host.replace("(f32[64]{0}, f32[1024]{0},", "(f32[64]{0}, f32[1024]{0:S(5)},")
    )
    found = read(program, capsys)
    assert (found["arguments"], found["outputs"]) == (8192 * 8192 * 2, 0)


def test_text_and_page_of_a_program(program, tmp_path, capsys):
    assert command.main(["--hlo", str(program)]) == 0
    text = capsys.readouterr().out
    assert "temporaries are unknown" in text
    assert "\n  loop: a loop without a trip count, counted once" in text
    assert re.search(r"\nforecast    \d\.\d{3} ms per step", text)
    assert re.search(r"\nmoves       what would .*:\n   \+[4-9]\.\d %  matmuls: 5 % slower\n", text)
    page = tmp_path / "page.html"
    assert command.main(["--hlo", str(program), "--format", "html", "--output", str(page)]) == 0
    said = said_by(page.read_text())
    assert re.search(r"step\.txt on H100: 0\.00\d+ s per step", said)
    assert "The peak is unknown" in said
    assert "TFLOP per GPU and step: matmul bf16 1.1." in said


def test_a_call_that_may_compute_leaves_no_forecast(program, capsys):
    """However few bytes it moves: an eigendecomposition moves few, and takes long."""
    program.write_text(UNKNOWN)
    assert command.main(["--hlo", str(program)]) == 0
    assert ("\n  their_attention: at least 0.000 s for its bytes\n") in capsys.readouterr().out
    assert command.main(["--hlo", str(program), "--format", "html"]) == 0
    text = capsys.readouterr().out
    assert "on H100: no forecast</h1>" in text
    assert "compute: their_attention." in text
    assert "<caption>Forecast, one part after the other" not in text


def test_scripts_get_no_forecast_where_there_is_none(program, capsys):
    assert read(program, capsys)["forecast_step_s"] > 0
    program.write_text(UNKNOWN)
    found = read(program, capsys)
    assert found["forecast_step_s"] is None
    assert found["bound_step_s"] > 0
    unknown = found["forecast"].pop("unknown")
    assert unknown == {"their_attention": pytest.approx(UNKNOWN_S, rel=0.01)}
    assert set(found["forecast"].values()) == {None}
    assert found["sensitivities"] == []


def test_a_program_for_cpus_is_refused(tmp_path, capsys):
    def step(x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, length=3)[0]

    path = tmp_path / "step.txt"
    path.write_text(jax.jit(step).lower(jnp.ones((8, 8))).compile().as_text())
    said = f"--hlo: {path} is a program for CPUs; expected one that was compiled for GPUs"
    assert_mistake(command.main, ["--hlo", path, "--json"], said, capsys)


@pytest.mark.parametrize(
    "line",
    [
        "  %x = f32[64]{0:T(256)} parameter(0)",
        '  %k = f32[64]{0} custom-call(%x), custom_call_target="tpu_custom_call"',
    ],
)
def test_a_program_for_tpus_is_refused(line, program, capsys):
    program.write_text(PROGRAM.replace("  %y =", f"{line}\n  %y ="))
    said = f"--hlo: {program} is a program for TPUs; expected one that was compiled for GPUs"
    assert_mistake(command.main, ["--hlo", program, "--json"], said, capsys)


def test_part_of_a_program_is_one_line(tmp_path, capsys):
    """Wherever the file ends, and whichever line is missing."""
    path, entry = tmp_path / "step.txt", PROGRAM.index("ENTRY")
    lines = PROGRAM.splitlines(keepends=True)
    without = [n for n, line in enumerate(lines) if re.search(r"%(w|test|yes|loop|result) ", line)]
    texts = [PROGRAM[:end] for end in range(entry, len(PROGRAM) - 2, 41)]
    texts += ["".join([*lines[:n], *lines[n + 1 :]]) for n in without]
    texts += [PROGRAM.replace("while(%state)", "while(%state"), PROGRAM.replace(" = bf16", " bf16")]
    for text in texts:
        path.write_text(text)
        assert_mistake(command.main, ["--hlo", path], f"{path}", capsys)


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("# a document", (), "has no scheduled HLO; expected the whole text of compiled.as_text()"),
        (PROGRAM.replace("is_scheduled=true, ", ""), (), "has no scheduled HLO"),
        (PROGRAM.replace("partitions=8", "partitions=12"), (), "12 GPUs"),
        (PROGRAM, ("--gpus", "8"), "--hlo does not take --gpus"),
        (PROGRAM, ("--all",), "--all and --hlo exclude each other"),
        (None, (), "cannot read"),
    ],
)
def test_mistakes_are_one_line(content, options, said, tmp_path, capsys):
    path = tmp_path / "step.txt"
    if content is not None:
        path.write_text(content)
    assert_mistake(command.main, ["--hlo", path, *options], said, capsys)


@needs_compiler
def test_memory_next_to_a_dumped_program(tmp_path, capsys):
    """The compiler's account of memory equals that of the executable."""
    device = compile_only_devices(H100, 1)[0]
    x = jax.ShapeDtypeStruct(
        (4096, 4096), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device)
    )
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    step = jax.jit(lambda x: jnp.sort(jnp.tanh(x @ x) @ x, axis=0))
    compiled = step.lower(x).compile(compiler_options=options)
    stats = compiled.memory_analysis()
    (path,) = tmp_path.glob("*_gpu_after_optimizations.txt")
    found = read(path, capsys)
    assert (found["arguments"], found["outputs"]) == (4096**2 * 4, 4096**2 * 4)
    used = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    assert used <= found["peak"] < used + 4096
    assert found["flops"] == {"product tf32": 2 * 2 * 4096**3}


@needs_compiler
def test_both_texts_of_a_program_take_as_long(tmp_path, capsys):
    """From jax 0.11 on the dump abbreviates reads of tuple elements: here by a call of cuBLAS, of a
    sort that has indices as a second output. The product takes the time of its bytes."""
    device = compile_only_devices(H100, 1)[0]
    x = jax.ShapeDtypeStruct(
        (4096, 4096), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device)
    )
    options = {
        "xla_dump_to": str(tmp_path / "dump"),
        "xla_dump_hlo_as_text": True,
        "xla_gpu_enable_triton_gemm": False,
    }
    compiled = (
        jax.jit(lambda x: jnp.sort(x) @ x[:, :128]).lower(x).compile(compiler_options=options)
    )
    (dumped,) = (tmp_path / "dump").glob("*_gpu_after_optimizations.txt")
    executable = tmp_path / "step.txt"
    executable.write_text(compiled.as_text())
    first, second = (read(path, capsys) for path in (dumped, executable))
    for name in ("flops", "launches", "bound_step_s", "forecast"):
        assert first[name] == second[name]
