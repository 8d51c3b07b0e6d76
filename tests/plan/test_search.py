"""Searches: what may be chosen and in which order, without a compiler; then the command on a recipe
small enough to compile in seconds."""

import contextlib
import io
import json
from dataclasses import replace
from math import log2

import pytest
import yaml
from cases import tiered
from commands import ROOT
from compiled import needs_compiler
from made_plans import made, slower

from jaxbench.base.hardware import H100
from jaxbench.plan import candidates, command, processes, search
from jaxbench.plan.arguments import LIMIT
from jaxbench.plan.candidates import least_state
from jaxbench.plan.plan import parts, read
from jaxbench.plan.search import Outcome, Search
from jaxbench.recipe import flops, planned, recipes
from jaxbench.xla import flags

RECIPE = """
model: llama31_8b
precision: {dtype: bf16}
batch: {sequence_length: 2048}
optimizer: {schedule: megatron, learning_rate: 3.0e-4, final_learning_rate: 3.0e-5, warmup: 2000,
            eps: 1.0e-5, decay_vectors: false}
execution: {remat: [attention]}
rows:
  8:  {layers: 2, fsdp: 8, microbatch: 1, global_batch: 16, model: {vocabulary: 4096}}
  1:  {layers: 1, microbatch: 1, global_batch: 1}
"""


def row(name, gpus, *changes):
    overrides = recipes.parse_overrides(list(changes))
    return recipes.resolve(recipes.load(name), gpus, overrides=overrides)


@pytest.mark.parametrize(
    ("name", "gpus"),
    [("llama2_70b_fp8", 64), ("llama31_405b_bf16", 32), ("grok1_314b_bf16", 64),
     ("nemotron4_340b_fp8", 128), ("nemotronh_56b_bf16", 32), ("llama31_8b_bf16", 1),
     pytest.param("deepseek_v3_bf16", 1024, marks=pytest.mark.nightly)],
)  # fmt: skip
def test_the_row_is_among_what_may_be_chosen(name, gpus):
    run = row(name, gpus)
    found = candidates.layouts(run)
    assert candidates.layout(run) in {candidates.layout(each) for each in found}
    assert len({candidates.layout(each) for each in found}) == len(found)


def test_a_candidate_is_its_row_with_set_entries():
    run = row("grok1_314b_fp8", 32)
    for at, layout in enumerate(candidates.layouts(run)[::97]):
        for policy in candidates.policies(layout)[at::50]:
            found = candidates.with_policy(layout, policy)
            again = row("grok1_314b_fp8", 32, *candidates.changes(found, run))
            assert again.mesh_shape == found.mesh_shape
            assert candidates.settings(again) == candidates.settings(found)
    assert candidates.changes(run, run) == []


def test_parts_are_tried_where_tokens_are_exchanged():
    """1, 2 and the row's; other microbatches stay neighbours though they have other parts."""
    run = row(
        "qwen3_30b_a3b_fp8", 16, "parallelism.fsdp=2", "parallelism.expert=8",
        "batch.microbatch=4", "execution.expert_parts=4",
    )  # fmt: skip
    near = {
        (each.microbatch, each.execution.expert_parts)
        for each in candidates.layouts(run)
        if each.mesh_shape == run.mesh_shape and candidates.distance(each, run) <= 1
    }
    assert near >= {(4, 4), (4, 2), (4, 1), (2, 2), (2, 1), (1, 1)}
    llama = candidates.layouts(row("llama2_70b_fp8", 64))
    assert {each.execution.expert_parts for each in llama} == {1}


def test_a_search_knows_the_sum_of_experts_in_a_latent_space():
    run = row("nemotron3_super_120b_a12b_bf16", 64)
    assert run.execution.remat in {policy.remat for policy in candidates.policies(run)}
    without = replace(run, execution=replace(run.execution, remat="attention,residual"))
    assert spared(without) < spared(run)
    assert candidates.estimated_peak(without) < candidates.estimated_peak(run)


