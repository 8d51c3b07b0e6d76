"""Streams of collectives, by the thunks of a program that is compiled for absent GPUs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import needs_compiler
from jax.sharding import PartitionSpec as P

from jaxbench.base.hardware import H100
from jaxbench.plan.absent import compile_only_devices
from jaxbench.xla import flags

BF16 = jnp.bfloat16


def gathers_between_products(x, y, a):
    """A gather over the network, a gather over NVLink, and a permute, next to matmuls."""
    far = jax.lax.all_gather(x, "nodes", tiled=True)
    near = jax.lax.all_gather(y, "gpus", tiled=True)
    sent = jax.lax.ppermute(x, "nodes", [(0, 1), (1, 0)])
    c = jnp.tanh(jnp.tanh(a @ a) @ a) @ a
    sums = sum(jnp.sum(part.astype(jnp.float32)) for part in (far, near, sent))
    return (c[:1] * sums.astype(BF16)).reshape(1, -1)


def streams_of_collectives(folder, **options):
    """The streams on which the asynchronous collectives of the program above run."""
    devices = np.array(compile_only_devices(H100, 16)).reshape(2, 8)
    everywhere = P(("nodes", "gpus"))
    program = jax.shard_map(
        gathers_between_products, mesh=jax.sharding.Mesh(devices, ("nodes", "gpus")),
        in_specs=(everywhere, everywhere, P()), out_specs=everywhere, check_vma=False,
    )  # fmt: skip
    sharded = jax.ShapeDtypeStruct((2**16, 1024), BF16)
    square = jax.ShapeDtypeStruct((4096, 4096), BF16)
    options |= {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    jax.jit(program).lower(sharded, sharded, square).compile(compiler_options=flags.TUNED | options)
    (thunks,) = folder.glob("*thunk_sequence.txt")
    return re.findall(r"kAsyncStart .*stream=(communication_stream\[\d+\])", thunks.read_text())


@needs_compiler
@pytest.mark.parametrize(("multi_streaming", "streams"), [(False, 1), (True, 2)])
def test_collectives_share_a_stream_unless_asked_otherwise(tmp_path, multi_streaming, streams):
    """`Walk` has one queue of collectives, and two with the option."""
    found = streams_of_collectives(tmp_path, **{flags.MULTI_STREAMING: multi_streaming})
    assert len(found) == 3
    assert len(set(found)) == streams
