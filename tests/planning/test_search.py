"""Searches and scaling: what may be chosen and in which order, without a compiler; then both
commands on a recipe small enough to compile in seconds."""

import contextlib
import csv
import io
import json
from dataclasses import replace
from itertools import pairwise

import pytest
from compiled import needs_compiler

from jaxbench.hardware import H100
from jaxbench.plan.plan import read
from jaxbench.planning import candidates, command, processes, scaling, search
from jaxbench.planning.estimate import estimate, least_state
from jaxbench.planning.local_search import Outcome, Search, run_search
from jaxbench.planning.parts import parts, seconds
from jaxbench.recipe import flops, recipes

RECIPE = """
model: llama31_8b
precision: {dtype: bf16}
batch: {sequence_length: 2048}
optimizer: {schedule: megatron, learning_rate: 3.0e-4, final_learning_rate: 3.0e-5, warmup: 2000,
            eps: 1.0e-5, decay_vectors: false}
execution: {remat: [attention]}
rows:
  8:  {layers: 2, fsdp: 8, microbatch: 1, global_batch: 16, model: {vocabulary: 4096}}
  16: {layers: 2, fsdp: 8, microbatch: 1, global_batch: 32, model: {vocabulary: 4096}}
  1:  {layers: 1, microbatch: 1, global_batch: 1}
"""


def row(name, gpus, *changes):
    overrides = recipes.parse_overrides(list(changes))
    return recipes.resolve(recipes.load(name), gpus, overrides=overrides)


@pytest.mark.parametrize(
    ("name", "gpus"),
    [("llama2_70b_fp8", 64), ("llama31_405b_bf16", 32), ("grok1_314b_bf16", 64),
     ("nemotron4_340b_fp8", 128), ("nemotronh_56b_bf16", 32), ("llama31_8b_bf16", 1)],
)  # fmt: skip
def test_the_row_is_among_what_may_be_chosen(name, gpus):
    run = row(name, gpus)
    found = candidates.shapes(run)
    assert candidates.shape(run) in {candidates.shape(each) for each in found}
    assert len({candidates.shape(each) for each in found}) == len(found)


def test_a_candidate_is_its_row_with_set_entries():
    run = row("grok1_314b_fp8", 32)
    policies = list(candidates.policies(run))
    for at, shape in enumerate(candidates.shapes(run)[::97]):
        remat = policies[at % len(policies)]
        if (found := candidates.with_remat(shape, remat)) is not None:
            again = row("grok1_314b_fp8", 32, *candidates.changes(found, run))
            assert again.mesh_shape == found.mesh_shape
            assert candidates.settings(again) == candidates.settings(found)
    assert candidates.changes(run, run) == []


def test_what_the_user_sets_stays():
    run = row("llama2_70b_fp8", 64, "parallelism.tensor=2", "parallelism.fsdp=32")
    fixed = frozenset(["parallelism.tensor", "batch.microbatch"])
    found = candidates.shapes(run, fixed)
    assert {each.parallelism.tensor for each in found} == {2}
    assert {each.microbatch for each in found} == {2}
    assert len({each.parallelism.fsdp for each in found}) > 1
    only = Search(run, H100, FEW | {"execution.remat"})
    seen = simulate(only, 4, lambda e: (e.seconds, e.peak))
    assert {each.execution.remat for each in seen} == {run.execution.remat}


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ([], 0),
        (["parallelism.fsdp=32"], 1),
        (["parallelism.fsdp=16", "parallelism.tensor=2"], 2),
        (["parallelism.fsdp=16"], 2),
        (["execution.remat=full"], 1),
        (["batch.microbatch=1", "execution.remat=full"], 2),
        (["parallelism.fsdp=32", "parallelism.pipeline=2", "parallelism.virtual_stages=4",
          "execution.remat=full", "batch.microbatch=1"], 3),
    ],
)  # fmt: skip
def test_moves_count_what_differs(changes, count):
    run = row("llama2_70b_fp8", 64)
    other = row("llama2_70b_fp8", 64, *changes)
    assert candidates.moves(run, other) == candidates.moves(other, run) == count


