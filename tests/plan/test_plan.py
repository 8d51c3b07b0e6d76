"""`plan` as a user calls it, on rows small enough to compile in seconds."""

import contextlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import takewhile

import jax
import pytest
from compiled import needs_compiler
from made_plans import made

from jaxbench import mesh
from jaxbench.base.hardware import H100, PLANNED
from jaxbench.forecast.interval import accuracy, timed_programs
from jaxbench.plan import absent, ask_cudnn, command, difference, processes, sweep, text
from jaxbench.plan.compiled_step import mesh_axes
from jaxbench.plan.plan import Pipelined, rates_of, read, stages
from jaxbench.plan.systems import Target
from jaxbench.recipe import planned as table_of_plans
from jaxbench.recipe import published, recipes
from jaxbench.train.step import init_state

ROW = ["--config", "configs/llama31_8b_bf16.yaml", "--gpus", "16"]
SMALL = ["--set", "model.layers=2", "--set", "model.vocabulary=4096",
         "--set", "batch.global_batch=32"]  # fmt: skip


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """(exit status, folder) of a plan of two layers on 16 GPUs, two microbatches; what it printed
    is in `printed.json`."""
    folder = tmp_path_factory.mktemp("plan")
    with (folder / "printed.json").open("w") as printed, contextlib.redirect_stdout(printed):
        return command.main([*ROW, *SMALL, "--dump", str(folder), "--json"]), folder


@needs_compiler
def test_a_plan_says_what_was_asked(planned):
    status, folder = planned
    found = json.loads((folder / "plan.json").read_text())
    assert (status, found["fits"], found["gpus"], found["target"]) == (0, True, 16, "h100")
    size, state = found["bytes_per_device"], found["state_bytes"]
    assert state["optimizer"] == 2 * state["parameters"] + 4 + 4
    assert size["arguments"] == state["parameters"] + state["optimizer"] + 4
    figures = size["peak"] - size["arguments"] - size["temporaries"]
    assert 0 <= figures < 2**10  # the step's, which take no argument's memory
    # A product and its two gradients: qkv, out, gate_up and down per layer and pass, the head once
    # per chunk of tokens forward and for d hidden, once for its own gradient.
    assert found["kernels"]["attention"] == 2 * 2 * 2
    assert found["kernels"]["gemm_fp8"] == 0
    assert found["flops"]["compiled"] == pytest.approx(
        found["flops"]["model_full"] * found["flops"]["recompute_ratio"]
    )
    assert sum(found["bound_parts_s"].values()) == pytest.approx(found["bound_step_s"])
    assert "all-gather-start" in (folder / "program.hlo.txt").read_text()


@needs_compiler
def test_making_the_state_takes_no_more_than_the_state():
    """So a row whose step fits can begin: the state is the step's arguments."""
    run, _ = command.resolve(ROW[1], 16, SMALL[1::2], H100)
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape, absent.compile_only_devices(H100, run.gpus))):
        held = jax.jit(partial(init_state, run)).lower().compile().memory_analysis()
    assert held.output_size_in_bytes > 2**28
    # Scalars and alignment.
    assert held.peak_memory_in_bytes - held.output_size_in_bytes < 2**20


@needs_compiler
def test_collectives_lie_along_mesh_axes(planned):
    found = json.loads((planned[1] / "plan.json").read_text())
    by_axes = {(c["kind"], c["axes"]): c for c in found["collectives"]}
    gathers = by_axes["all-gather", "fsdp"]
    assert not gathers["across_domains"]
    assert gathers["exposed_s"] <= gathers["least_s"] + 1e-9
    sums = by_axes["all-reduce", "data"]
    assert sums["across_domains"]
    # Gradients in bf16, an eighth on each device, halved and doubled by a ring of two.
    assert sums["bytes"] == pytest.approx(found["state_bytes"]["parameters"] / 2, rel=0.01)


@pytest.mark.nightly
@needs_compiler
def test_blackwell(capsys, tmp_path):
    """FP8 products and cuDNN's attention compile for capability 10.0; a job of 96 lies in two
    racks of GB200, half in each, and has no row."""
    small = [text.replace("=32", "=96") for text in SMALL]
    row = ["--config", "configs/llama31_8b_fp8.yaml", "--gpus", "96"]
    kept = ["--set", "batch.microbatch=1", "--set", "execution.remat=none"]
    wanted = [*row, *small, *kept, "--gpu", "gb200", "--dump", str(tmp_path)]
    assert command.main(wanted) == 0
    assert "(derived: 2 layers, global batch 96)" in capsys.readouterr().out
    found = read(tmp_path / "plan.json")
    assert found.target == "gb200"
    assert found.system["domain"] == 48
    assert (
        found.kernels["gemm_fp8"] == 2 * 4 * 3
    )  # a product and its gradients: qkv, out, gate, down
    assert found.kernels["attention"] == 2 * 2
    assert {c.axes: c.across_domains for c in found.collectives}["fsdp"] is False
    assert any(c.across_domains for c in found.collectives)


