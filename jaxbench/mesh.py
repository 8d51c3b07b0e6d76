"""The device mesh, and the only place that maps logical dimensions to its axes.

All axes are Explicit: shardings are part of the types, and nothing is resharded except here. Two
terms of JAX's type system are used throughout (docs.jax.dev, "Autodiff and sharding"):

- An array *unreduced* over an axis is the sum of what the ranks of that axis hold.
- An array *reduced* over an axis is a copy on each of its ranks, and its cotangent is unreduced.
  Gradients are then summed where the program says, and nowhere else.

The same layers also run *inside* a `shard_map` over all axes (`train.pipeline`), on local arrays.
There types name no axis: every `spec` is empty, every reshard is the identity, and
`on_each_device(f)` is `f`. Weights are already gathered (the table and experts stay split, as they
are used), and a gradient is the contribution of this device. Collectives that types would otherwise
imply are written out, in the functions with `seq` in their names.
"""

import math
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxbench.base.hardware import Capability, identify
from jaxbench.recipe.settings import AXES

BATCH = ("data", "fsdp", "expert")
"""Axes whose ranks hold different sequences of a microbatch."""

CONTEXT, TENSOR = "context", "tensor"
"""The axis that splits sequences, and the axis that splits heads, features and vocabulary."""

PIPELINE = "pipeline"
"""The axis whose ranks compute different layers. At rest weights are sharded over it as over
`fsdp`. Outside the layers its ranks embed different microbatches, and compute their losses."""

SEQUENCES = (*BATCH, PIPELINE)
"""Axes whose ranks hold different sequences in the embedding and in the loss."""

REPLICAS = ("data",)
"""Axes whose ranks hold copies of all weights."""

AT_REST = ("fsdp", "expert", CONTEXT, PIPELINE)
"""Axes over which a weight is sharded at rest, and gathered for use (ZeRO stage 3; Rajbhandari et
al. 2020)."""

EXPERTS = ("expert", TENSOR)
"""Axes whose ranks hold different experts. Tensor ranks hold whole experts instead of slices, so
every token is sent once, and no matmul is split."""

EXPERT_AT_REST = ("fsdp", CONTEXT, PIPELINE)
"""Axes of `AT_REST` that are not in `EXPERTS`. They split experts at rest, or the weights of each
expert."""

WEIGHT = {
    "embed": AT_REST,
    "kv_heads": TENSOR,
    "heads": TENSOR,
    "groups": TENSOR,
    "ffn": TENSOR,
    "vocab": TENSOR,
    "group": None,
    "part": None,
    "head_dim": None,
    "inner": None,
    "whole_experts": (*EXPERTS, *EXPERT_AT_REST),
    "whole_expert_embed": None,
    "experts": EXPERTS,
    "expert_embed": EXPERT_AT_REST,
    "expert_ffn": None,
    "router_embed": None,
    "router": None,
    "latent": None,
    "from_latent": EXPERT_AT_REST,
}
"""Weights of matmuls. A gather along their first dimension needs no transposed copy. This dimension
is `embed`, the narrow `from_latent`, or `whole_experts` if every rank holds whole experts at rest.
Otherwise ranks hold slices of their `experts` (`expert_dims`)."""

TABLE_EMBED = ("fsdp", "expert", PIPELINE, CONTEXT, TENSOR)
TABLE = {"vocab": None, "position": None, "embed": TABLE_EMBED}
"""The tables of embedding and positions, looked up without a gather (`models.layers.look_up`)."""

VECTOR = {
    "embed": None, "latent": None, "kv_heads": TENSOR, "group": None,
    "head_dim": None, "groups": TENSOR, "inner": None, "taps": None, "experts": EXPERTS,
    "part": None, "expert_ffn": None, "router": None, "ffn": TENSOR,
}  # fmt: skip
"""Norm gains, biases that start at zero, and parameters of a Mamba-2 group per head and channel.
They are stored as they are used: they are small, and gathering them would cost the latency of a
collective in every layer."""

