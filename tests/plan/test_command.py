"""The command's options, and rows that are not in a recipe's file."""

import pytest

from jaxbench.hardware import H100
from jaxbench.plan import absent, candidates, command
from jaxbench.recipe import derive, recipes

ROW = ["--config", "llama31_8b_bf16", "--gpus", "16"]


def test_a_candidate_of_a_derived_row_is_the_same_to_its_process():
    """What `--set` gives it leaves nothing to be derived otherwise."""
    recipe = recipes.load("grok1_314b_bf16")
    row = recipes.resolve(derive.extend(recipe, 48, H100), 48)
    assert row.label == "derived"
    near = sorted(candidates.layouts(row), key=lambda run: candidates.distance(run, row))[:12]
    for run in near:
        texts = candidates.changes(run, row)
        overrides = recipes.parse_overrides(texts)
        there = recipes.resolve(derive.extend(recipe, 48, H100, overrides), 48, overrides=overrides)
        assert there.mesh_shape == run.mesh_shape
        assert (there.microbatch, there.batch.global_batch) == (
            run.microbatch,
            row.batch.global_batch,
        )


@pytest.mark.parametrize("option", [["--json"], ["--set", "model.layers=2"], ["--gpus", "8"]])
def test_what_would_be_ignored_is_refused(option, capsys):
    assert command.main(["--all", *option]) == 2
    assert capsys.readouterr().err == f"error: --all takes no {option[0]}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", ROW[1]], "--config and --gpus are needed"),
        ([*ROW[:3], "9"], "they do not fill nodes of 8; the nearest counts that work: 8 and 16"),
        (
            [*ROW, "--system", "nic=fast"],
            "--system nic=fast: expected nvlink=N, nic=N, node=N or domain=N",
        ),
        ([*ROW, "--system", "node=7"], "a domain of 8 GPUs is not one of nodes of 7"),
        (
            [*ROW, "--system", "node=7", "--system", "domain=7"],
            "the nearest that do: 14 and 21",
        ),
        (
            [*ROW, "--set", "model.attention.head_dim=100"],
            "cuDNN attention takes multiples of 8 up to 256",
        ),
        (["--diff", "nowhere.json", "nowhere.json"], "nowhere.json: cannot read a plan"),
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
def test_mistakes_are_one_line(arguments, message, monkeypatch, capsys):
    """Without the compiler for GPUs too."""
    monkeypatch.setattr(absent, "installed", lambda module: False)
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
