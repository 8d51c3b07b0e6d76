"""Checkpoints: what is restored where, and what is refused."""

import json
import shutil
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import mesh_of, tiny_run, to_numpy

from jaxbench import checkpoint, recipes, train
from jaxbench.config import RecipeError, RunFailed

FSDP_TENSOR = ("parallelism.fsdp=4", "parallelism.tensor=2")


def saver(folder, run, **options):
    options = {"start": 0, "every": None, "keep": 2, "say": lambda line: None} | options
    return checkpoint.Checkpoints(folder, recipes.describe(run), **options)


def restored(path, run, say=lambda line: None):
    like = jax.eval_shape(partial(train.init_state, run))
    return checkpoint.restore(path, like, say)


class Keep:
    """A pause that keeps the state after some step as full arrays."""

    def __init__(self, step):
        self.step, self.arrays = step, {}

    def due(self, step, ending):
        return step == self.step

    def act(self, step, state, ending):
        with jax.transfer_guard("allow"):
            self.arrays = to_numpy(state)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Eight steps on fsdp 4 x tensor 2, saved every three steps and at the end."""
    folder, lines, kept = tmp_path_factory.mktemp("whole"), [], Keep(6)
    run = tiny_run(*FSDP_TENSOR, devices=8, steps=8)
    with mesh_of(run):
        program = train.make_program(run)
        checkpoints = saver(folder, run, every=3, say=lines.append)
        steps = list(train.run_steps(run, program, pauses=[kept, checkpoints]))
        checkpoints.wait()
    return SimpleNamespace(
        folder=folder, path=folder / "checkpoints" / "6", run=run, program=program, steps=steps,
        arrays=kept.arrays, lines=lines, saved=checkpoints.saved,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [(FSDP_TENSOR, 8), ((), 1), ((), 8), (("parallelism.context=2", "parallelism.fsdp=2"), 4)],
)
def test_a_state_is_restored_exactly_on_any_mesh(whole, overrides, devices):
    run, lines = tiny_run(*overrides, devices=devices), []
    with mesh_of(run):
        state, loaded = restored(whole.path, run, lines.append)
        like = jax.jit(partial(train.init_state, run))()
        assert jax.tree.structure(state) == jax.tree.structure(like)
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        actual = to_numpy(state)
    for name, exact in whole.arrays.items():
        np.testing.assert_array_equal(actual[name], exact, err_msg=name)
    assert int(state.step) == loaded["step"] == 6
    assert loaded["bytes"] == sum(x.nbytes for x in jax.tree.leaves(state))
    assert loaded["gb_per_s"] == pytest.approx(loaded["bytes"] / 1e9 / loaded["load_s"])
    assert len(lines) == 1
    assert lines[0].startswith("Global Checkpoint Load : Rank : 0 : Start time : ")
    assert "s : Time spent in load_checkpoint: " in lines[0]


def test_saves_are_reported_and_the_last_ones_kept(whole):
    assert [s["step"] for s in whole.steps] == list(range(8))
    assert [entry["step"] for entry in whole.saved] == [3, 6, 8]
    assert checkpoint.steps(whole.folder / "checkpoints") == [6, 8]
    for path, name in (("", "8"), ("checkpoints", "8"), ("checkpoints/6", "6")):
        assert checkpoint.find(whole.folder / path).name == name
    for entry, line in zip(whole.saved, whole.lines, strict=True):
        assert entry["bytes"] == sum(4 * x.size for x in whole.arrays.values())  # fp32, int32
        assert entry["blocking_s"] > 0
        assert entry["gb_per_s"] == pytest.approx(entry["bytes"] / 1e9 / entry["save_s"])
        start = f"Global Checkpoint Save : Rank: 0 : Iteration: {entry['step'] - 1} : Start time: "
        assert line.startswith(start)
        assert line.endswith(f"s : Save duration: {entry['save_s']:.3f}s")


def test_training_continues_as_if_it_had_not_stopped(whole):
    with mesh_of(whole.run):
        state, _ = restored(whole.path, whole.run)
        rest = list(train.run_steps(whole.run, whole.program, state=state))
    assert [s["step"] for s in rest] == [6, 7]
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [s[name] for s in rest] == [s[name] for s in whole.steps[6:]]


def test_another_model_is_refused(whole):
    path = whole.path
    with pytest.raises(RecipeError, match=r"is of another model: layers 3 instead of 4"):
        checkpoint.check(path, recipes.describe(tiny_run("model.layers=4")))
    checkpoint.check(path, recipes.describe(tiny_run()))
    run = tiny_run("model.layers=4")
    with mesh_of(run), pytest.raises(RunFailed, match=r"another state: \d+ arrays differ") as error:
        restored(path, run)
    assert "\n" not in str(error.value)


def test_what_is_no_checkpoint_is_refused(whole, tmp_path):
    with pytest.raises(RecipeError, match="holds no complete checkpoint"):
        checkpoint.find(tmp_path)
    with pytest.raises(RecipeError, match="holds no complete checkpoint"):
        checkpoint.find(tmp_path / "missing")
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "notes.txt").write_text("mine")
    with pytest.raises(RecipeError, match=r"no (complete )?checkpoint"):
        checkpoint.check(checkpoint.find(tmp_path), recipes.describe(tiny_run()))
    assert (tmp_path / "5" / "notes.txt").read_text() == "mine"
    unfinished = tmp_path / "run" / "checkpoints" / "4.orbax-checkpoint-tmp"
    shutil.copytree(whole.path, unfinished)
    with pytest.raises(RecipeError, match="holds no complete checkpoint"):
        checkpoint.find(tmp_path / "run")


def test_a_truncated_checkpoint_is_one_line(whole, tmp_path):
    path = tmp_path / "2"
    shutil.copytree(whole.path, path)
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    run = tiny_run()
    with mesh_of(run), pytest.raises(RunFailed, match="cannot be restored: ") as error:
        restored(checkpoint.find(path), run)
    assert "\n" not in str(error.value)
    assert json.loads((path / "recipe" / "metadata").read_text())["model"]["layers"] == 3
