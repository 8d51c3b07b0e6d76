"""`benchmarks/gpu.py`, `calibrate` and `--profile nsys` on one null GPU: everything ends as on a
real one, whatever the figures say. What JAX refuses only with a CUDA client is refused here."""

import gzip
import json
import subprocess
import sys

import null_gpus
import pytest
from commands import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(null_gpus.missing() is not None, reason=str(null_gpus.missing())),
]

GPU = {"gpus": 1, "memory_mb": 16384}
"""Enough for a copy of 4 GiB."""

NSYS = """#!/bin/bash
[ "$1" = profile ] || exit 64
while shift; [[ $1 == --* ]]; do [[ $1 != --output=* ]] || output=${1#--output=}; done
NSYS_PROFILING_SESSION_ID=1 "$@"
status=$?
touch "$output.nsys-rep"
exit $status
"""
"""Nsight Systems: runs the command, and leaves a file."""


def findings_of(check, tmp_path):
    """The findings of a check of `benchmarks/gpu.py` at small sizes, none of which may be the
    check's own: that it raised an error."""
    program = (str(ROOT / "tests/null_gpu/small_check.py"), "--check", check)
    folders = ("--output", tmp_path, "--folder", tmp_path)
    environment = null_gpus.environment(**GPU)
    done = null_gpus.start(*folders, folder=tmp_path, program=program, **environment).wait()
    assert done.status == 0, done.err
    findings = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert findings, done.err
    assert all(finding["what"] != check for finding in findings), findings
    return {finding["what"]: finding for finding in findings}


@pytest.mark.nightly
def test_rates_above_the_peak_are_no_ceilings(tmp_path):
    findings = findings_of("ceilings", tmp_path)
    assert len(findings) == 7
    assert findings["copy of 4 GiB"]["beside"].endswith("nothing was computed")


@pytest.mark.nightly
def test_operators_end_beside_the_cpu(tmp_path):
    findings = findings_of("operators", tmp_path)
    kinds = {what.split()[0].rstrip(",") for what in findings}
    expected = {"grouped", "attention", "FP8", "mixer", "experts", "dropless", "embedding", "loss"}
    assert kinds == expected
    assert {finding["verdict"] for finding in findings.values()} == {"WRONG"}


@pytest.mark.nightly
def test_every_mixer_runs(tmp_path):
    findings = findings_of("mixers", tmp_path)
    assert {finding["verdict"] for finding in findings.values()} == {"measured"}
    assert len(findings) == 3


@pytest.mark.nightly
def test_the_profile_of_a_step_names_its_kernels(tmp_path):
    findings = findings_of("rows", tmp_path)
    assert len(findings) == 4
    assert {finding["verdict"] for finding in findings.values()} == {"ok", "measured"}, findings
    kernels = gzip.decompress((tmp_path / "llama31_8b_fp8" / "kernels.csv.gz").read_bytes())
    assert kernels.startswith(b"instruction,measured_us,forecast_us\n")


@pytest.mark.nightly
def test_every_size_of_the_grouped_matmuls_is_timed(tmp_path):
    findings = findings_of("tiles", tmp_path)
    others = {w: findings.pop(w) for w in list(findings) if "Mosaic" in w}
    assert {finding["verdict"] for finding in findings.values()} == {"measured"}
    assert len(findings) == 14
    assert len(others) == 12
    measured = {w for w, finding in others.items() if finding["verdict"] == "measured"}
    assert len({w for w in measured if "JAX's Mosaic kernel, width 128" in w}) == 6


@pytest.mark.nightly
def test_every_kernel_of_forecasts_is_measured(tmp_path):
    findings = findings_of("kernels", tmp_path)
    assert findings.pop("table for plan --kernels")["figure"] == "12 lines"
    assert {what.split()[0] for what in findings} == {"product", "attention", "memory"}