def test_what_the_user_sets_stays():
    run = row("llama2_70b_fp8", 64, "parallelism.tensor=2", "parallelism.fsdp=32")
    fixed = frozenset(["parallelism.tensor", "batch.microbatch"])
    found = candidates.layouts(run, fixed)
    assert {each.parallelism.tensor for each in found} == {2}
    assert {each.microbatch for each in found} == {2}
    assert len({each.parallelism.fsdp for each in found}) > 1
    only = Search(run, H100, FEW | {"execution.remat"})
    seen = simulate(only, 4)
    assert {each.execution.remat for each in seen} == {run.execution.remat}


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ([], 0),
        (["parallelism.fsdp=32"], 1),
        (["parallelism.fsdp=16", "parallelism.tensor=2"], 2),
        (["parallelism.fsdp=16"], 1),
        (["batch.microbatch=1", "execution.remat=full"], 1),
        # A device has as many tokens of a microbatch as before.
        (["parallelism.fsdp=32", "parallelism.context=2", "batch.microbatch=4"], 1),
        (["parallelism.fsdp=32", "parallelism.pipeline=2", "parallelism.virtual_stages=4",
          "execution.remat=full", "batch.microbatch=1"], 2),
    ],
)  # fmt: skip
def test_the_distance_counts_what_differs(changes, count):
    run = row("llama2_70b_fp8", 64)
    other = row("llama2_70b_fp8", 64, *changes)
    assert candidates.distance(run, other) == candidates.distance(other, run) == count


def test_in_a_pipeline_no_policy_counts_layers_or_unrolls():
    run = row("nemotron4_340b_fp8", 128, "execution.remat=full")
    policies = candidates.policies(run)
    assert len(policies) > 4
    assert not any(":" in policy.remat or policy.remat == "none" for policy in policies)
    assert {policy.offload for policy in policies} == {"none"}
    assert all(candidates.with_policy(run, policy) for policy in policies)


def test_recomputation_is_the_forward_pass_of_what_is_not_kept():
    """By hand: with full remat all products of a layer but the MLP's last run a second time."""
    kept = "execution.remat=query,key,value,attention,residual,gate,up"
    run = row("llama31_8b_bf16", 8, kept)
    work = flops.model_flops(run.model, run.batch.sequence_length)
    again = (work["total"] - work["head"] - work["mlp"] / 3) / 3
    assert spared(run) == pytest.approx(again / work["total"])
    assert spared(row("llama31_8b_bf16", 8, "execution.remat=full")) == 0


def test_memory_is_near_what_was_compiled():
    """The peaks of all plans on H100s, for transformers; a difference of two is nearer."""
    rows = [line for line in planned.read()[1] if line["recipe"].startswith("llama")]
    for line in rows:
        if int(line["GPUs"]) > 1 and line["GPU"] == "h100":
            expected = candidates.estimated_peak(row(line["recipe"], int(line["GPUs"]))) / 2**30
            assert expected == pytest.approx(float(line["peak GiB"]), rel=0.2), line


def test_the_least_state_is_below_any_real_one():
    """A device of the smallest mesh that holds Llama 2 70B in 71 GiB: 16 and not 8 GPUs."""
    run = row("llama2_70b_fp8", 64)
    sizes = {each.parallelism.ranks: least_state(each) for each in candidates.layouts(run)}
    assert sizes[8] > H100.memory_limit > sizes[16]


def spared(run):
    return candidates.policy_of(run).spared


FEW = frozenset(["parallelism.pipeline", "parallelism.context"])
"""Fewer candidates: every annotation is checked in tests, which makes them slow."""


def seconds(run):
    """A step time whose best layout has large products and no bubble."""
    p = run.parallelism
    bubble = (p.pipeline - 1) / (p.virtual_stages * run.accumulation)
    split = log2(p.tensor * p.context * run.accumulation)
    return 10 * (2 - spared(run)) * (1 + bubble) * (1 + 0.02 * split)


def simulate(searching, limit, more=0, at_a_time=2):
    """Runs a search whose plans take `seconds`, and `more` memory than expected; what it tried, in
    order."""
    while batch := searching.batch(min(at_a_time, limit - len(searching.tried))):
        for run in batch:
            peak = candidates.estimated_peak(run) + more
            searching.tried[run] = Outcome(seconds(run), peak, peak <= searching.limit)
    return list(searching.tried)