ACTIVATION = {
    "batch": BATCH,
    "seq": CONTEXT,
    "shard_seq": (CONTEXT, TENSOR),
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "groups": TENSOR,
    "ffn": TENSOR,
    "embed": None,
    "latent": None,
    "group": None,
    "part": None,
    "head_dim": None,
    "inner": None,
    "microbatch": PIPELINE,
    "experts": EXPERTS,
    "capacity": ("data", "fsdp", CONTEXT),
    "expert_ffn": None,
    "assignment": None,
    "slots": (*BATCH, CONTEXT, TENSOR),
}
"""Activations. `shard_seq` is the sequence outside tensor-parallel regions: norms and residuals
work on 1/tensor of the tokens (sequence parallelism; Korthikanti et al. 2022). `slots` are the
slots for tokens that each rank fills for all experts, and `capacity` the slots of one expert."""


def spec(dims: str, rules: dict, **marks: set[str]) -> PartitionSpec:
    """The partition of an array with logical dimensions, such as `"embed ffn"`, under one of the
    tables above.

    `marks` are the axes over which it is `reduced` or `unreduced`. Raises KeyError for a dimension
    that the table does not have.
    """
    return _spec([rules[dim] for dim in dims.split()], **marks)


def _spec(entries: Iterable, **marks: set[str]) -> PartitionSpec:
    def named(axes: Collection[str]) -> tuple[str, ...]:
        return () if manual() else used(*axes)

    split = [named(_as_axes(entry)) or None for entry in entries]
    return PartitionSpec(*split, **{mark: frozenset(named(axes)) for mark, axes in marks.items()})


def _as_axes(entry: str | Collection[str] | None) -> Collection[str]:
    return (entry,) if isinstance(entry, str) else entry or ()


def _among(axes: Collection[str], entry: str | Collection[str] | None) -> tuple[str, ...]:
    """The axes of an entry of a partition that are among `axes`."""
    return tuple(axis for axis in _as_axes(entry) if axis in axes)


def expert_dims(count: int) -> str:
    """The first two logical dimensions, experts and embed, of the weights of `count` experts. They
    are whole at rest if the ranks divide them, except in a pipeline, which gathers its weights once
    per step and expects slices."""
    sizes = jax.sharding.get_abstract_mesh().shape
    ranks = math.prod(sizes[axis] for axis in (*EXPERTS, *EXPERT_AT_REST))
    whole = count % ranks == 0 and not used(PIPELINE)
    return "whole_experts whole_expert_embed" if whole else "experts expert_embed"


def manual() -> bool:
    """True inside a `shard_map` over all axes, where arrays are local to a device."""
    return jax.sharding.get_abstract_mesh().are_all_axes_manual


def on_each_device(local: Callable, out_specs: Any, **options: Any) -> Callable:
    """`jax.shard_map` of `local` over all axes, or `local` itself if arrays are local already."""
    return local if manual() else jax.shard_map(local, out_specs=out_specs, **options)


def make_mesh(shape: tuple[int, ...], devices=None) -> Mesh:
    """The mesh with axes `AXES` of these sizes, over all devices of the job, or over `devices` in
    their order."""
    kinds = (AxisType.Explicit,) * len(AXES)
    if devices is None:
        return jax.make_mesh(shape, AXES, axis_types=kinds)
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=kinds)


def platform() -> str:
    """Platform of the current mesh: `gpu`, `cpu`, or `none` if it has no devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else "none"


def capability() -> Capability | None:
    """Compute capability of the GPUs of the current mesh. None for other devices, and for absent
    GPUs that are not known."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.platform != "gpu":
        return None
    if gpu := identify(device.device_kind):
        return gpu.capability
    # An abstract device does not say; those of this process are of one kind.
    here = (d for d in jax.local_devices() if d.device_kind == device.device_kind)
    version = next((d.compute_capability for d in here), None)
    if version is None:
        return None
    major, minor = map(int, version.split("."))
    return major, minor


def used(*axes: str) -> tuple[str, ...]:
    """The axes with more than one rank. Types and collectives name only these."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(axis for axis in axes if sizes[axis] > 1)


def partition(x: Any) -> tuple:
    """The partition of an array, a tracer or a type, with one entry per dimension."""
    return jax.typeof(x).sharding.spec.partitions


def spec_of(x: Any) -> PartitionSpec:
    """The partition of an array, a tracer or a type, without its marks."""
    return PartitionSpec(*partition(x))


def axes(dim: str) -> tuple[str, ...]:
    """The axes with more than one rank over which a logical dimension of an activation is split."""
    return used(*_as_axes(ACTIVATION[dim]))


def ranks(dim: str) -> int:
    """Number of ranks over which a logical dimension of an activation is split."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[axis] for axis in axes(dim))