@pytest.mark.nightly
def test_tiny_rows_train_beside_the_cpu(tmp_path):
    (finding,) = findings_of("trains", tmp_path).values()
    assert finding["figure"] == "losses differ by 1.0e+00"
    assert finding["data"]["kernels"] == {"attention": "cudnn", "products": "fp8 by xla"}


@pytest.mark.nightly
def test_commands_complete(tmp_path):
    findings = findings_of("commands", tmp_path)
    assert {finding["verdict"] for finding in findings.values()} == {"ok"}, findings


@pytest.mark.nightly
def test_choices_are_timed(tmp_path):
    without, timed = findings_of("choices", tmp_path).values()
    assert without["verdict"] == "not run"
    assert "Transformer Engine" in without["figure"]
    assert timed["verdict"] == "measured", timed


@pytest.mark.nightly
def test_a_run_survives(tmp_path):
    findings = findings_of("survives", tmp_path)
    assert {finding["verdict"] for finding in findings.values()} == {"ok"}, findings
    assert len(findings) == 4


@pytest.mark.nightly
def test_a_gpu_that_computes_nothing_is_not_calibrated(tmp_path):
    program = ("-m", "jaxbench", "calibrate", "--output", str(tmp_path / "table.csv"))
    environment = null_gpus.environment(1)
    done = null_gpus.start(folder=tmp_path, program=program, **environment).wait()
    assert done.status == 2
    assert done.err == (
        "error: NVIDIA H100 80GB HBM3 (null): null GPUs: nothing here is a measurement\n"
    )
    assert not (tmp_path / "table.csv").exists()


@pytest.mark.nightly
def test_a_calibration_is_rehearsed_beside_a_gpu(tmp_path):
    program = ("-m", "jaxbench", "calibrate", "--rehearse", "--output", str(tmp_path / "table.csv"))
    environment = null_gpus.environment(1)
    done = null_gpus.start(folder=tmp_path, program=program, **environment).wait()
    assert done.status == 0, done.err
    assert (tmp_path / "table.csv").read_text().startswith("# gpu: cpu\n")


def launched(tmp_path, *folders_of_programs, **variables):
    """A run of a launched process that has to be under nsys, with these folders first in PATH."""
    arguments = null_gpus.tiny("llama31_8b_bf16", "parallelism.fsdp=1", gpus=1, steps=6)
    path = ":".join([*map(str, folders_of_programs), "/usr/bin", "/bin"])
    job = {
        "PATH": path, "JAXBENCH_VENV": sys.prefix, "JAXBENCH_NSYS_RANKS": "0",
        "JAXBENCH_RESULTS": str(tmp_path), "JAXBENCH_NAME": "tiny", "SLURM_JOB_ID": "7",
        "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "HOME": str(tmp_path),
    }  # fmt: skip
    options = ("--profile", "nsys", "--profile-steps", "2-4", "--output", tmp_path / "run")
    return subprocess.run(
        ["bash", "launch/run.sh", *map(str, (*arguments, *options))], cwd=ROOT, text=True,
        env=job | null_gpus.environment(1) | variables, capture_output=True, check=False,
    )  # fmt: skip


def test_nsys_profiles_a_run(tmp_path):
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(NSYS)
    program.chmod(0o755)
    (counts := tmp_path / "counts").mkdir()
    done = launched(tmp_path, program.parent, NULL_GPU_COUNTS=str(counts))
    assert done.returncode == 0, done.stderr
    called = "".join(path.read_text() for path in counts.iterdir())
    assert all(f"1 stub cudaProfiler{what}\n" in called for what in ("Start", "Stop"))
    assert (tmp_path / "7" / "nsys" / "tinyg_7_0_0.nsys-rep").exists()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "completed"
    assert "it was profiled (--profile nsys)" in record["not_comparable_because"]


@pytest.mark.nightly
def test_a_host_without_nsys_says_so(tmp_path):
    done = launched(tmp_path)
    assert done.returncode == 127
    assert "nsys: not found" in done.stderr
    assert done.stderr.count("\n") == 1
