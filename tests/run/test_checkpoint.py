"""Checkpoints: what is restored where, and what is refused."""

import errno
import json
import re
import shutil
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tiny import mesh_of, tiny_run, to_numpy

from jaxbench.base.errors import RecipeError, RunFailed
from jaxbench.cluster.watchdog import Watchdog
from jaxbench.recipe import recipes
from jaxbench.run import checkpoint, prepare, saved_checkpoints
from jaxbench.run.arguments import parse_arguments
from jaxbench.run.records import Recorder
from jaxbench.train.loop import run_steps
from jaxbench.train.step import abstract_state, make_program

FSDP_TENSOR = ("parallelism.fsdp=4", "parallelism.tensor=2")
FP8 = ("precision.dtype=fp8", "precision.amax_history=4", "execution.remat=full")
PIPELINE = (
    "parallelism.pipeline=2", "parallelism.virtual_stages=2", "parallelism.fsdp=2",
    "parallelism.tensor=2",
)  # fmt: skip


class Said(Recorder):
    """A recorder without files that keeps what is said."""

    def __init__(self, run):
        super().__init__(None, run, {"recipe": recipes.describe(run)})
        self.lines = []

    def say(self, line):
        self.lines.append(line)

    def phase(self, name, detail):
        pass


def saver(folder, run, every):
    return checkpoint.Checkpoints(folder, 0, every, 2, Said(run), Watchdog())


def restored(path, run, say=lambda line: None):
    like = abstract_state(run)
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


