"""`train --tune-kernels` on null GPUs: which kernels are timed, and that all processes use the same
sizes, now and at the next start. Which candidate wins is chance here."""

import json

import null_gpus
import pytest
from cases import tiered

COMMON = (
    "model.embed=128", "model.vocabulary=128", "batch.sequence_length=128", "batch.global_batch=4",
    "model.attention={heads: 4, kv_heads: 4, head_dim: 32}", "batch.microbatch=1",
    "execution.xla_flags=tuned",
)  # fmt: skip
ROWS = {
    "qwen3_30b_a3b_bf16": (
        "model.layers=1", "model.experts={count: 4, top_k: 2, ffn: 64, slots: shared}",
        "parallelism.expert=2", "parallelism.fsdp=1",
    ),
    "nemotronh_56b_bf16": (
        "model.layers=3", "model.pattern=M*-", "model.mlp.ffn=128", "parallelism.fsdp=2",
        "model.mamba={heads: 4, head_dim: 32, state: 32, groups: 2}", "execution.remat=residual",
    ),
}  # fmt: skip
"""Overrides of rows, for two devices. Grouped kernels are for shared slots only."""

KERNELS = {
    "qwen3_30b_a3b_bf16": {
        f"grouped.pallas.{kernel}" for kernel in ("to_permuted", "from_permuted", "weights")
    },
    "nemotronh_56b_bf16": {"ssd.pallas.scan.forward"} | {
        f"ssd.pallas.gradients.{kernel}"
        for kernel in ("reverse", "gradient_of_x", "gradient_of_c", "gradient_of_b")
    },
}  # fmt: skip
"""The kernels of these rows that have candidates."""

PROGRAM = """
import json, sys
from pathlib import Path
import jax
from jaxbench import mesh
from jaxbench.base.hardware import PLANNED
from jaxbench.recipe import derived_rows, recipes
from jaxbench.run import tune
from jaxbench.train import kernel_timing

name, settings, folder, address, rank = sys.argv[1:]
jax.distributed.initialize(address, 2, int(rank))
overrides = recipes.parse_overrides(settings.split("|"))
recipe = derived_rows.extend(recipes.load(name), 2, PLANNED["h100"], overrides)
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


def tuned(recipe, tmp_path):
    """What two processes chose, and what the first one said."""
    commands = null_gpus.start_two(
        recipe, "|".join((*COMMON, *ROWS[recipe])), tmp_path / "cache",
        folder=tmp_path, program=("-c", PROGRAM), **null_gpus.environment(1),
    )  # fmt: skip
    for command in commands:
        assert command.wait().status == 0, command.text
    known, other = (json.loads(command.out.splitlines()[-1]) for command in commands)
    assert other == known
    return known, commands[0].err


@pytest.mark.parametrize("recipe", tiered([], ROWS, slow=["qwen3_30b_a3b_bf16"]))
def test_two_processes_time_kernels_once_and_use_the_same_sizes(recipe, tmp_path):
    known, said = tuned(recipe, tmp_path)
    assert {name.partition(" ")[0] for name in known} == KERNELS[recipe]
    assert all(len(choice["seconds"]) > 1 for choice in known.values())
    assert f"timed {len(known)} kernels" in said
    again, said = tuned(recipe, tmp_path)
    assert again == known
    assert "timed 0 kernels " in said
    assert f", {len(known)} were known" in said


@pytest.mark.nightly
def test_a_run_trains_with_the_sizes_that_it_timed(tmp_path):
    settings = *COMMON, *ROWS["qwen3_30b_a3b_bf16"]
    words = [word for text in settings for word in ("--set", text)]
    words += ["--tune-kernels", "--compilation-cache", str(tmp_path / "cache")]
    command = null_gpus.start(
        "--config", "qwen3_30b_a3b_bf16", "--gpus", 2, "--steps", 3, *words,
        folder=tmp_path / "run", **null_gpus.environment(2),
    ).wait()  # fmt: skip
    assert command.status == 0, command.text
    assert command.record["kernel_sizes"]
