"""Every implementation of a mixer against the recurrence in float64, values and all gradients; the
Pallas kernels in Pallas's interpreter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from recurrence import Case, errors

from jaxbench import ssd
from jaxbench.ssd import pallas, xla

TUNING = pallas.Tuning(chunk=32, part=16, columns=64, interpret=True)
MIXERS = {"xla": xla.mixer, "pallas": partial(pallas.mixer, tuning=TUNING)}
SEVERAL_CHUNKS = Case(2, 96, 2, ssd.Dims(4, 16, 32, eps=1e-5))
ONE_CHUNK = Case(1, 32, 8, ssd.Dims(2, 16, 256, eps=1e-5))
"""With fewer features than state, and several programs for the columns of one state."""


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(xla, "SSD_CHUNK", 32)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("case", [SEVERAL_CHUNKS, ONE_CHUNK], ids=["several", "one"])
def test_in_float32(name, case):
    # Sums of 32 to 256 products under decays: some roundings each, next to none of them alike; of
    # terms of both signs in the gradients of time steps and decays.
    found = errors(partial(MIXERS[name], case.dims, ()), case, jnp.float32)
    assert max(found.values()) < 50 * np.finfo(np.float32).eps, found


@pytest.mark.parametrize("name", MIXERS)
def test_in_bfloat16(name):
    # A rounding to bf16 is a relative error of 2^-9 / sqrt(3) = 0.0011; several go into each sum.
    found = errors(partial(MIXERS[name], SEVERAL_CHUNKS.dims, ()), SEVERAL_CHUNKS, jnp.bfloat16)
    assert max(found.values()) < 6 * 2**-9 / np.sqrt(3), found


@pytest.mark.parametrize("name", MIXERS)
def test_over_ranks_that_share_a_sequence(name):
    """Three of them, one chunk each: states pass through the one in between."""
    whole, split = PartitionSpec(), PartitionSpec(None, "context")
    mix = jax.shard_map(
        partial(MIXERS[name], SEVERAL_CHUNKS.dims, ("context",)),
        mesh=jax.make_mesh((3,), ("context",), (AxisType.Auto,), devices=jax.devices()[:3]),
        in_specs=(split, whole), out_specs=split,
        check_vma=False,  # Pallas's interpreter slices blocks with indices that do not vary
    )  # fmt: skip
    found = errors(mix, SEVERAL_CHUNKS, jnp.float32)
    assert max(found.values()) < 50 * np.finfo(np.float32).eps, found