def test_a_pipeline_is_described():
    row = recipes.resolve(recipes.load("nemotron4_340b_bf16"), 128)
    assert stages(row) == Pipelined(
        ranks=16, virtual_stages=6, microbatches=32, bubble=15 / 192, slots=126, padding=0
    )
    padded = recipes.parse_overrides(["model.layers=90"])
    short = stages(recipes.resolve(recipes.load("nemotron4_340b_bf16"), 128, overrides=padded))
    assert short is not None
    assert short.padding == 6
    assert stages(recipes.resolve(recipes.load("llama2_70b_bf16"), 64)) is None


@needs_compiler
def test_json_prints_what_dump_keeps(planned):
    printed, kept = (planned[1] / name for name in ("printed.json", "plan.json"))
    assert json.loads(printed.read_text()) == json.loads(kept.read_text())


@pytest.mark.nightly
@needs_compiler
def test_too_large_a_microbatch_does_not_fit(capsys):
    """Every intermediate of 32 sequences in two layers."""
    change = ("batch.global_batch=512", "batch.microbatch=32")
    changes = [part for text in change for part in ("--set", text)]
    assert command.main([*ROW, *SMALL, *changes]) == 1
    answer, _, details = capsys.readouterr().out.partition("\nlargest buffers at the peak:\n")
    assert "  DOES NOT FIT " in answer
    assert "\n  fits with " in answer
    assert "dot_general" in details


