"""The command's options, and rows that are not in a recipe's file."""

import pytest

from jaxbench.hardware import H100
from jaxbench.plan import candidates, command
from jaxbench.recipe import derive, recipes


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
