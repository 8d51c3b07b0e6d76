"""The null driver itself: devices, copies, and collectives whose data are real."""

import json

import null_gpus
import pytest
from cases import tiered

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(null_gpus.missing() is not None, reason=str(null_gpus.missing())),
]

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
if len(sys.argv) > 1:
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
n = jax.device_count()
mesh = jax.make_mesh((n,), ("x",))
jax.set_mesh(mesh)
whole = np.arange(8.0 * n * n, dtype=np.float32)
values = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P("x")), lambda i: whole[i])

def collective(function, out_specs):
    return jax.jit(jax.shard_map(function, in_specs=P("x"), out_specs=out_specs, check_vma=False))

def local(array):
    return [shard.data.tolist() for shard in array.addressable_shards]

print(json.dumps({
    "devices": [device.device_kind for device in jax.devices()],
    "copied": local(values),
    "gathered": local(collective(lambda v: jax.lax.all_gather(v, "x", tiled=True), P())(values)),
    "exchanged": local(collective(
        lambda v: jax.lax.all_to_all(v, "x", 0, 0, tiled=True), P("x"))(values)),
    "sent": local(collective(
        lambda v: jax.lax.ppermute(v, "x", [(i, (i + 1) % n) for i in range(n)]), P("x"))(values)),
    "scattered": local(collective(
        lambda v: jax.lax.psum_scatter(v, "x", tiled=True), P("x"))(values)),
    "sum": local(values + 1),
}))
"""


def expected(n):
    """What each of n devices holds after each operation, by name."""
    width = 8 * n
    parts = [[float(v) for v in range(width * d, width * (d + 1))] for d in range(n)]
    pieces = [[part[8 * k : 8 * (k + 1)] for k in range(n)] for part in parts]
    return {
        "copied": parts,
        "gathered": [[v for part in parts for v in part]] * n,
        "exchanged": [[v for part in pieces for v in part[d]] for d in range(n)],
        "sent": [parts[(d - 1) % n] for d in range(n)],
        "scattered": [
            [sum(vs) for vs in zip(*(p[d] for p in pieces), strict=True)] for d in range(n)
        ],
    }  # fmt: skip


def result(command):
    assert command.status == 0, command.text
    return json.loads(command.out)


@pytest.mark.parametrize("gpus", tiered([], [2, 8, 16], slow=[8]))
def test_collectives_of_one_process(gpus, tmp_path):
    variables = null_gpus.environment(gpus, counts=tmp_path)
    made = result(null_gpus.start(folder=tmp_path, program=("-c", PROGRAM), **variables).wait())
    assert made.pop("devices") == ["NVIDIA H100 80GB HBM3 (null)"] * gpus
    assert made.pop("sum") != [[v + 1 for v in part] for part in made["copied"]]  # not computed
    assert made == expected(gpus)
    (counts,) = tmp_path.glob("*.txt")
    assert f"{gpus} ncclAllGather\n" in counts.read_text()


def test_collectives_of_two_processes(tmp_path):
    commands = null_gpus.start_two(
        folder=tmp_path, program=("-c", PROGRAM), **null_gpus.environment(2)
    )
    made = [result(command) for command in [command.wait() for command in commands]]
    for name, values in expected(4).items():
        assert made[0][name] + made[1][name] == values, name


def test_visible_devices_are_counted(tmp_path):
    variables = null_gpus.environment(8, model="h100,h200,b200") | {"CUDA_VISIBLE_DEVICES": "1,4,5"}
    program = "import jax, json; print(json.dumps([d.device_kind for d in jax.devices()]))"
    names = result(null_gpus.start(folder=tmp_path, program=("-c", program), **variables).wait())
    assert names == [*["NVIDIA H200 (null)"] * 2, "NVIDIA B200 (null)"]


POOLS = """
import json, jax, jax.numpy as jnp
def place():
    return jax.block_until_ready(jnp.zeros(2**33, jnp.uint8)).unsafe_buffer_pointer()
places = {place() for _ in range(20)}  # 160 GiB, each freed before the next
try:
    kept = [jax.block_until_ready(jnp.ones(2**33, jnp.uint8)) for _ in range(20)]
except jax.errors.JaxRuntimeError as error:
    print(str(error).split(":")[0])
lines = open("/proc/self/status").read().splitlines()
print(json.dumps({
    "places": len(places),
    "peak": jax.local_devices()[0].memory_stats()["peak_bytes_in_use"],
    "host": next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10,
}))
"""


def test_pools_take_no_memory_of_the_host(tmp_path):
    """XLA's own allocator takes 1/32 of a GPU's memory, here 4.5 GiB."""
    variables = null_gpus.environment(2, memory_mb=100 << 10)
    variables |= {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}
    command = null_gpus.start(folder=tmp_path, program=("-c", POOLS), **variables).wait()
    assert command.status == 0, command.text
    error, line = command.out.splitlines()[-2:]
    assert error == "RESOURCE_EXHAUSTED"
    found = json.loads(line)
    assert found["places"] == 1
    assert found["peak"] >> 33 == 12  # arrays, in 100 GiB
    assert found["host"] < 2 << 30


def test_a_long_sort_runs(tmp_path):
    """CUB sorts arrays of more than 16384, and asks the runtime for a kernel's version first."""
    program = ("-c", "import jax.numpy as jnp; print(jnp.sort(jnp.arange(65536)).shape)")
    command = null_gpus.start(folder=tmp_path, program=program, **null_gpus.environment(1)).wait()
    assert command.status == 0, command.text
    assert command.out.endswith("(65536,)\n")
