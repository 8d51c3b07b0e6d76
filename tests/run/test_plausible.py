"""Figures of a device that computes nothing are refused, and nothing that training gives."""

import math
import re
from dataclasses import replace

import pytest
from commands import TINY, read, run
from tiny import tiny_run

from jaxbench.base import hardware
from jaxbench.recipe import recipes
from jaxbench.run import plausible
from jaxbench.run.summary import summary

FIGURES = {"step": 0, "loss": 7.68, "grad_norm": 1.7}
FIRST_LOSSES = {
    "grok1_314b_bf16": 7.6781, "grok1_314b_fp8": 7.6796, "llama2_70b_bf16": 7.6819,
    "llama2_70b_fp8": 7.6839, "llama31_405b_bf16": 7.6819, "llama31_8b_fp8": 7.6838,
    "nemotron4_340b_fp8": 7.6813, "nemotronh_56b_bf16": 7.6506, "nemotronh_56b_fp8": 7.6508,
}  # fmt: skip
"""Of smoke rows on one CPU device, seed 0."""


@pytest.mark.parametrize(("recipe", "loss"), FIRST_LOSSES.items())
def test_first_losses_are_plausible_and_zero_is_not(recipe, loss):
    smoke = recipes.resolve(recipes.load(recipe), "smoke", devices=1)
    assert plausible.problem(smoke, FIGURES | {"loss": loss}, initial=True) is None
    for far in (0.0, loss - 1, loss + 1):
        text = plausible.problem(smoke, FIGURES | {"loss": far}, initial=True)
        assert text.startswith(f"the first loss is {far:.4f}; random tokens and initial weights")
        assert plausible.problem(smoke, FIGURES | {"loss": far}, initial=False) is None


def test_wide_logits_and_few_tokens_may_begin_far_from_ln_vocabulary():
    wide = tiny_run("model.init_std=1.0")  # logits of variance 64
    least, largest = plausible.first_loss(wide)
    assert least < math.log(64) < math.log(64) + 32 < largest
    few = replace(wide, batch=replace(wide.batch, sequence_length=1, global_batch=1))
    assert plausible.first_loss(few)[1] > largest


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({"grad_norm": 0.0}, "grad_norm is 0 at step 7: nothing was computed"),
        ({"loss": math.nan}, "loss is nan at step 7"),
        ({"grad_norm": math.inf}, "grad_norm is inf at step 7"),
    ],
)
def test_figures_of_any_step(figures, reason):
    assert plausible.problem(tiny_run(), FIGURES | {"step": 7} | figures, initial=False) == reason


def test_no_rate_is_above_the_peak():
    eight = recipes.resolve(recipes.load("llama31_8b_bf16"), 8)
    peak = hardware.H100.tflops["bf16"]

    def refused(seconds, peak):
        measured = {"step_time_s": seconds, "loss": 1.0, "peak_memory_bytes": 1}
        steps = [{"step": step} | measured for step in range(50)]
        return plausible.rate_problem(summary(eight, steps, peak, [{"step": 0}]))

    assert refused(10.0, peak) is None
    assert re.match(r"the step time means 13\d\d % of the device's peak: ", refused(0.5, peak))
    assert refused(0.5, None) is None
    assert plausible.rate_problem({}) is None


NULL_DEVICE = """
import sys
from jaxbench.run import command, session, start_record
train = session.run_steps
zeros = {"loss": 0.0, "grad_norm": 0.0}
session.run_steps = lambda *a, **k: (step | zeros for step in train(*a, **k))
if "null" in sys.argv:
    sys.argv.remove("null")
    start_record.hardware = lambda f=start_record.hardware: f() | {"null": True}
sys.exit(command.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_that_computes_nothing_fails_unless_its_gpus_say_so(tmp_path):
    arguments = ("-c", NULL_DEVICE, *TINY, "--steps", 3, "--output")
    status, out, err = run(*arguments, tmp_path / "failed", module=None)
    record, _ = read(tmp_path / "failed")
    assert (status, err) == (3, "")
    assert (record["status"], record["cause"]) == ("failed", "numbers")
    assert record["reason"] == "grad_norm is 0 at step 0: nothing was computed"
    assert f"failed: llama31_8b_bf16, row smoke (smoke): {record['reason']}\n" in out
    status, out, err = run(*arguments, tmp_path / "null", "null", module=None)
    record, _ = read(tmp_path / "null")
    assert (status, err, record["status"]) == (0, "", "completed")
    assert record["hardware"]["null"] is True
    assert record["label"] == "null"
    assert hardware.NULL in record["not_comparable_because"]
    assert out.count(hardware.NULL) == 2  # the header, and the verdict


def test_a_null_gpu_is_known_by_its_name():
    name = "NVIDIA H100 80GB HBM3 (null)"
    assert hardware.is_null(name)
    assert hardware.identify(name) is hardware.H100
    assert not any(hardware.is_null(gpu.device) for gpu in hardware.GPUS)