def gather_seq(x: jax.Array) -> jax.Array:
    """Enters a tensor-parallel region: `"batch shard_seq embed"` to `"batch seq embed"`, a copy on
    each tensor rank."""
    if manual():
        return jax.lax.all_gather(x, TENSOR, axis=1, tiled=True) if used(TENSOR) else x
    return jax.sharding.reshard(x, spec("batch seq embed", ACTIVATION, reduced={TENSOR}))


def scatter_seq(y: jax.Array) -> jax.Array:
    """Leaves a tensor-parallel region: the sum over tensor ranks of `"batch seq embed"` as `"batch
    shard_seq embed"`."""
    if manual():
        options = {"scatter_dimension": 1, "tiled": True}
        return jax.lax.psum_scatter(y, TENSOR, **options) if used(TENSOR) else y
    y = jax.sharding.reshard(y, spec("batch shard_seq embed", ACTIVATION))
    return pinned(y) if used(TENSOR) else y


def max_over_tensor(x: jax.Array) -> jax.Array:
    """The maximum over tensor ranks, inside a `shard_map`."""
    return jax.lax.pmax(x, TENSOR) if used(TENSOR) else x


def pinned(x: jax.Array) -> jax.Array:
    """The identity, as a `shard_map` that fixes the partition of `x` and of its cotangent to the
    one in its type. Without it Shardy may propagate another partition from neighbouring operations:
    it then refuses a matmul whose result is unreduced, or takes a rank's part from a copy that it
    gathered."""
    return on_each_device(lambda x: x, spec_of(x))(x)


def sum_seq(x: jax.Array, axis: int | tuple[int, ...] = 1) -> jax.Array:
    """The sum of `"batch shard_seq .."` over the dimensions `axis`, over the whole sequence."""
    total = jnp.sum(x, axis)
    return jax.lax.psum(total, along) if (along := _hidden_seq()) else total


def next_in_seq(x: jax.Array, last: int) -> jax.Array:
    """Elements of `"batch seq"` shifted by one: each becomes the next one, and the last becomes
    `last`."""
    ranks = jax.sharding.get_abstract_mesh().shape[CONTEXT]
    to_rank_before = [(i + 1, i) for i in range(ranks - 1)]

    def local(x):
        first = jax.lax.ppermute(x[:, :1], CONTEXT, to_rank_before)
        at_end = jax.lax.axis_index(CONTEXT) == ranks - 1
        return jnp.concatenate([x[:, 1:], jnp.where(at_end, last, first)], axis=1)

    return on_each_device(local, spec_of(x), check_vma=False)(x)


def whole_seq(length: int) -> int:
    """Length of a whole sequence, given the length of a local `"shard_seq"`."""
    return length * jax.lax.axis_size(along) if (along := _hidden_seq()) else length


def indices(dim: str, count: int) -> jax.Array:
    """The global indices of the `count` elements that a device holds along a logical dimension of
    an activation; inside a `shard_map`."""
    first = count * jax.lax.axis_index(split) if (split := axes(dim)) else 0
    return first + jnp.arange(count)


def _hidden_seq() -> tuple[str, ...]:
    """Axes over which sequences are split inside a `shard_map`, where types do not name them."""
    return axes("shard_seq") if manual() else ()


def accumulating(w: jax.Array) -> jax.Array:
    """A weight at rest, marked so that its gradient stays unreduced over the axes that replicate
    it.

    Microbatches and layers then add up local gradients, and a single sum at the end of the step
    crosses those axes.
    """
    sharded = {axis for entry in partition(w) for axis in _as_axes(entry)}
    return jax.sharding.reshard(w, _spec(partition(w), reduced=set(AXES) - sharded))


def unmarked(w: jax.Array) -> jax.Array:
    """An `accumulating` weight without its mark, for use outside differentiation."""
    return jax.sharding.reshard(w, spec_of(w))


Gathered = list[tuple[int, tuple[str, ...]]]
"""The dimensions of a weight that are gathered for use, each with its axes."""


