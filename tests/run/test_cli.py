"""The commands as a user runs them."""

import math
import re
import signal
from datetime import datetime

import pytest
import quick
from cases import tiered
from commands import ROOT, TINY, read, run, start, wait_for_steps
from mistakes import assert_mistake

from jaxbench.base.errors import STATUS
from jaxbench.run import command

CONFIG = "configs/llama2_70b_bf16.yaml"
STEPS = 6


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Some steps of the smoke row on one device."""
    folder = tmp_path_factory.mktemp("smoke")
    status, out, err = run(
        "--config", CONFIG, "--steps", STEPS, "--output", folder, XLA_FLAGS=quick.FLAGS
    )
    assert status == 0, err
    assert err == ""
    return (*read(folder), out, folder)


def test_record_is_complete(smoke):
    record, steps, _, _ = smoke
    assert record["status"] == "completed"
    assert record["reason"] is None
    assert record["label"] == "smoke"
    assert datetime.fromisoformat(record["started"]).tzinfo is not None
    assert f"-m jaxbench.train --config {CONFIG} --steps {STEPS}" in record["command"]
    assert record["comparable"] is False
    assert "smoke row on a CPU" in record["not_comparable_because"]
    assert record["recipe"]["batch"] == {
        "sequence_length": 256, "global_batch": 8, "microbatch": 8, "accumulation": 1,
        "tokens": "uniform",
    }  # fmt: skip
    assert record["hardware"]["platform"] == "cpu"
    assert record["hardware"]["devices"] == 1
    commit = record["versions"]["commit"]
    assert re.fullmatch(r"[0-9a-f]{40}\+?", commit) if (ROOT / ".git").exists() else commit is None
    assert {"jax", "jaxlib", "flax", "optax", "python"} <= record["versions"].keys()
    assert record["flags"] == {"compiler_options": {}, "XLA_FLAGS": quick.FLAGS}
    assert record["parameters"] == 4 * (256 * 32 * (8 + 4) * 2 + 3 * 256 * 768 + 512) + (
        256 + 2 * 2048 * 256
    )
    assert record["compile_s"] > 0
    assert record["published"] is None
    summary = record["summary"]
    assert summary["window"] == [3, 5]
    window = [s["step_time_s"] for s in steps[3:6]]
    assert summary["step_time_s"]["mean"] == pytest.approx(sum(window) / 3)
    assert {"std", "median", "p95", "last"} < summary["step_time_s"].keys()
    assert summary["tokens_per_s"] == pytest.approx(2048 * 3 / sum(window))
    assert summary["tokens_per_s_per_gpu"] == summary["tokens_per_s"]
    assert set(summary["tflops_per_gpu"]) == {"causal", "full", "published"}
    assert summary["mfu"] == {"causal": None, "full": None, "published": None}
    assert summary["days_per_1t_tokens"] == pytest.approx(1e12 / summary["tokens_per_s"] / 86400)


def test_loss_starts_near_the_entropy_of_the_vocabulary(smoke):
    record, steps, _, _ = smoke
    assert record["loss"]["ln_vocabulary"] == pytest.approx(math.log(2048))
    assert abs(record["loss"]["first"] - math.log(2048)) < 0.1
    assert (record["loss"]["first"], record["loss"]["last"]) == (
        steps[0]["loss"],
        steps[5]["loss"],
    )


def test_every_step_is_recorded_and_labelled(smoke):
    _, steps, out, folder = smoke
    assert [s["step"] for s in steps] == list(range(STEPS))
    assert {s["label"] for s in steps} == {"smoke"}
    for step in steps:
        assert step["step_time_s"] > 0
        assert step["grad_norm"] > 0
        assert step["peak_memory_bytes"] >= step["memory_bytes"] > 0
    log = (folder / "log-llama2_70b_bf16_smoke.out").read_text()
    published = (
        r"(?m)^(completed step: \d+, seconds: |Training epoch 0, iteration \d+/5 \| lr: ).*\n"
    )
    assert len(re.findall(published, log)) == 2 * STEPS
    short = r"(?m)^step +\d+  \S+ s  loss \d\.\d{4}  \d+ tokens/s per device\n"
    assert len(re.findall(short, out)) == STEPS
    # All else is in both: for people one line a step, for parsers the published two.
    assert re.sub(published, "", log) == re.sub(short, "", out)
    assert log.startswith("SMOKE RUN")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", "configs/none.yaml"), "configs/none.yaml: No such file or directory"),
        (("--config", CONFIG, "--gpus", "64"), "--gpus 64 was asked for, but this job sees 8 CPU"),
        (("--config", CONFIG, "--steps", "0"), "steps = 0 must be above 0"),
        (("--config", CONFIG, "--steps", "x"), "argument --steps: invalid int value: 'x'"),
        (("--config", CONFIG, "--step-count", "9"), "unrecognized arguments: --step-count 9"),
        (("--config", CONFIG, "--cpu-devices", "0"), "--cpu-devices = 0 must be above 0"),
        (
            ("--config", "configs/llama2_70b_fp8.yaml", "--set", "precision.implementation=te"),
            "precision.implementation = te: Transformer Engine needs an NVIDIA GPU",
        ),
        (
            ("--config", CONFIG, "--set", "optimizer.learning_rate=.nan"),
            "optimizer.learning_rate = nan: expected a finite number",
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, message, capsys):
    assert_mistake(command.main, arguments, message, capsys)


def test_a_folder_that_cannot_be_made_is_one_line(capsys):
    status = command.main(["--config", CONFIG, "--output", "/proc/none"])
    assert status == STATUS["storage"]
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "/proc/none" in err


def test_a_gpu_that_cannot_be_used_is_one_line():
    """As after an error of the driver: another node may do better, so it is no mistake."""
    status, out, err = run("--config", CONFIG, JAX_PLATFORMS="cuda")
    assert (status, out) == (STATUS["gpu"], "")
    line = err.splitlines()[-1]  # behind JAX's own words, where its plugin is installed
    assert re.fullmatch(r"error: node \S+: JAX can use no device: .+", line)
    assert "jaxbench" not in err.removesuffix(f"{line}\n")


def test_half_a_launcher_is_a_mistake():
    status, out, err = run("--config", CONFIG, JAX_COORDINATOR_ADDRESS="127.0.0.1:1")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "JAX_COORDINATOR_ADDRESS=127.0.0.1:1 is set without JAX_NUM_PROCESSES" in err


@pytest.mark.slow
def test_a_loss_that_is_not_finite_fails_the_run(tmp_path):
    status, out, _ = run(*TINY, "--steps", 9, "--output", tmp_path, "--set", "model.init_std=1e30")
    assert status == STATUS["numbers"]
    record, steps = read(tmp_path)
    assert (record["status"], record["cause"]) == ("failed", "numbers")
    assert re.fullmatch(r"(loss|grad_norm) is (nan|inf) at step 0", record["reason"])
    assert len(steps) == 1
    assert "failed: llama31_8b_bf16" in out


@pytest.mark.parametrize(
    "number", tiered([], [signal.SIGTERM, signal.SIGINT], slow=[signal.SIGTERM])
)
def test_a_signal_ends_the_run_with_a_complete_record(number, tmp_path):
    process = start(*TINY, "--steps", 10**6, "--output", tmp_path)
    wait_for_steps(process, tmp_path, 3)
    record, steps = read(tmp_path)
    assert record["status"] == "running"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err == ""
    record, after = read(tmp_path)
    assert (record["status"], record["reason"]) == ("interrupted", number.name)
    assert len(after) >= len(steps)
    assert record["summary"]["window"][1] == len(after) - 1