def test_a_ladder_trades_memory_for_time():
    for name, gpus in (("llama2_70b_fp8", 64), ("grok1_314b_fp8", 128)):
        rungs = candidates.ladder(row(name, gpus, "execution.remat=full"), H100)
        guesses = [estimate(rung, H100) for rung in rungs]
        assert rungs[0].execution.remat == "full"
        assert len(rungs) > 2
        for less, more in pairwise(guesses):
            assert less.peak <= more.peak
            assert less.seconds > more.seconds


def test_in_a_pipeline_no_policy_counts_layers():
    rungs = candidates.ladder(row("nemotron4_340b_fp8", 128, "execution.remat=full"), H100)
    assert not any(":" in rung.execution.remat for rung in rungs)


def test_recomputation_is_the_forward_pass_of_what_is_not_kept():
    """By hand: with full remat all products of a layer but the MLP's last run a second time."""
    kept = "execution.remat=query,key,value,attention,residual,gate,up"
    run = row("llama31_8b_bf16", 8, kept)
    work = flops.model_flops(run.model, run.batch.sequence_length)
    down = work["mlp"] / 3
    again = (work["total"] - work["head"] - down) / 3 * run.batch.global_batch / run.gpus
    full = row("llama31_8b_bf16", 8, "execution.remat=full")
    longer = estimate(full, H100).seconds - estimate(run, H100).seconds
    assert longer == pytest.approx(again / 989e12, rel=1e-6)


def test_estimates_are_near_what_was_compiled():
    """The bound of docs/plan.csv, for transformers; a tenth is enough for an order. Without context
    and tensor axes, whose exposed collectives depend on the schedule."""
    with open("docs/plan.csv") as file:
        rows = [line for line in csv.DictReader(file) if line["recipe"].startswith("llama")]
    compared = 0
    for line in rows:
        if int(line["GPUs"]) > 1 and not {"context", "tensor"} & set(line["mesh"].split()):
            guess = estimate(row(line["recipe"], int(line["GPUs"])), H100)
            assert guess.seconds == pytest.approx(float(line["bound s"]), rel=0.1), line
            compared += 1
    assert compared > 30


def test_the_least_state_is_below_any_real_one():
    """A device of the smallest mesh that holds Llama 2 70B in 71 GiB: 16 and not 8 GPUs."""
    run = row("llama2_70b_fp8", 64)
    sizes = {each.parallelism.ranks: least_state(each) for each in candidates.shapes(run)}
    assert sizes[8] > H100.memory_limit > sizes[16]


FEW = frozenset(["parallelism.pipeline", "parallelism.context"])
"""Fewer candidates: every annotation is checked in tests, which makes estimates slow."""


def simulate(searching, limit, cost, at_a_time=2, holds=lambda run: True):
    """Runs a search whose plans have the `cost` of their estimate; what it tried, in order."""
    seen = []

    def compile_all(batch):
        for run in batch:
            seconds, peak = cost(estimate(run, searching.gpu))
            seen.append(run)
            yield run, Outcome(seconds, peak, peak <= searching.gpu.memory_limit)

    run_search(searching, limit, compile_all, at_a_time, holds)
    return seen


def test_a_search_starts_at_the_row_and_goes_on_beside_it():
    run = row("llama2_70b_fp8", 64)
    searching = Search(run, H100, FEW)
    seen = simulate(searching, 9, lambda e: (1.1 * e.seconds, e.peak + 2**31))
    assert len(seen) == len(set(seen)) == 9
    assert seen[0] == run
    bare = [replace(each, execution=run.execution) for each in seen]
    assert candidates.moves(run, bare[1]) <= 1
    assert candidates.moves(run, bare[2]) <= 1
    best = searching.best()
    assert estimate(best, H100).seconds < estimate(run, H100).seconds