@needs_compiler
def test_settings_that_cannot_be_compiled_are_no_end_of_a_plan(monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: no kernel")

    monkeypatch.setattr(command, "compile_program", fail)
    run, _ = command.resolve("llama31_8b_bf16", 8, [], H100)
    plan = replace(made(gpus=8), fits=False)
    first, *tried, last = command.find_remedy(run, plan, H100, "jaxbench plan")
    assert first == "  looking for settings with which it fits:"
    assert tried
    assert all(line.startswith("  cannot be compiled: --set ") for line in tried)
    assert last.startswith("  none of these settings makes it fit")


def test_without_the_compiler_the_message_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.main(ROW) == 2
    assert capsys.readouterr().err == f"error: plan needs the compiler for GPUs: {absent.INSTALL}\n"


@needs_compiler
@pytest.mark.parametrize(
    ("row", "line", "errata"),
    [
        (("llama31_405b_bf16", 2048), "MFU 54.7 % (full count); MFU 55.22 % as its source pr",
         {"PEAK", "GQA16"}),
        (("llama2_70b_bf16", 64), "MFU 52.6 % (full count); MFU 52.59 % as its source pri",
         set()),
    ],
)  # fmt: skip
def test_a_published_mfu_is_the_one_of_the_list(planned, row, line, errata):
    """The list of recipes has what the source prints; a plan counts both by one convention."""
    run = recipes.resolve(recipes.load(row[0]), row[1])
    found = published.lookup(run)
    plan = read(planned[1] / "plan.json")
    known = plan.rates | {"published": rates_of(run, H100, found.step_time_s)}
    plan = replace(plan, published=found, rates=known)
    text_lines = text.details(plan).splitlines()
    at = next(i for i, found in enumerate(text_lines) if found.startswith("published"))
    assert line in text_lines[at]
    below = takewhile(lambda found: found.startswith("  "), text_lines[at + 1 :])
    assert {found.split()[0] for found in below} == errata


@needs_compiler
def test_difference_says_what_moved(planned):
    a = read(planned[1] / "plan.json")
    gather = a.collectives[0]
    moved = replace(gather, exposed_s=gather.exposed_s + 0.5)
    b = replace(a, flags={}, bound_step_s=a.bound_step_s / 2, collectives=[moved])
    lines = [line.split() for line in difference.report(a, b).splitlines()]
    assert ["flags.xla_gpu_enable_triton_gemm", "no", "-"] in lines
    assert any(line[:2] == ["bound,", "s"] and line[4:] == ["-50.0", "%"] for line in lines)
    assert any(line[:3] == [gather.kind, "over", f"{gather.axes}:"] for line in lines)
    assert difference.report(a, a) == "the plans are the same"


@needs_compiler
def test_a_plan_says_in_which_options_train_s_program_differs(planned):
    plan = read(planned[1] / "plan.json")
    expected = {"xla_gpu_autotune_level": 0} | ({} if plan.without_cudnn else ask_cudnn.OPTIONS)
    assert plan.planned_flags == expected
    assert "\ncompiled with the options of train and xla_gpu_autotune_level=0" in text.details(plan)


@needs_compiler
@pytest.mark.skipif(
    jax.version.__version_info__ < (0, 11), reason="needs jax 0.11: Python 3.12 has it"
)
def test_a_plan_has_the_workspaces_of_cudnn(tmp_path):
    """The backward pass of attention needs two copies of dq in fp32: 2 x 8192 x 32 x 128 x 4 bytes,
    and sums. The command asks, since its process loads the stubs before JAX."""
    planning = [sys.executable, "-m", "jaxbench.plan", *ROW, *SMALL, "--dump", tmp_path]
    done = subprocess.run(planning, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "plan.json").without_cudnn is None
    calls = re.findall(
        r"u8\[(\d+)\]\S* custom-call.*fmhaSoftmaxBackward",
        (tmp_path / "program.hlo.txt").read_text(),
    )
    assert calls
    assert all(2**28 < int(size) < 2**28 + 2**21 for size in calls)


def test_a_plan_begins_with_the_answer():
    """Row, memory, step and published step, before anything that explains them."""
    plan = made()
    name, fits, step, published = text.answer(plan).splitlines()
    assert name.startswith(f"{plan.recipe}, row {plan.row}: ")
    assert re.fullmatch(r"  fits +\d+\.\d of \d+\.\d GiB per GPU", fits)
    assert step.startswith(f"  step       {plan.forecast_step_s:.3f} s (90 % interval ")
    assert published.startswith(f"  published  {plan.published.step_time_s} s on H100, ")
    size = replace(plan.bytes_per_device, peak=plan.bytes_per_device.limit + 2**30)
    too_big = text.answer(replace(plan, bytes_per_device=size, published=None)).splitlines()
    assert too_big[1].startswith("  DOES NOT FIT ")
    assert len(too_big) == 3


def test_a_plan_says_why_workspaces_are_not_counted():
    asked, not_asked = made(), made(without_cudnn="asking cuDNN needs gcc")
    assert "not counted" not in text.details(asked)
    assert "workspaces of cuDNN's attention (asking cuDNN needs gcc)" in text.details(not_asked)


@pytest.mark.parametrize(("temporaries", "result"), [(40, "not reached"), (55, "probably reached")])
def test_a_plan_says_whether_the_schedule_reached_its_memory_limit(temporaries, result):
    """XLA's scheduler gives up overlap to stay below it."""
    plan = made()
    size = replace(plan.bytes_per_device, temporaries=temporaries * 2**30)
    said = text.details(replace(plan, bytes_per_device=size))
    (line,) = re.findall(r"\n  memory limit of XLA's scheduler (.*)", said)
    assert line.startswith(result)
    assert line.endswith(f"temporaries {temporaries}.0 GiB of 57.0 GiB")
    assert "memory limit" not in text.details(replace(plan, collectives=[]))


def test_an_attention_that_cudnn_refuses_is_one_line():
    error = RuntimeError("NOT_FOUND: no engine.\nReason: Embedding dim per head is not | <= 128\n")
    refusal = str(ask_cudnn.refusal(error, PLANNED["gb200"]))
    assert "GB200 (compute capability 10.0): Embedding dim per head is not  <= 128" in refusal
    assert "\n" not in refusal
    assert ask_cudnn.refusal(RuntimeError("out of memory"), PLANNED["gb200"]) is None


@needs_compiler
def test_difference_of_two_plans_from_files(planned, capsys):
    folder = str(planned[1])
    assert command.main(["--diff", folder, f"{folder}/plan.json"]) == 0
    assert capsys.readouterr().out == "the plans are the same\n"


@needs_compiler
def test_a_sweep_goes_on_where_it_stopped(planned, tmp_path, monkeypatch):
    """A finished row is read; a row whose process fails is listed, and the status says so."""
    asked = ((16, SMALL[1::2]), (8, []))
    runs = [command.resolve(ROW[1], gpus, changes, H100)[0] for gpus, changes in asked]
    target = Target(gpu=H100, name="h100")
    monkeypatch.setattr(processes, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(sweep, "rows", lambda target, every: runs)
    shutil.copytree(planned[1], processes.folder(runs[0], target))
    monkeypatch.setattr(processes.sys, "executable", "false")
    assert sweep.sweep([target], tmp_path) == 1
    comments, (line,) = table_of_plans.read(tmp_path / "plan.csv")
    assert [line["recipe"], line["GPU"], line["GPUs"]] == ["llama31_8b_bf16", "h100", "16"]
    assert line["mesh"] == "data 2 x fsdp 8"
    assert comments[1] == table_of_plans.ERRORS + accuracy(timed_programs())
    assert comments[2] == "not planned: llama31_8b_bf16-8 on h100: exit status 1"
    ends = read(planned[1] / "plan.json").forecast.interval
    assert (line["low s"], line["high s"]) == (f"{ends.low_s:.3f}", f"{ends.high_s:.3f}")
    # A script that imported JAX first cannot ask cuDNN, but its processes can.
    for reason, read_again in ((processes.stubs.LOADED, True), ("no gcc", False)):
        monkeypatch.setattr(processes.stubs, "load", lambda reason=reason: reason)
        assert bool(processes.cached(planned[1], runs[0], H100)) == read_again


@pytest.mark.parametrize(
    ("devices", "axes"),
    [
        ((0, 1), "tensor"),
        ((0, 2, 4, 6), "fsdp"),
        (tuple(range(8)), "fsdp x tensor"),
        ((0, 8), "data"),
        ((0, 4), "part of fsdp"),
    ],
)
def test_mesh_axes_of_a_group(devices, axes):
    assert mesh_axes(devices, (1, 2, 4, 1, 1, 2)) == axes