def gathered_dims(w: Any, experts: int | None = None) -> Gathered:
    """The dimensions over which a weight at rest, or its type, is gathered for use. The dimension
    of index `experts` stays split over `EXPERTS`, since each rank uses its local experts."""
    split = [
        _among(EXPERT_AT_REST if dim == experts else AT_REST, entry)
        for dim, entry in enumerate(partition(w))
    ]
    return [(dim, axes) for dim, axes in enumerate(split) if axes]


MOVABLE = {"is_pipelineable": "true"}
"""Marks a collective that XLA may move into a neighbouring iteration of a scan (`xla.flags`)."""


def gather(w: jax.Array, dims: Gathered, **to: str) -> jax.Array:
    """A weight gathered from its parts, inside a `shard_map`. XLA may gather a scanned weight one
    iteration early, and scatter its gradient one iteration late."""
    with set_xla_metadata(**MOVABLE):
        for dim, axes in dims:
            w = jax.lax.all_gather(w, axes, axis=dim, tiled=True, **to)
    return w


def scatter(grad: jax.Array, dims: Gathered) -> jax.Array:
    """A gradient reduce-scattered over the ranks that gathered its weight, inside a `shard_map`."""
    with set_xla_metadata(**MOVABLE):
        for dim, axes in dims:
            grad = jax.lax.psum_scatter(grad, axes, scatter_dimension=dim, tiled=True)
    return grad


def varying(vector: jax.Array, split: Collection[str] = (TENSOR,)) -> jax.Array:
    """A local array inside a `shard_map`, cast to varying over all axes except `split`, which may
    shard it. Its gradient is then not summed over those axes."""
    return jax.lax.pcast(vector, used(*(axis for axis in AXES if axis not in split)), to="varying")


def as_head(table: jax.Array) -> jax.Array:
    """The transposed embedding table, which is `accumulating`, resharded as the weight of a head,
    `"embed vocab"`."""
    reduced = set(jax.typeof(table).sharding.spec.reduced)
    return jax.sharding.reshard(table, spec("embed vocab", WEIGHT, reduced=reduced))


def gather_weight(w: jax.Array, experts: int | None = None) -> jax.Array:
    """All-gathers a weight at rest for use; the transpose reduce-scatters its gradient. The
    dimension of index `experts` stays split over `EXPERTS`."""
    kept = [
        _among(EXPERTS if dim == experts else (TENSOR,), entry)
        for dim, entry in enumerate(partition(w))
    ]
    whole = _spec(kept, reduced=set(AXES).difference(*kept))
    if not (dims := gathered_dims(w, experts)):
        return jax.sharding.reshard(w, whole)
    local = partial(gather, dims=dims, to="reduced")
    return on_each_device(local, whole)(accumulating(w))


def sums_over_tensor(x: jax.Array, dims: str, kept: str) -> bool:
    """True if a sum over the dimensions of `x` that are not `kept` crosses tensor ranks. `dims` and
    `kept` have one letter per dimension."""
    return any(
        TENSOR in _as_axes(entry)
        for dim, entry in zip(dims, partition(x), strict=True)
        if dim not in kept
    )


def cotangent_spec(x: jax.Array) -> PartitionSpec:
    """The partition of a cotangent of `x`, which is unreduced over the axes over which `x` is
    reduced."""
    return PartitionSpec(*partition(x), unreduced=jax.typeof(x).sharding.spec.reduced)


def as_factor(factor: jax.Array, x: jax.Array) -> jax.Array:
    """A scalar, marked so that it can multiply `x`, whose gradient may be unreduced: then every
    rank scales its own part."""
    marks = PartitionSpec(reduced=jax.typeof(x).sharding.spec.unreduced)
    return jax.sharding.reshard(factor, marks)


def per_device() -> PartitionSpec:
    """The partition of a vector with one entry for each device."""
    return _spec([AXES])


def zero_gradient(w: jax.Array, dtype) -> jax.Array:
    """Zeros to which gradients of an `accumulating` weight can be added."""
    zeros = jnp.zeros(w.shape, dtype, out_sharding=spec_of(w))
    return jax.sharding.reshard(zeros, cotangent_spec(w))


def sum_replicas(grad: jax.Array, w: jax.Array) -> jax.Array:
    """The gradient of an `accumulating` weight summed over the axes that replicate it, and sharded
    like the weight."""
    return jax.sharding.reshard(grad, jax.typeof(w).sharding.spec)