def test_a_search_finds_the_best_of_what_there_is():
    """Where plans cost what is estimated, nothing that fits is faster than what it found."""
    run = row("llama31_8b_bf16", 8, "execution.remat=full", "parallelism.fsdp=4")
    fixed = FEW | {"batch.microbatch"}
    searching = Search(run, H100, fixed)
    simulate(searching, 8, lambda e: (e.seconds, e.peak))
    everything = [
        guess
        for shape in candidates.shapes(run, fixed)
        for rung in candidates.ladder(shape, H100)
        if (guess := estimate(rung, H100)).peak <= H100.memory_limit
    ]
    found = estimate(searching.best(), H100).seconds
    assert found == pytest.approx(min(guess.seconds for guess in everything), rel=0.01)


def test_a_search_gets_a_row_that_does_not_fit_to_fit():
    run = row("llama2_70b_fp8", 64, "batch.microbatch=2")
    large = replace(run, execution=replace(run.execution, remat="none"))
    searching = Search(large, H100, FEW)
    seen = simulate(searching, 5, lambda e: (e.seconds, e.peak + 8 * 2**30))
    assert estimate(seen[0], H100).peak > H100.memory_limit
    assert searching.best() is not None


def test_what_cannot_fit_is_not_compiled():
    """Neither what the parameters alone rule out, nor what the sharded state does."""
    run = row("llama2_70b_fp8", 64)
    searching = Search(run, H100, FEW)
    every = candidates.shapes(run, FEW)
    assert searching.cannot_fit == sum(least_state(each) > H100.memory_limit for each in every)
    assert searching.cannot_fit > 0
    seen = simulate(searching, 4, lambda e: (e.seconds, e.peak), holds=lambda r: r.data == 1)
    assert {each.data for each in seen} == {1}


def test_failed_candidates_are_passed_by():
    run = row("llama31_8b_bf16", 8)
    searching = Search(run, H100, FEW)
    run_search(searching, 5, lambda batch: ((r, Outcome()) for r in batch), 2, lambda r: True)
    assert len(searching.tried) == 5
    assert searching.best() is None


