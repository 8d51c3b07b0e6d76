"""Slots of dropless experts in every row with random routing."""

import pytest

from jaxbench.base.hardware import PLANNED
from jaxbench.plan import lost_tokens
from jaxbench.recipe import recipes

RUNS = {
    f"{recipe.name}, {row}, {gpu or 'h100'}": recipes.resolve(recipe.on(PLANNED.get(gpu)), row)
    for recipe in recipes.load_all()
    for gpu in (None, *recipe.gpu_rows)
    for row in recipe.on(PLANNED.get(gpu)).rows
    if row != "smoke"
}
RANDOM = {
    name: run
    for name, run in RUNS.items()
    if run.model.dropless and run.model.experts.routing == "random"
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_row_loses_no_token(name):
    assert lost_tokens.expected(RANDOM[name]) < lost_tokens.NONE


def test_the_least_factor_loses_no_token():
    recipe = recipes.load("gpt_oss_120b_mxfp8").on(PLANNED["gb200"])
    run = recipes.resolve(recipe, 64, overrides=recipes.parse_overrides(["batch.microbatch=4"]))
    factor = lost_tokens.least_factor(run)
    assert 1.1 < factor < 1.3
    for more, loses in ((0.0, False), (-lost_tokens.STEP, True)):
        changes = [f"model.experts.rank_capacity_factor={factor + more}", "batch.microbatch=4"]
        changed = recipes.resolve(recipe, 64, overrides=recipes.parse_overrides(changes))
        assert bool(lost_tokens.warning(changed)) is loses
    (line,) = lost_tokens.warning(run)
    assert line.endswith(f"--set model.experts.rank_capacity_factor={factor}")
