"""Quantization in a training step: weights quantized once per step, scales of the matmuls, and amax
histories.

The *quantized weights* of a block, or of a stack of blocks (`models.decoder`), are those with the
metadata `Weight(value, quantized=True)`, in the order of the pytree. Their matmuls run in FP8 or in
a block-scaled format.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.ops import draws
from jaxbench.ops.dense import is_variable
from jaxbench.ops.draws import FIRST, Counters
from jaxbench.ops.implementations import lazy
from jaxbench.ops.quantized.operand import Operand
from jaxbench.ops.quantized.per_tensor import VALUES, amax_of, quantize, scale_invs_of
from jaxbench.recipe.settings import Precision

Histories = list[jax.Array]
"""The amax of past steps, for delayed scaling. For each stack of blocks it is `[blocks, weights,
3, history]`, newest first. The three tensors are input, weight and output gradient."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Scaled:
    """The quantized weights of a stack of blocks during a step, with their scales. It is sliced per
    block.

    `stored` maps the name of a weight to what is gathered. In FP8 `scale_inv` is `[blocks, weights,
    3]`, and `observed` is zeros `[blocks, weights, 2, devices]`, or None under current scaling.
    `seeds` are the seeds of stochastic rounding, `[blocks, weights]` (`Operand`). `stack` is the
    index of the stack.
    """

    stored: dict[str, Any]
    scale_inv: Any
    observed: Any
    seeds: Any
    stack: int = field(metadata={"static": True})
    precision: Precision = field(metadata={"static": True})