def test_a_search_starts_at_the_row_and_goes_on_beside_it():
    run = row("llama2_70b_fp8", 64)
    searching = Search(run, H100, FEW)
    seen = simulate(searching, 9, 2**31)
    assert len(seen) == len(set(seen))
    assert seen[0] == run
    assert candidates.distance(run, seen[1]) <= 1
    for at, each in enumerate(seen[1:], 1):
        assert min(candidates.distance(each, other) for other in seen[:at]) <= 2
    assert seconds(searching.best()) < seconds(run)


SEARCHED = [
    ("llama2_70b_fp8", 64), ("llama31_405b_bf16", 512), ("llama31_8b_bf16", 8),
    ("nemotron4_340b_fp8", 128), ("nemotronh_56b_bf16", 32),
]  # fmt: skip


@pytest.mark.parametrize("recipe_row", tiered([SEARCHED[0]], SEARCHED), ids=str)
def test_a_search_finds_at_least_what_the_recipe_has(recipe_row):
    """From full remat and the smallest microbatches, in half of the default number of plans."""
    wanted = row(*recipe_row)
    worse = row(*recipe_row, "execution.remat=full", "batch.microbatch=1")
    searching = Search(worse, H100)
    simulate(searching, LIMIT // 2, at_a_time=4)
    assert seconds(searching.best()) <= 1.01 * seconds(wanted)


def test_a_search_finds_the_best_of_what_there_is():
    """Nothing that fits is faster than what it found."""
    run = row("llama31_8b_bf16", 8, "execution.remat=full", "parallelism.fsdp=4")
    fixed = FEW | {"batch.microbatch"}
    searching = Search(run, H100, fixed)
    simulate(searching, 12)
    everything = [
        seconds(each)
        for layout in candidates.layouts(run, fixed)
        for policy in candidates.policies(layout)
        if (each := candidates.with_policy(layout, policy))
        and candidates.estimated_peak(each) <= H100.memory_limit
    ]
    assert seconds(searching.best()) == pytest.approx(min(everything), rel=0.01)


def test_a_search_gets_a_row_that_does_not_fit_to_fit():
    run = row("llama2_70b_fp8", 64, "batch.microbatch=2")
    large = replace(run, execution=replace(run.execution, remat="none"))
    searching = Search(large, H100, FEW)
    seen = simulate(searching, 5, 8 * 2**30)
    assert candidates.estimated_peak(seen[0]) > H100.memory_limit
    assert searching.best() is not None


def test_what_keeps_everything_may_fit_without_gathered_weights():
    run = row("llama31_8b_bf16", 8)
    assert run.execution.remat == "none"
    _, second = simulate(Search(run, H100), 2, 10 * 2**30)
    assert second.mesh_shape == run.mesh_shape
    assert second.execution.remat == "query,key,value,attention,residual,gate,up"


def test_what_may_hardly_fit_is_tried_if_it_is_fast():
    """All activations saved without a second axis: 68 of 71 GiB."""
    changes = "precision.accumulate=fp32", "parallelism.fsdp=2", "parallelism.tensor=4"
    run = row("llama31_8b_bf16", 8, "execution.remat=full", *changes)
    searching = Search(run, H100, frozenset(["parallelism.pipeline", "batch.microbatch"]))
    simulate(searching, LIMIT // 2, 2 * 2**30)
    found = searching.best()
    assert (found.parallelism.fsdp, found.execution.remat) == (8, "none")
    assert searching.tried[found].peak > 0.95 * searching.limit


def test_what_cannot_fit_is_not_compiled():
    """By what the parameters alone take."""
    run = row("llama2_70b_fp8", 64)
    searching = Search(run, H100, FEW)
    every = candidates.layouts(run, FEW)
    assert searching.cannot_fit == sum(least_state(each) > H100.memory_limit for each in every)
    assert searching.cannot_fit > 0
    assert all(least_state(each) <= H100.memory_limit for each in simulate(searching, 4))


def test_what_has_no_room_is_saved_in_host_memory():
    """Where it spares more than the copies cost; a GPU without a host link saves nothing there."""
    run = row("llama2_70b_bf16", 64, "execution.offload=none", "execution.remat=full")
    seen = simulate(Search(run, H100, FEW | {"batch.microbatch"}), 4)
    assert any("gate" in each.execution.offload for each in seen)
    apart = replace(H100, host=0.0, host_memory=0)
    seen = simulate(Search(run, apart, FEW | {"batch.microbatch"}), 4)
    assert {each.execution.offload for each in seen} == {"none"}


def test_what_the_host_cannot_hold_is_not_compiled():
    run = row("llama2_70b_bf16", 64, "execution.offload=none", "execution.remat=full")
    small = replace(H100, host_memory=H100.host_memory // 8)
    seen = simulate(Search(run, small, FEW), 8)
    needed = [candidates.host_bytes(each, candidates.policy_of(each)) for each in seen]
    assert 0 < max(needed) <= small.host_limit


def test_two_changes_are_one_candidate_unless_they_are_of_one_setting():
    run = row("llama2_70b_fp8", 256)
    guided = next(candidates.other_options(run))
    near = [each for each in candidates.layouts(run) if candidates.distance(each, run) == 1]
    split = next(each for each in near if each.mesh_shape != run.mesh_shape)
    both = candidates.merged(guided, split, run)
    assert both.mesh_shape == split.mesh_shape
    assert both.execution.xla_flags == guided.execution.xla_flags != run.execution.xla_flags
    other = next(each for each in near if each.mesh_shape not in (run.mesh_shape, split.mesh_shape))
    assert candidates.merged(other, split, run) is None


def test_the_best_plan_says_what_is_worth_a_try():
    """What is exposed halves with a guided schedule, and with half as many microbatches."""
    run = row("llama2_70b_fp8", 256, "batch.microbatch=1")
    fewer = replace(run, batch=replace(run.batch, microbatch=2))
    tuned, summed, *_ = candidates.other_options(run)

    def gain(new, axis):
        return candidates.layout_s(new, run, {f"exposed: {axis}": 1.0}, 4.0, H100)

    assert gain(fewer, "fsdp") == pytest.approx(-0.5)
    # The gradient of a single microbatch stays in bf16.
    assert gain(fewer, "data") == pytest.approx(-0.5)
    assert summed.execution.replica_sums == "layer"
    assert gain(summed, "data") == pytest.approx(-0.5)
    assert gain(summed, "fsdp") == 0.0
    assert abs(gain(tuned, "fsdp")) in (pytest.approx(0.5), pytest.approx(1.0))


def test_a_new_axis_costs_what_it_sends():
    """By hand: the tensor ranks of 2 sequences gather and scatter them twice for each of 160
    mixers. Context ranks send keys and values three times, beyond a node over its 8 adapters."""
    run = row("llama2_70b_bf16", 64, "batch.microbatch=1")

    def seconds(axis, size):
        changes = f"parallelism.{axis}={size}", f"parallelism.fsdp={64 // size}"
        other = row("llama2_70b_bf16", 64, "batch.microbatch=1", *changes)
        return candidates.layout_s(other, run, {}, 100.0, H100)

    number = 2 * 4096 * 2  # bytes of a feature of 2 sequences
    assert seconds("tensor", 4) == pytest.approx(4 * 3 * number * 8192 * 160 / 450e9)
    keys_values = 2 * 8 * 128 * 80
    assert seconds("context", 8) == pytest.approx(3 * 7 * number * keys_values / 450e9)
    assert seconds("context", 16) == pytest.approx(3 * 15 * number * keys_values / 400e9)


def test_two_changes_at_a_time_keep_what_the_user_sets(monkeypatch):
    """Pairs are tried where a plan exposes much."""
    monkeypatch.setattr(search, "parts", lambda plan: {"exposed: fsdp": 1.0, "exposed: data": 1.0})
    run = row("llama2_70b_fp8", 512, "execution.remat=query,key,value,attention,residual")
    assert run.data == 4
    searching = Search(run, H100, FEW | {"execution.remat", "execution.offload"})
    searching.tried[searching.row] = Outcome(4.0, 40 * 2**30, True, plan=made())
    found = searching.to_compile()
    assert {each.execution.remat for each in found} == {run.execution.remat}
    assert {each.execution.offload for each in found} == {run.execution.offload}
    first = searching.row
    other_layout = [e for e in found if candidates.layout(e) != candidates.layout(first)]
    assert any(candidates.options(each) != candidates.options(first) for each in other_layout)


@pytest.mark.parametrize(
    ("base", "remat", "limits"),
    [("tuned", "full", {"1", "2"}), ("tuned", "none", {"2"}), ("guided", "full", {"8"})],
)
def test_other_limits_of_collectives_in_flight_are_tried(base, remat, limits, monkeypatch):
    """Without remat layers are unrolled, where `tuned` has one in flight."""
    monkeypatch.setattr(flags, "jax_release", lambda: (0, 11))
    saved = f"execution.remat={remat}", "execution.offload=none"
    run = row("llama2_70b_bf16", 64, f"execution.xla_flags={base}", *saved)
    changed = {each.execution.xla_flags for each in candidates.other_options(run)}
    assert changed - {"tuned", "guided"} == {f"tuned,{flags.IN_FLIGHT}={n}" for n in limits}
    assert not [*candidates.other_options(run, frozenset({"execution.xla_flags"}))]


def searching_from(run, share):
    """A search whose row takes 10 s and this share of the memory limit."""
    searching = Search(run, H100, FEW)
    searching.tried[searching.row] = Outcome(10.0, share * searching.limit, True)
    return searching


def test_another_option_keeps_a_policy_that_has_room():
    """Copies to the host would only make it more certain that it fits."""
    run = row("llama31_8b_bf16", 8, "execution.remat=query,key,value,attention,residual,gate,up")
    searching = searching_from(run, 0.8)
    guided = candidates.options(next(candidates.other_options(searching.row)))
    tried = [each for each in searching.to_compile() if candidates.options(each) == guided]
    assert tried
    assert {each.execution.offload for each in tried} == {"none"}


def test_a_policy_of_the_best_is_tried_again_only_if_it_is_faster():
    """Next to another candidate that is about as fast."""
    searching = searching_from(row("llama31_8b_bf16", 8), 0.99)
    best = searching.row
    near = next(each for each in searching.layouts if candidates.distance(each, best) == 1)
    searching.tried[near] = Outcome(10.1, searching.limit / 2, True)
    found = {(candidates.layout(each), candidates.options(each)) for each in searching.to_compile()}
    assert found
    assert (candidates.layout(best), candidates.options(best)) not in found


def test_what_is_hardly_too_large_is_tried_with_another_policy():
    searching = searching_from(row("llama31_8b_bf16", 8, "parallelism.fsdp=4"), 0.5)
    large = row("llama31_8b_bf16", 8)
    large = replace(searching.row, parallelism=large.parallelism, batch=large.batch)
    searching.tried[large] = Outcome(8.0, 1.0005 * searching.limit, False)
    again = [each for each in searching.to_compile() if each.mesh_shape == large.mesh_shape]
    assert again
    assert large not in again


def test_what_surely_does_not_fit_is_left_out_once_something_fits():
    """64 sequences of 8192 tokens at a time need twice the memory even with full remat."""
    run = row("llama31_8b_bf16", 8, "parallelism.tensor=8", "parallelism.fsdp=1")
    searching = searching_from(run, 0.5)
    assert 64 in {each.microbatch for each in searching.layouts}
    assert 64 not in {each.microbatch for each in searching.to_compile()}


def test_nothing_fits_with_a_policy_that_pipelines_cannot_have():
    run = row("llama31_8b_bf16", 8, "execution.remat=none")
    others = {"parallelism.context", "parallelism.tensor", "batch.microbatch"}
    searching = Search(run, H100, frozenset(["execution.remat", *others]))
    while batch := searching.batch(search.BATCH):
        searching.tried |= {each: Outcome(10.0, 2 * searching.limit, False) for each in batch}
    assert len(searching.tried) > 2
    assert {each.parallelism.pipeline for each in searching.tried} == {1}


def test_a_batch_has_several_layouts():
    searching = searching_from(row("llama2_70b_fp8", 64, "execution.remat=full"), 0.5)
    first, second = searching.batch(2)
    assert candidates.layout(first) != candidates.layout(second)


def test_an_option_that_made_a_candidate_slower_is_not_tried_again():
    run = row("llama2_70b_fp8", 64, "execution.xla_flags=tuned")
    searching = Search(run, H100, FEW)
    guided = next(candidates.other_options(searching.row))
    searching.tried[searching.row] = Outcome(4.0, candidates.estimated_peak(run), True)
    assert any(each.execution.xla_flags == "guided" for each in searching.to_compile())
    searching.tried[guided] = Outcome(4.1, candidates.estimated_peak(run), True)
    assert not any(each.execution.xla_flags == "guided" for each in searching.to_compile())


def test_options_next_to_one_that_was_slower_elsewhere_are_still_tried():
    run = row("llama2_70b_fp8", 64, "execution.xla_flags=tuned")
    searching = Search(run, H100, FEW)
    first = searching.row
    guided = next(candidates.other_options(first))
    searching.tried[first] = Outcome(4.0, candidates.estimated_peak(run), True)
    searching.tried[guided] = Outcome(4.1, candidates.estimated_peak(run), True)
    near = [each for each in searching.layouts if candidates.distance(each, first) == 1]
    best = replace(near[0], execution=guided.execution)
    searching.tried[best] = Outcome(3.0, candidates.estimated_peak(run), True)
    assert any(each.precision.gather != best.precision.gather for each in searching.to_compile())


def test_an_axis_that_made_a_candidate_slower_is_not_tried_in_other_sizes():
    """The plan of a mesh without tensor ranks does not show what these cost."""
    run = row("llama2_70b_fp8", 64, "execution.remat=full")
    searching = Search(run, H100, frozenset(["parallelism.pipeline", "parallelism.context"]))

    def with_tensor():
        return [each for each in searching.to_compile() if each.parallelism.tensor > 1]

    searching.tried[searching.row] = Outcome(4.0, candidates.estimated_peak(run), True)
    first, *others = with_tensor()
    assert others
    searching.tried[first] = Outcome(8.0, candidates.estimated_peak(first), True)
    assert not with_tensor()
    assert searching.to_compile()


def test_failed_candidates_are_passed_by():
    run = row("llama31_8b_bf16", 8)
    searching = Search(run, H100, FEW)
    for _ in range(3):
        batch = searching.batch(2)
        assert not searching.tried.keys() & set(batch)
        searching.tried |= dict.fromkeys(batch, Outcome())
    assert len(searching.tried) == 5
    assert searching.best() is None


def test_a_search_is_a_table(monkeypatch, capsys):
    """The row is too big, smaller meshes are slower, and one is not compiled."""
    plan, seen = made(gpus=8), []
    size = plan.bytes_per_device

    def plan_each(runs, target, config):
        for run in runs:
            number = len(seen)
            seen.append(run)
            now = replace(size, peak=size.limit + (2 - number) * 2**30)
            longer = slower(plan, plan.forecast_step_s * (1 + number / 10))
            found = replace(longer, bytes_per_device=now, fits=now.fits)
            yield run, "killed by signal 9" if number == 5 else found

    monkeypatch.setattr(search, "plan_each", plan_each)
    monkeypatch.setattr(search, "check_compiler", lambda: None)
    assert command.main([*map(str, arguments("llama31_8b_bf16")), "--limit", "7"]) == 0
    out = capsys.readouterr().out
    assert "the row; does not fit: 2.0 GiB over the limit" in out
    assert "not compiled: killed by signal 9" in out
    assert "7 candidates compiled, of" in out
    assert f"best: {1.2 * plan.forecast_step_s:.3f} s: --config llama31_8b_bf16 --gpus 8 " in out


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(recipe file, what `--search --json` says of it): two compiled programs of two layers. The
    plans are kept for the tests."""
    folder = tmp_path_factory.mktemp("search")
    path = folder / "small.yaml"
    path.write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "CACHE", folder / "cache")
        yield path, said(*arguments(path), "--limit", 2)


def arguments(path):
    return "--config", path, "--gpus", 8, "--search"


def said(*options):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert command.main([*map(str, options), "--json"]) == 0
    return json.loads(printed.getvalue())


@pytest.mark.nightly
@needs_compiler
def test_a_search_says_what_is_best_and_why(small):
    found = small[1]
    first, second = found["candidates"]
    assert [] in (first["set"], second["set"])  # the row
    assert found["best"] == first
    assert first["why"] == ""
    assert second["why"].startswith(f"{second['step_s'] - first['step_s']:+.3f} s; ")
    assert found["state_does_not_fit"] == 0


@pytest.mark.nightly
@needs_compiler
def test_a_search_goes_on_where_it_stopped(small, monkeypatch, capsys):
    """Kept plans are read; a candidate whose process fails is listed with its line."""
    monkeypatch.setattr(processes.sys, "executable", "false")
    again = said(*arguments(small[0]), "--limit", 2)
    assert again == small[1]
    more = said(*arguments(small[0]), "--limit", 3)
    assert more["candidates"][:2] == small[1]["candidates"]
    assert more["candidates"][2]["why"] == "not compiled: exit status 1"
    best = more["best"]["set"]
    capsys.readouterr()
    assert command.main([*map(str, arguments(small[0])), "--limit", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 candidates compiled, of" in out
    pasted = out.splitlines()[-1]
    assert pasted.endswith(" ".join(f"--set {text}" for text in best)) or not best


@pytest.mark.nightly
@needs_compiler
def test_why_names_the_part_that_is_longer(small):
    path, *_ = sorted(processes.CACHE.glob("small-8-h100*/plan.json"))
    plan = read(path)
    assert sum(parts(plan).values()) == pytest.approx(plan.forecast_step_s)
    work = replace(plan.flops, recompute_ratio=2 * plan.flops.recompute_ratio)
    longer = plan.forecast.parts_s["products"]
    more = replace(plan.forecast, parts_s=plan.forecast.parts_s | {"products": 2 * longer})
    slow = replace(plan, flops=work, forecast=more, forecast_step_s=plan.forecast_step_s + longer)
    assert search.why(slow, plan).endswith(f"; recompute {longer:+.3f} s")
    size = replace(plan.bytes_per_device, peak=plan.bytes_per_device.limit + 3 * 2**30)
    big = replace(plan, bytes_per_device=size, fits=False)
    assert search.why(big, plan) == "does not fit: 3.0 GiB over the limit"
    assert search.why(plan, plan) == ""


PLANTED = {
    ("llama31_8b_bf16", 8): {"fsdp": 2, "tensor": 4, "remat": "full"},
    ("llama2_70b_bf16", 64): {"fsdp": 8, "tensor": 8, "remat": "full", "offload": "none"},
    ("gpt3_5b_bf16", 16): {"fsdp": 2, "context": 8, "microbatch": 2, "remat": "full"},
}
"""Rows, and settings that make each slower."""


@pytest.mark.nightly
@needs_compiler
@pytest.mark.parametrize("name_gpus", PLANTED, ids=str)
def test_a_search_finds_a_mesh_as_fast_as_a_persons(name_gpus, tmp_path, monkeypatch):
    """From a mesh that is far from the recipe's, in half of the default number of plans."""
    monkeypatch.setattr(processes, "CACHE", tmp_path / "cache")
    name, gpus = name_gpus
    wanted = said("--config", name, "--gpus", gpus)["forecast_step_s"]
    content = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    content["rows"] = {gpus: content["rows"][gpus] | PLANTED[name_gpus]}
    path = tmp_path / "planted.yaml"
    path.write_text(yaml.safe_dump(content))
    found = said("--config", path, "--gpus", gpus, "--search", "--limit", LIMIT // 2)
    start = next(line for line in found["candidates"] if line["set"] == [])
    assert start["step_s"] > 1.05 * wanted
    assert found["best"]["step_s"] <= 1.01 * wanted


def test_the_line_that_says_why_a_process_failed():
    def reason(code, text, plan=""):
        return processes._reason(processes.subprocess.CompletedProcess([], code, plan, text))

    assert reason(2, "W1 noise\nerror: 9 GPUs do not fill nodes of 8\n") == (
        "9 GPUs do not fill nodes of 8"
    )
    trace = (
        "Traceback ..\n  File x\njax.errors.JaxRuntimeError: INTERNAL: no\n-----\nFor simplicity"
    )
    assert reason(1, trace) == "jax.errors.JaxRuntimeError: INTERNAL: no"
    assert reason(3, "") == "exit status 3"
    assert "signal 9" in reason(-9, "")
    changed = "the source, the packages or XLA_FLAGS changed while it was planned"
    assert reason(0, "noise", '{"fits": true}') == changed
    assert reason(1, "noise", '{"fits": false}') == changed