def test_scaling_compares_rows_of_one_model():
    runs, left_out = scaling.rows(recipes.load("grok1_314b_fp8"), [])
    assert [run.gpus for run in runs] == [512, 1024, 2048]
    assert "8 GPUs: another model, 2 layers on 4096 tokens: not compared" in left_out
    runs, left_out = scaling.rows(recipes.load("llama2_70b_fp8"), [])
    assert [run.gpus for run in runs] == [64, 128, 256, 512, 1024, 2048]
    assert left_out == ["1 GPU: another model, 4 layers on 4096 tokens: not compared"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--search", "--all"], "--all and --search: one of them at a time"),
        (["--search"], "--config and --gpus are needed"),
        (["--search", "--limit", "0"], "--limit = 0 must be above 0"),
        (["--limit", "3"], "--limit is for --search"),
        (["--scaling"], "--scaling needs --config"),
        (["--scaling", "--config", "llama2_70b_fp8", "--gpus", "64"], "no --gpus"),
        (["--search", "--dump", "x"], "--dump keeps a single plan"),
        (["--search", "--config", "llama2_70b_fp8", "--gpus", "9"], "do not fill nodes of 8"),
        (["--scaling", "--config", "llama2_70b_fp8", "--set", "parallelism.tensor=3"], "must div"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(recipe file, what `--scaling --json` says of it, the same of `--search`): three compiled
    programs of two layers. The plans are kept for the tests."""
    folder = tmp_path_factory.mktemp("search")
    path = folder / "small.yaml"
    path.write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "CACHE", folder / "cache")
        yield path, said("--config", path, "--scaling"), said(*arguments(path), "--limit", 2)


def arguments(path):
    return "--config", path, "--gpus", 8, "--search"


def said(*options):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert command.main([*map(str, options), "--json"]) == 0
    return json.loads(printed.getvalue())


@needs_compiler
def test_scaling_is_a_table(small):
    found = small[1]
    assert found["left_out"] == ["1 GPU: another model, 1 layers on 2048 tokens: not compared"]
    assert not found["failures"]
    first, second = found["rows"]
    assert (first["gpus"], second["gpus"]) == (8, 16)
    assert (first["efficiency"], first["grows"]) == (1.0, {})
    rate = 2048 * 2 / first["step_s"]
    assert first["tokens_per_s_per_gpu"] == pytest.approx(rate)
    assert second["efficiency"] == pytest.approx(first["step_s"] / second["step_s"])
    # The sum of gradients over two nodes, as long as it takes at 8 x 50 GB/s.
    (name,) = second["grows"]
    assert "data" in name
    for line in found["rows"]:
        assert sum(line["parts_s"].values()) == pytest.approx(line["step_s"])


@needs_compiler
def test_scaling_is_drawn(small, capsys):
    assert command.main(["--config", str(small[0]), "--scaling"]) == 0
    out, err = capsys.readouterr()
    bars = [line for line in out.splitlines() if "█" in line and " s, " in line]
    assert [bar.split()[0] for bar in bars] == ["8", "16"]
    assert bars[0].endswith("100.0 %")
    assert "another model" in err


@needs_compiler
def test_a_search_says_what_is_best_and_why(small):
    found = small[2]
    first, second = found["candidates"]
    assert [] in (first["set"], second["set"])  # the row
    assert found["best"] == first
    assert first["why"] == ""
    assert second["why"].startswith(f"{second['step_s'] - first['step_s']:+.3f} s; ")
    assert found["state_does_not_fit"] == 0


@needs_compiler
def test_a_search_goes_on_where_it_stopped(small, monkeypatch, capsys):
    """Kept plans are read; a candidate whose process fails is listed with its line."""
    monkeypatch.setattr(processes.sys, "executable", "false")
    again = said(*arguments(small[0]), "--limit", 2)
    assert again == small[2]
    more = said(*arguments(small[0]), "--limit", 3)
    assert more["candidates"][:2] == small[2]["candidates"]
    assert more["candidates"][2]["why"] == "not compiled: exit status 1"
    best = more["best"]["set"]
    capsys.readouterr()
    assert command.main([*map(str, arguments(small[0])), "--limit", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 tried of" in out
    pasted = out.splitlines()[-1]
    assert pasted.endswith(" ".join(f"--set {text}" for text in best)) or not best


@needs_compiler
def test_why_names_the_part_that_is_longer(small):
    (path, *_) = processes.CACHE.glob("small-8-h100/plan.json")
    plan = read(path)
    assert sum(parts(plan).values()) == pytest.approx(seconds(plan))
    work = replace(plan.flops, recompute_ratio=2 * plan.flops.recompute_ratio)
    longer = plan.forecast.parts_s["products"]
    more = replace(plan.forecast, parts_s=plan.forecast.parts_s | {"products": 2 * longer})
    slow = replace(plan, flops=work, forecast=more, forecast_step_s=seconds(plan) + longer)
    assert search.why(slow, plan).endswith(f"; recompute {longer:+.3f} s")
    size = replace(plan.bytes_per_device, peak=plan.bytes_per_device.limit + 3 * 2**30)
    big = replace(plan, bytes_per_device=size, fits=False)
    assert search.why(big, plan) == "does not fit: 3.0 GiB over the limit"
    assert search.why(plan, plan) == ""


def test_the_line_that_says_why_a_process_failed():
    def reason(code, text):
        return processes._reason(processes.subprocess.CompletedProcess([], code, "", text))

    assert reason(2, "W1 noise\nerror: 9 GPUs do not fill nodes of 8\n") == (
        "9 GPUs do not fill nodes of 8"
    )
    trace = (
        "Traceback ..\n  File x\njax.errors.JaxRuntimeError: INTERNAL: no\n-----\nFor simplicity"
    )
    assert reason(1, trace) == "jax.errors.JaxRuntimeError: INTERNAL: no"
    assert reason(3, "") == "exit status 3"
    assert "signal 9" in reason(-9, "")