def quantized_weights(block: nnx.Module) -> dict[str, nnx.Variable]:
    """The quantized weights of a block, or of stacked blocks, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(block, is_leaf=is_variable)
    return {_name(path): w for path, w in leaves if _is_quantized(w)}


def is_of_experts(weight: nnx.Variable) -> bool:
    """True for a weight whose first dimension counts experts."""
    return bool(weight.get_metadata().get("experts"))


def name_in_model(stack: int, name: str) -> str:
    """The name of a weight in the whole model: `stacks.0.layers.0.mixer.qkv`."""
    return f"stacks.{stack}.{name}"


def _is_quantized(node: object) -> bool:
    return isinstance(node, nnx.Variable) and node.get_metadata().get("quantized", False)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def in_bf16(name: str, precision: Precision) -> bool:
    """True if the recipe keeps the matmul of this weight in bf16."""
    return name.rpartition(".")[2] in precision.in_bf16


def init_histories(stacks: Sequence[nnx.Module], precision: Precision) -> Histories:
    """Zero histories of all quantized weights. Only FP8 with delayed scaling has any."""
    if precision.dtype != "fp8" or precision.scaling == "current":
        return []
    weights = [list(quantized_weights(stack).values()) for stack in stacks]
    return [jnp.zeros((ws[0].shape[0], len(ws), 3, precision.amax_history)) for ws in weights]


@dataclass(frozen=True)
class Quantization:
    """The quantization of one training step, with the weights and histories that it begins with:
    `quantized` has an entry for each stack. All of it is empty in a run that quantizes nothing."""

    stacks: Sequence[nnx.Module]
    histories: Histories
    quantized: list[Scaled]

    @classmethod
    def of(
        cls, stacks: Sequence[nnx.Module], histories: Histories, precision: Precision, seed: int = 0
    ) -> "Quantization":
        """Quantizes the weights once, for all microbatches, except where they are gathered in bf16;
        the matmul quantizes those."""
        if not precision.quantized:
            return cls([], [], [])
        quantized = []
        for number, stack in enumerate(stacks):
            history = histories[number] if histories else None
            quantized.append(_quantize(stack, number, history, precision, seed))
        return cls(stacks, histories, quantized)

    @property
    def probes(self) -> list[jax.Array]:
        """Zeros `[blocks, weights, 2, devices]`, which add nothing. Their cotangents are the amax
        that the matmuls observe. Only delayed scaling has any."""
        devices = math.prod(jax.sharding.get_abstract_mesh().shape.values())
        sharding = PartitionSpec(None, None, None, *mesh.per_device())
        return [
            jnp.zeros((*h.shape[:2], 2, devices), out_sharding=sharding) for h in self.histories
        ]

    def scaled(self, probes: list[jax.Array]) -> list[Scaled]:
        """What the layers need, with the `probes` by which we differentiate."""
        if not probes:
            return self.quantized
        return [replace(s, observed=probe) for s, probe in zip(self.quantized, probes, strict=True)]

    def next_histories(self, observed: list[jax.Array]) -> Histories:
        """The histories with this step's amax added. For inputs and gradients it is the maximum of
        the observed amax over devices; the amax of weights is computed here."""

        def push(history: jax.Array, stack: nnx.Module, amax: jax.Array) -> jax.Array:
            x, dy = jnp.moveaxis(jnp.max(amax, axis=-1), -1, 0)
            newest = jnp.stack([x, _weight_amax(stack), dy], axis=-1)
            return jnp.concatenate([newest[..., None], history[..., :-1]], axis=-1)

        if not self.histories:
            return []
        return [push(*args) for args in zip(self.histories, self.stacks, observed, strict=True)]


def _quantize(
    stack: nnx.Module, number: int, history: jax.Array | None, precision: Precision, seed: int
) -> Scaled:
    """The `Scaled` of the stack of index `number`."""
    in_fp8 = precision.dtype == "fp8"
    amax = _amax(stack, history) if in_fp8 else _weight_amax(stack)
    scale_inv: Any = scale_invs_of(amax) if in_fp8 else None
    stored: dict[str, Any] = {}
    for n, (name, variable) in enumerate(quantized_weights(stack).items()):
        if in_bf16(name, precision):
            continue
        w = variable[...]
        if not in_fp8:
            stored[name] = _quantize_stack(w, amax[:, n], precision, is_of_experts(variable))
        elif precision.gather == "fp8":
            stored[name] = _quantized(w, scale_inv[:, n, 1])
        else:
            stored[name] = mesh.accumulating(w)
    seeds = _seeds(stack, seed, number) if precision.draws else None
    return Scaled(
        stored=stored, scale_inv=scale_inv, observed=None, seeds=seeds, stack=number,
        precision=precision,
    )  # fmt: skip


def _amax(stack: nnx.Module, history: jax.Array | None) -> jax.Array:
    """The amax from which the scales of FP8 follow, `[blocks, weights, 3]`. Under current scaling,
    which has no history, the matmul itself scales inputs and gradients."""
    if history is not None:
        return jnp.max(history, axis=-1)
    of_weights = _weight_amax(stack)
    return jnp.zeros((*of_weights.shape, 3)).at[..., 1].set(of_weights)


_quantize_stack = lazy("quantized.block_scaled.quantize_stack")


def _seeds(stack: nnx.Module, seed: int, number: int) -> jax.Array:
    """Seeds of stochastic rounding, `[blocks, weights]`. No two weights share a seed."""
    weights = list(quantized_weights(stack).values())
    blocks, count = jnp.arange(weights[0].shape[0]), jnp.arange(len(weights))
    return draws.fold(jnp.uint32(seed), number, blocks[:, None], count)


def _quantized(w: jax.Array, scale_inv: jax.Array) -> jax.Array:
    """Stacked weights at rest in FP8, with one scale per block."""
    in_layers = jax.vmap(partial(quantize, dtype=VALUES))
    return mesh.accumulating(in_layers(mesh.unmarked(w), scale_inv))


def _weight_amax(stack: nnx.Module) -> jax.Array:
    """The amax of every quantized weight, `[blocks, weights]`."""
    amax = [
        amax_of(mesh.unmarked(w[...]), axis=tuple(range(1, w.ndim)))
        for w in quantized_weights(stack).values()
    ]
    return jnp.stack(amax, axis=1)


def attach(
    block: Any, scaled: Scaled, counters: Counters = FIRST, bf16: Collection[int] = ()
) -> Any:
    """One block in which each weight with a quantized matmul is replaced by an `Operand`. The
    layers in `bf16` stay as they are."""
    order, seeds = list(quantized_weights(block)), scaled.seeds
    if seeds is not None:
        seeds = draws.fold(seeds, counters.sequence, counters.depth)

    def convert(path, variable):
        name = _name(path)
        if not _is_quantized(variable) or in_bf16(name, scaled.precision):
            return variable
        index = order.index(name)
        return Operand(
            weight=mesh.accumulating(variable.get_value()),
            stored=scaled.stored[name],
            scale_inv=None if scaled.scale_inv is None else scaled.scale_inv[index],
            observed=None if scaled.observed is None else scaled.observed[index],
            seed=None if seeds is None else seeds[index],
            name=name_in_model(scaled.stack, name),
            precision=scaled.precision,
        )

    attached = jax.tree_util.tree_map_with_path(convert, block, is_leaf=is_variable)
    for position in bf16:
        attached.layers[position] = block.layers[position]
    return attached
