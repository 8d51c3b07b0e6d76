"""benchmarks/published_mesh.py, without compiling."""

import pytest

from jaxbench.base.errors import RecipeError

IMPOSSIBLE = ("nemotron3_super: no pipeline can hold",)
"""Families of which some published meshes are none of ours, and a part of the reason."""


@pytest.fixture
def script(benchmark_script):
    return benchmark_script("published_mesh")


def test_rows_have_the_published_ranks_or_say_why_not(script):
    refused = set()
    for found in script.rows():
        try:
            run = found.run()
        except RecipeError as error:
            said = f"{found.key[0]}: {error}"
            refused |= {
                each for each in IMPOSSIBLE
                if said.startswith(each.partition(":")[0]) and each.partition(": ")[2] in said
            } or {said}  # fmt: skip
            continue
        line, parallelism = found.line, run.parallelism
        assert run.batch.global_batch == found.row.gbs
        assert parallelism.tensor == int(line["tp"] or 1), found.key
        assert parallelism.pipeline == int(line["pp"] or 1), found.key
        assert parallelism.context == int(line["cp"] or 1), found.key
        assert parallelism.ranks == run.gpus == found.row.gpus, found.key
    assert refused == {*IMPOSSIBLE}


def test_what_is_kept_belongs_to_published_rows(script):
    kept = script.kept(script.KEPT)
    assert kept.keys() <= {found.key for found in script.rows()}
    for line in kept.values():
        assert bool(line["failed"]) is not bool(line["forecast s"])
