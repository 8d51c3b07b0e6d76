"""The compilation cache on a disk that is full."""

import sys

import pytest
from commands import ROOT
from disk import needs_small_disk, run_on_disk

COMPILE = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jaxbench.run.cache import program_cache
folder = Path(sys.argv[1])
with program_cache(folder, {"recipe": "llama"}, print):
    jax.jit(lambda x: jnp.sort(jnp.tanh(x @ x), axis=0)).lower(jnp.ones((64, 64))).compile()
print(len([*folder.iterdir()]))
"""


@needs_small_disk
@pytest.mark.parametrize(("kib", "kept"), [(4, 0), (4096, 1)])
def test_part_of_a_program_is_not_kept(kib, kept, tmp_path):
    """Later starts could not read it, and JAX never overwrites it."""
    command = [sys.executable, "-c", COMPILE, tmp_path / "disk" / "cache"]
    status, out, err, _ = run_on_disk(tmp_path, kib, command, ROOT)
    assert (status, out) == (0, f"{kept}\n")
    assert ("Error writing persistent compilation cache" in err) == (not kept)
