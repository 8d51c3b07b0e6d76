"""What `calibrate` measures is what forecasts read."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from compiled import collectives_of, needs_compiler
from mistakes import assert_mistake

from jaxbench.base import hardware
from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import H100
from jaxbench.calibrate import command as calibrate
from jaxbench.forecast import tables
from jaxbench.plan.absent import compile_only_devices
from jaxbench.xla import hlo, schedule


@pytest.mark.slow
def test_a_rehearsal_writes_a_table_that_no_plan_takes(tmp_path):
    file = tmp_path / "cpu.csv"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jaxbench", "calibrate", "--rehearse", "--output",
         file],
        capture_output=True, text=True, check=False,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    gpu, found = tables.read(file)
    assert gpu == "cpu"
    packaged = tables.load("h100").values
    measured = ("product", "attention", "memory", "collective")
    keys = {key for key in packaged if key[0] in measured}
    assert set(found) == keys - {("memory", "fp8")}  # stays the package's
    with pytest.raises(RecipeError, match="kernels of cpu, but the plan is for h100"):
        tables.load("h100", file)


@needs_compiler
def test_a_program_is_the_kernel_as_often_as_it_is_counted():
    """And nothing else that takes time, for a GPU that is not there."""
    gpus = compile_only_devices(H100, 2)
    wanted = {"bf16": "__cublas$lt$matmul", "fp8": "__cublas$lt$matmul$f8"}
    first = {}
    for probe in calibrate.probes(calibrate.GPU_SAMPLE, "xla", gpus):
        first.setdefault((probe.kind, probe.name), probe)
    for name, target in wanted.items():
        probe = first["product", name]
        program = hlo.Program.parse(calibrate.compiled(probe.function, probe.arguments).as_text())
        assert program.custom_calls()[target] == calibrate.REPEATS
        beside = [k for _, k, _ in schedule.Walk(program).kernels() if not k.works and k.bytes > 64]
        assert not beside
    gather = first["collective", "all-gather"]
    program = hlo.Program.parse(calibrate.compiled(gather.function, gather.arguments).as_text())
    assert sum(c.count for c in collectives_of(program)) == calibrate.REPEATS


def test_without_a_gpu_it_says_so_in_a_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxbench", "calibrate", "--output", tmp_path / "none.csv"],
        capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 2
    assert (
        done.stderr == "error: cpu is not a GPU that plan knows; expected one of "
        "h100, h200, b200, b300, gb200, gb300\n"
    )


def test_a_missing_folder_is_named_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "measure", lambda planned: pytest.fail("it measures"))
    words = ["--rehearse", "--output", "/nowhere/mine.csv"]
    assert_mistake(calibrate.main, words, "/nowhere/mine.csv: no such folder", capsys)


def test_null_gpus_are_not_measured(tmp_path, monkeypatch, capsys):
    device = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3 (null)")
    monkeypatch.setattr(calibrate.jax, "local_devices", lambda: [device])
    assert calibrate.main(["--output", str(tmp_path / "mine.csv")]) == 2
    assert capsys.readouterr().err == f"error: {device.device_kind}: {hardware.NULL}\n"
