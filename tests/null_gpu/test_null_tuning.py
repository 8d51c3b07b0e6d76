"""`train --tune-kernels` on null GPUs: which kernels are timed, and that all processes use the same
sizes, now and at the next start. Which candidate wins is chance here."""

import json

import null_gpus
import pytest

SETTINGS = (
    "model.layers=1", "model.embed=128", "model.vocabulary=128", "batch.sequence_length=64",
    "model.attention={heads: 4, kv_heads: 4, head_dim: 32}", "batch.global_batch=4",
    "batch.microbatch=1", "model.experts={count: 4, top_k: 2, ffn: 64, slots: shared}",
    "parallelism.expert=2", "parallelism.fsdp=1", "execution.xla_flags=tuned",
)  # fmt: skip
"""Overrides of a row with experts, for two devices. Grouped kernels are for shared slots only."""

PROGRAM = """
import json, sys
from pathlib import Path
import jax
from jaxbench import mesh
from jaxbench.base.hardware import PLANNED
from jaxbench.recipe import derived_rows, recipes
from jaxbench.run import tune
from jaxbench.train import kernel_timing

settings, folder, address, rank = sys.argv[1:]
jax.distributed.initialize(address, 2, int(rank))
overrides = recipes.parse_overrides(settings.split("|"))
recipe = derived_rows.extend(recipes.load("qwen3_30b_a3b_bf16"), 2, PLANNED["h100"], overrides)
run = recipes.resolve(recipe, 2, overrides=overrides)
with jax.set_mesh(mesh.make_mesh(run.mesh_shape)):
    with_sizes, known = tune.tune(run, Path(folder), {}, lambda text: print(text, file=sys.stderr))
    with with_sizes:
        assert kernel_timing.cases(run).keys() == known.keys()
print(json.dumps(known))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(null_gpus.missing() is not None, reason=str(null_gpus.missing())),
]


def tuned(tmp_path):
    """What two processes chose, and what the first one said."""
    commands = null_gpus.start_two(
        "|".join(SETTINGS), tmp_path / "cache", folder=tmp_path, program=("-c", PROGRAM),
        **null_gpus.environment(1),
    )  # fmt: skip
    for command in commands:
        assert command.wait().status == 0, command.text
    known, other = (json.loads(command.out.splitlines()[-1]) for command in commands)
    assert other == known
    return known, commands[0].err


def test_two_processes_time_kernels_once_and_use_the_same_sizes(tmp_path):
    known, said = tuned(tmp_path)
    kinds = {name.partition(" ")[0] for name in known}
    assert kinds == {f"grouped.pallas.{k}" for k in ("to_permuted", "from_permuted", "weights")}
    assert all(len(choice["seconds"]) > 1 for choice in known.values())
    assert f"timed {len(known)} kernels" in said
    again, said = tuned(tmp_path)
    assert again == known
    assert "timed 0 kernels " in said
    assert f", {len(known)} were known" in said


@pytest.mark.nightly
def test_a_run_trains_with_the_sizes_that_it_timed(tmp_path):
    words = [word for text in SETTINGS for word in ("--set", text)]
    words += ["--tune-kernels", "--compilation-cache", str(tmp_path / "cache")]
    command = null_gpus.start(
        "--config", "qwen3_30b_a3b_bf16", "--gpus", 2, "--steps", 3, *words,
        folder=tmp_path / "run", **null_gpus.environment(2),
    ).wait()  # fmt: skip
    assert command.status == 0, command.text
    assert command.record["kernel_sizes"]
