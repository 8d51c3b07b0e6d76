"""FP8 in a training step: weights quantized once per step, scales of products, amax histories.

Weights marked `Weight(value, fp8=True)` multiply in FP8. Those of a stack of blocks
(`models.decoder`) are its *products*, in the order of the pytree.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.ops.fp8.operand import Operand
from jaxbench.ops.fp8.per_tensor import VALUES, amax_of, quantize, scale_invs_of
from jaxbench.recipe.settings import Precision

B = TypeVar("B", bound=nnx.Module)

Histories = list[jax.Array]
"""Delayed scaling: for each stack of blocks the amax of past steps, `[blocks, products, 3,
history]`, newest first; the three tensors are input, weight and output gradient."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Scaled:
    """FP8 weights and scales of a stack of blocks during a step, sliced per block.

    `stored` maps a product's name to the weights that are gathered; `scale_inv` `[blocks, products,
    3]`; `observed` zeros `[blocks, products, 2, devices]` (`Operand.observed`), None under current
    scaling. `stack` is the index of the stack.
    """

    stored: dict[str, jax.Array]
    scale_inv: jax.Array
    observed: jax.Array | None
    stack: int = field(metadata={"static": True})
    precision: Precision = field(metadata={"static": True})


def products(block: nnx.Module) -> dict[str, Any]:
    """The weights of a block, or of stacked blocks, that multiply in FP8, by path; or their
    shapes."""
    leaves = jax.tree_util.tree_leaves_with_path(block, is_leaf=is_variable)
    return {_name(path): w.get_value() for path, w in leaves if _is_marked(w)}


def product_name(stack: int, name: str) -> str:
    """A product's name in the whole model: `stacks.0.layers.0.mixer.qkv`."""
    return f"stacks.{stack}.{name}"


def is_variable(node: object) -> bool:
    """True for a node of a model's pytree that is a variable."""
    return isinstance(node, nnx.Variable)


def _is_marked(node: object) -> bool:
    return isinstance(node, nnx.Variable) and node.get_metadata().get("fp8", False)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def init_histories(stacks: Sequence[nnx.Module], precision: Precision) -> Histories:
    """Zero histories of every product; none unless FP8 has delayed scaling."""
    if precision.dtype != "fp8" or precision.scaling == "current":
        return []
    weights = [list(products(stack).values()) for stack in stacks]
    return [jnp.zeros((len(ws[0]), len(ws), 3, precision.amax_history)) for ws in weights]


def scale(stacks: Sequence[nnx.Module], histories: Histories, precision: Precision) -> list[Scaled]:
    """`Scaled` of every stack, the same for all microbatches of a step; empty unless precision is
    FP8. Weights are quantized here, or by the product where they are gathered in bf16."""
    if precision.dtype != "fp8":
        return []
    scaled = []
    for number, stack in enumerate(stacks):
        weights = products(stack)
        if histories:
            amax = jnp.max(histories[number], axis=-1)
        else:  # current scaling: inputs and gradients are scaled in the product
            amax = jnp.zeros((*_weight_amax(stack).shape, 3)).at[..., 1].set(_weight_amax(stack))
        scale_inv = scale_invs_of(amax, precision.margin)
        stored = {
            name: _quantized(w, scale_inv[:, product, 1]) if precision.gather == "fp8" else w
            for product, (name, w) in enumerate(weights.items())
        }
        scaled.append(
            Scaled(
                stored=stored, scale_inv=scale_inv, observed=None, stack=number, precision=precision
            )
        )
    return scaled


def _quantized(w: jax.Array, scale_inv: jax.Array) -> jax.Array:
    """The FP8 form of stacked weights at rest, with one scale per block."""
    in_layers = jax.vmap(partial(quantize, dtype=VALUES))
    return mesh.accumulating(in_layers(mesh.unmarked(w), scale_inv))


def _weight_amax(stack: nnx.Module) -> jax.Array:
    """Amax of every weight, `[blocks, products]`."""
    amax = [
        amax_of(mesh.unmarked(w), axis=tuple(range(1, w.ndim))) for w in products(stack).values()
    ]
    return jnp.stack(amax, axis=1)


def zero_observed(histories: Histories) -> list[jax.Array]:
    """Zeros `[blocks, products, 2, devices]`, whose cotangents are the observed amax."""
    devices = math.prod(jax.sharding.get_abstract_mesh().shape.values())
    sharding = PartitionSpec(None, None, None, *mesh.per_device())
    return [jnp.zeros((*h.shape[:2], 2, devices), out_sharding=sharding) for h in histories]


def with_observed(scaled: list[Scaled], observed: list[jax.Array]) -> list[Scaled]:
    """`scaled` with the arrays of `zero_observed`; unchanged under current scaling."""
    if not observed:
        return scaled
    return [replace(s, observed=amax) for s, amax in zip(scaled, observed, strict=True)]


def attach(block: B, scaled: Scaled) -> B:
    """One block with an `Operand` in the place of each weight that multiplies in FP8."""
    order = list(products(block))

    def convert(path, variable):
        if not _is_marked(variable):
            return variable
        name = _name(path)
        product = order.index(name)
        return Operand(
            weight=variable.get_value(),
            stored=scaled.stored[name],
            scale_inv=scaled.scale_inv[product],
            observed=None if scaled.observed is None else scaled.observed[product],
            name=product_name(scaled.stack, name),
            precision=scaled.precision,
        )

    return jax.tree_util.tree_map_with_path(convert, block, is_leaf=is_variable)


def update(
    histories: Histories, stacks: Sequence[nnx.Module], observed: list[jax.Array]
) -> Histories:
    """The histories with this step's amax: observed ones by maximum over devices, and weights'."""

    def push(history: jax.Array, stack: nnx.Module, amax: jax.Array) -> jax.Array:
        x, dy = jnp.moveaxis(jnp.max(amax, axis=-1), -1, 0)
        newest = jnp.stack([x, _weight_amax(stack), dy], axis=-1)
        return jnp.concatenate([newest[..., None], history[..., :-1]], axis=-1)

    if not histories:
        return []
    return [push(*args) for args in zip(histories, stacks, observed, strict=True)]
