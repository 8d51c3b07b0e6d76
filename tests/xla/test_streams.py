"""Streams of collectives, and copies in CUDA graphs, by the thunks of programs for absent GPUs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import needs_compiler
from jax.sharding import PartitionSpec as P

from jaxbench import mesh
from jaxbench.base.hardware import H100
from jaxbench.plan.absent import compile_only_devices
from jaxbench.recipe import recipes
from jaxbench.train.program import compile_program
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
    """`Walk` has one queue of collectives, and two with the option and without split communicators,
    which XLA has by default."""
    found = streams_of_collectives(tmp_path, **{flags.MULTI_STREAMING: multi_streaming})
    assert len(found) == 3
    assert len(set(found)) == streams
    (config,) = tmp_path.glob("*.config.pbtxt")
    assert f"{flags.SPLITTING}: true" in config.read_text()


@needs_compiler
def test_a_synchronous_collective_runs_on_the_stream_of_kernels_from_jax_0_11_on(tmp_path):
    """Its stream does not make it wait for asynchronous ones (`flags.concurrent`)."""
    synchronous = {"xla_gpu_disable_async_collectives": "COLLECTIVEPERMUTE"}
    others = 2 if jax.__version_info__ >= (0, 11) else 3
    assert len(streams_of_collectives(tmp_path, **synchronous)) == others


def copies_by_place(folder, gpus, layers):
    """How many asynchronous copies of Llama 2 70B are outside and inside of command buffers, which
    become CUDA graphs."""
    changes = recipes.parse_overrides(["execution.offload=gate,up", f"model.layers={layers}"])
    run = recipes.resolve(recipes.load("llama2_70b_bf16"), gpus, devices=gpus, overrides=changes)
    dump = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape, compile_only_devices(H100, gpus))):
        compile_program(run, dump)
    # After the passes there is another file, unless no command buffer was made.
    thunks = sorted(folder.glob("*jit_step*thunk_sequence*.txt"), key=lambda path: len(path.name))
    found, indents = [0, 0], []
    for line in thunks[-1].read_text().splitlines():
        if thunk := re.match(r"( *)\d+: (k\w+)", line):
            indent = len(thunk.group(1))
            indents = [outer for outer in indents if outer < indent]
            if thunk.group(2) == "kCommandBuffer":
                indents.append(indent)
            if thunk.group(2) == "kAsyncStart" and "=computation_stream" in line:
                found[bool(indents)] += 1
    return found


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize(("gpus", "layers"), [(1, 4), (64, 8)])
def test_copies_to_the_host_are_outside_of_graphs(tmp_path, gpus, layers):
    """In a graph kernels would wait for them. Inside are only the slices of the loss's chunks."""
    outside, inside = copies_by_place(tmp_path, gpus, layers)
    assert outside > 30
    assert inside <= 4