def train_and_save(folder, run):
    """All steps, saved every three steps and at the end; the state after six."""
    kept = Keep(6)
    with mesh_of(run):
        program = make_program(run)
        checkpoints = saver(folder, run, every=3)
        steps = list(run_steps(run, program, pauses=[kept, checkpoints]))
        checkpoints.wait()
    return SimpleNamespace(
        folder=folder, path=folder / "checkpoints" / "6", run=run, program=program, steps=steps,
        arrays=kept.arrays, lines=checkpoints._recorder.lines, saved=checkpoints.saved,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Eight steps in FP8 on fsdp 4 x tensor 2."""
    run = tiny_run(*FSDP_TENSOR, *FP8, devices=8, steps=8)
    return train_and_save(tmp_path_factory.mktemp("whole"), run)


def assert_restored_exactly(whole, run):
    """The state of step 6 on the mesh of `run`; (state, what loading took, log lines)."""
    lines = []
    with mesh_of(run):
        state, loaded = restored(whole.path, run, lines.append)
        like = abstract_state(run)
        assert jax.tree.structure(state) == jax.tree.structure(like)
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            assert x.sharding.spec == (y.sharding.spec if y.sharding else PartitionSpec())
        actual = to_numpy(state)
    assert actual.keys() == whole.arrays.keys()
    for name, exact in whole.arrays.items():
        np.testing.assert_array_equal(actual[name], exact, err_msg=name)
    return state, loaded, lines


def assert_continues(whole):
    """Training from step 6 as if it had not stopped, bit for bit."""
    with mesh_of(whole.run):
        state, _ = restored(whole.path, whole.run)
        rest = list(run_steps(whole.run, whole.program, state=state))
    assert [s["step"] for s in rest] == [6, 7]
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [s[name] for s in rest] == [s[name] for s in whole.steps[6:]]


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        (FSDP_TENSOR, 8), ((), 1), ((), 8), (("parallelism.context=2", "parallelism.fsdp=2"), 4),
        (PIPELINE, 8),
    ],
)  # fmt: skip
def test_a_state_is_restored_exactly_on_any_mesh(whole, overrides, devices):
    run = tiny_run(*overrides, *FP8, devices=devices)
    state, loaded, lines = assert_restored_exactly(whole, run)
    assert int(state.step) == loaded["step"] == 6
    assert loaded["bytes"] == sum(x.nbytes for x in jax.tree.leaves(state))
    assert loaded["gb_per_s"] == pytest.approx(loaded["bytes"] / 1e9 / loaded["load_s"])
    assert len(lines) == 1
    assert lines[0].startswith("Global Checkpoint Load : Rank : 0 : Start time : ")
    assert "s : Time spent in load_checkpoint: " in lines[0]


def test_the_history_of_delayed_scaling_is_part_of_the_state(whole):
    """Training goes on by it: with another one it goes elsewhere."""
    assert any(".fp8" in name and x.any() for name, x in whole.arrays.items())
    assert_continues(whole)
    with mesh_of(whole.run):
        state, _ = restored(whole.path, whole.run)
        forgotten = replace(state, fp8=jax.tree.map(lambda x: 0 * x, state.fp8))
        rest = list(run_steps(whole.run, whole.program, state=forgotten))
    assert rest[0]["loss"] != whole.steps[6]["loss"]


@pytest.mark.slow
def test_a_pipeline_continues_and_moves_to_no_pipeline(tmp_path):
    """The histories of its layers included, of which one is padding."""
    run = tiny_run(*PIPELINE, *FP8, devices=8, steps=8)
    whole = train_and_save(tmp_path, run)
    assert_continues(whole)
    assert_restored_exactly(whole, tiny_run(*FP8, devices=1))


def test_saves_are_reported_and_the_last_ones_kept(whole):
    assert [s["step"] for s in whole.steps] == list(range(8))
    assert [entry["step"] for entry in whole.saved] == [3, 6, 8]
    assert saved_checkpoints.steps(whole.folder / "checkpoints") == [6, 8]
    for path, names in (("", "86"), ("checkpoints", "86"), ("checkpoints/6", "6")):
        found, skipped = saved_checkpoints.readable(
            whole.folder / path, recipes.describe(whole.run)
        )
        assert ("".join(path.name for path in found), skipped) == (names, [])
    for entry, line in zip(whole.saved, whole.lines, strict=True):
        assert entry["bytes"] == sum(4 * x.size for x in whole.arrays.values())  # fp32, int32
        assert entry["blocking_s"] > 0
        assert entry["gb_per_s"] == pytest.approx(entry["bytes"] / 1e9 / entry["save_s"])
        start = f"Global Checkpoint Save : Rank: 0 : Iteration: {entry['step'] - 1} : Start time: "
        assert line.startswith(start)
        assert line.endswith(f"s : Save duration: {entry['save_s']:.3f}s")


def test_another_state_is_refused_in_the_words_of_settings(whole):
    path = whole.path

    def refused(message, *overrides, fp8=FP8):
        with pytest.raises(RecipeError) as error:
            saved_checkpoints.readable(path, recipes.describe(tiny_run(*fp8, *overrides)))
        assert str(error.value) == f"{path} has another state: {message}"

    refused("model.layers: 4 here, 3 in the checkpoint", "model.layers=4")
    refused("model.mlp.ffn: 128 here, 96 in the checkpoint", "model.mlp.ffn=128")
    refused("optimizer.moments: bf16 here, fp32 in the checkpoint", "optimizer.moments=bf16")
    dtype = (
        "precision.dtype: fp32 here, fp8 in the checkpoint, precision.amax_history: 1024 here, 4"
    )
    refused(f"{dtype} in the checkpoint", fp8=())
    refused(
        "precision.scaling: current here, delayed in the checkpoint", "precision.scaling=current"
    )
    refused("precision.amax_history: 8 here, 4 in the checkpoint", "precision.amax_history=8")
    both = "model.layers: 4 here, 3 in the checkpoint, optimizer.moments: bf16 here, fp32 in the"
    refused(f"{both} checkpoint", "model.layers=4", "optimizer.moments=bf16")
    newer = recipes.describe(tiny_run(*FP8, "optimizer.learning_rate=1", *FSDP_TENSOR, devices=8))
    newer["model"]["attention"]["unknown_then"] = 1
    assert saved_checkpoints.readable(path, newer) == ([path], [])
    run = tiny_run("model.layers=4")
    with mesh_of(run), pytest.raises(RunFailed, match=r"another state: \d+ arrays differ") as error:
        restored(path, run)
    assert "\n" not in str(error.value)


def test_what_is_no_checkpoint_is_refused(whole, tmp_path):
    recipe = recipes.describe(whole.run)
    for nothing in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RecipeError, match="has no checkpoint"):
            saved_checkpoints.readable(nothing, recipe)
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "notes.txt").write_text("mine")
    with pytest.raises(RunFailed, match=r"5 cannot be read: .*metadata: No such file") as error:
        saved_checkpoints.readable(tmp_path, recipe)
    assert error.value.cause == "storage"
    assert (tmp_path / "5" / "notes.txt").read_text() == "mine"
    unfinished = tmp_path / "run" / "checkpoints" / "4.orbax-checkpoint-tmp"
    shutil.copytree(whole.path, unfinished)
    for name in ("run", "2242"):  # a number, as the folder of a Slurm job is
        unfinished.parent.parent.rename(tmp_path / name)
        unfinished = tmp_path / name / "checkpoints" / "4.orbax-checkpoint-tmp"
        with pytest.raises(RecipeError, match="has no checkpoint"):
            saved_checkpoints.readable(tmp_path / name, recipe)


def cut(path, size=20):
    path.write_bytes(path.read_bytes()[:size])


DAMAGE = {
    "no state": (lambda path: shutil.rmtree(path / "state"), "state/_METADATA: No such file"),
    "no recipe": (lambda path: shutil.rmtree(path / "recipe"), "recipe/metadata: No such file"),
    "a cut recipe": (lambda path: cut(path / "recipe" / "metadata"), "are incomplete"),
    "an empty recipe": (lambda path: cut(path / "recipe" / "metadata", 0), "are incomplete"),
    "a cut tree": (lambda path: cut(path / "state" / "_METADATA"), "metadata are incomplete"),
    "another recipe": (
        lambda path: (path / "recipe" / "metadata").write_text("[]"), "are incomplete",
    ),
    "not completed": (
        lambda path: (path / "commit_success.txt").unlink(), r"commit_success\.txt is missing",
    ),
    "a link to nowhere": (
        lambda path: (shutil.rmtree(path), path.symlink_to("gone")), "No such file",
    ),
    "a file": (lambda path: (shutil.rmtree(path), path.write_text("")), "Not a directory"),
    "another model's": (
        lambda path: (path / "recipe" / "metadata").write_text(
            (path / "recipe" / "metadata").read_text().replace('"layers": 3', '"layers": 5')
        ),
        "has another state: model.layers: 3 here, 5 in the checkpoint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_checkpoint_that_cannot_be_read_does_not_block_the_one_before(name, whole, tmp_path):
    damage, reason = DAMAGE[name]
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(whole.folder / "checkpoints", folder)
    damage(folder / "8")
    recipe = recipes.describe(whole.run)
    for path in (folder, folder.parent):
        good, skipped = saved_checkpoints.readable(path, recipe)
        assert good == [folder / "6"]
        assert re.match(f"{folder / '8'} .*{reason}", skipped[0])
    damage(folder / "6")
    with pytest.raises((RecipeError, RunFailed), match=reason) as error:
        saved_checkpoints.readable(folder, recipe)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("window", ["2-4", "20-25"])
def test_a_profile_of_steps_that_a_restored_run_has_not_is_refused(window, whole, tmp_path):
    options = parse_arguments(
        ["--config", "x", "--restore", str(whole.path), "--output", str(tmp_path / "new"),
         "--profile", "jax", "--profile-steps", window]
    )  # fmt: skip
    with ExitStack() as held, pytest.raises(RecipeError, match=f"--profile-steps {window}: this"):
        prepare.prepare(whole.run, options, held)
    assert not (tmp_path / "new").exists()


def begun(run, *options):
    """The number of steps and the checkpoint that a command line begins with."""
    arguments = parse_arguments(["--config", "x", *map(str, options)])
    with ExitStack() as held:
        planned, session = prepare.prepare(run, arguments, held)
    return planned.steps, session and session.checkpoint


def killed(folder, run, *checkpoints):
    """The folder of a run that was killed while it saved."""
    (folder / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir(parents=True)
    record = {"status": "running", "recipe": recipes.describe(run), "starts": [], "resumed_at": []}
    (folder / "run.json").write_text(json.dumps(record))
    for path in checkpoints:
        shutil.copytree(path, folder / "checkpoints" / path.name)
    return folder


def test_a_run_that_was_killed_while_it_saved_for_the_first_time_begins_again(whole, tmp_path):
    folder = killed(tmp_path / "2242", whole.run)
    assert begun(whole.run, "--output", folder, "--resume") == (8, None)


def test_a_restored_run_that_resumes_no_longer_needs_what_it_was_restored_from(whole, tmp_path):
    """It has checkpoints of its own, and its number of steps is the recorded one."""
    restored_from = tmp_path / "source" / "6"
    shutil.copytree(whole.path, restored_from)
    restore = "--restore", restored_from
    seven = replace(whole.run, steps=7)
    assert begun(whole.run, "--output", tmp_path / "new", *restore) == (7, restored_from)
    early = "--output", killed(tmp_path / "early", seven), "--resume", *restore
    assert begun(whole.run, *early) == (7, restored_from)
    late = "--output", killed(tmp_path / "late", seven, whole.path), "--resume", *restore
    shutil.rmtree(restored_from)
    assert begun(whole.run, *late) == (7, tmp_path / "late" / "checkpoints" / "6")
    with pytest.raises(RecipeError, match="has no checkpoint"):
        begun(whole.run, *early)


def test_a_truncated_checkpoint_is_one_line(whole, tmp_path):
    path = tmp_path / "2"
    shutil.copytree(whole.path, path)
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    run = tiny_run(*FP8)
    with mesh_of(run), pytest.raises(RunFailed, match="cannot be restored: ") as error:
        restored(path, run)
    assert "\n" not in str(error.value)
    assert json.loads((path / "recipe" / "metadata").read_text())["model"]["layers"] == 3


def test_a_renamed_checkpoint_is_refused(whole, tmp_path):
    """Its steps would be counted from the folder, and its data and learning rate from the state."""
    shutil.copytree(whole.path, tmp_path / "2")
    run = tiny_run(*FP8)
    with mesh_of(run), pytest.raises(RunFailed) as error:
        restored(tmp_path / "2", run)
    assert str(error.value) == (
        f"{tmp_path / '2'} has the state after 6 steps, so its folder was renamed"
    )


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("UNKNOWN: Gloo AllGather failed: Connection reset by peer"), "network"),
        (RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS"), "gpu"),
        (RuntimeError("RESOURCE_EXHAUSTED: Error writing: No space left on device"), "storage"),
        (OSError(errno.EROFS, "Read-only file system"), "storage"),
    ],
)
def test_a_save_that_fails_for_want_of_a_peer_is_no_fault_of_the_disk(error, cause):
    """It waits for the step, of which another process may be lost; Orbax raises its own in turn."""
    with pytest.raises(RunFailed) as raised, checkpoint._one_line("it was not saved"):
        raise ValueError("Orbax's") from error
    assert raised.value.cause == cause
    assert str(raised.value) == f"it was not saved: {error}"


@pytest.fixture
def two_saves(tmp_path):
    """A saver of which the saves after 3 and 6 steps are complete, and the state."""
    state = {"x": jax.numpy.zeros(4)}
    checkpoints = saver(tmp_path, tiny_run(), every=3)
    for step in (3, 6):
        checkpoints.act(step, state, ending=False)
        checkpoints.wait()
    return checkpoints, state


GOOD = (
    "the checkpoint of step 9 was not saved; the last good one has step 6: [Errno 28] No space "
    "left on device"
)


def fail(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_save_that_cannot_begin_names_the_last_complete_one(two_saves, monkeypatch):
    checkpoints, state = two_saves
    monkeypatch.setattr(checkpoints._manager, "save", fail)
    with pytest.raises(RunFailed) as error:
        checkpoints.act(9, state, ending=False)
    assert str(error.value) == GOOD


def test_a_save_that_fails_while_it_is_written_names_the_last_complete_one(two_saves, monkeypatch):
    checkpoints, state = two_saves
    checkpoints.act(9, state, ending=False)
    monkeypatch.setattr(checkpoints._manager, "wait_until_finished", fail)
    with pytest.raises(RunFailed) as error:
        checkpoints.wait()
    assert str(error.value) == GOOD


def test_a_folder_is_scanned_only_when_a_save_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "steps", lambda folder: pytest.fail("it was scanned"))
    checkpoints = saver(tmp_path, tiny_run(), every=3)
    checkpoints.act(3, {"x": jax.numpy.zeros(4)}, ending=True)
