"""FP8 around a training step: weights quantized once, products given their scales, and the history
of delayed scaling.

A model says which of its weights multiply in FP8 by marking them: `Weight(value, fp8=True)`. Of
each stack of units (`models.decoder`) these are the *products*, in the order of the pytree.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.ops.fp8.operand import Operand
from jaxbench.ops.fp8.per_tensor import VALUES, inverse_scales, magnitude, quantize
from jaxbench.recipe.settings import Precision

Histories = list[jax.Array]
"""Delayed scaling: for each stack of units the largest magnitudes of past steps, `[repeats,
products, 3, history]`, newest first; the three tensors are input, weight and gradient of the
output."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Scaled:
    """What FP8 adds to a stack of units during a step. Each unit is given its slice.

    `stored` holds the weights as a pass gathers them, by the product's name; `inverse` the inverse
    scales, `[repeats, products, 3]`; `observed` zeros, `[repeats, products, 2, devices]`, of which
    each product is given its own (`Operand.observed`), None under current scaling. `stack` is the
    number of the stack.
    """

    stored: dict[str, jax.Array]
    inverse: jax.Array
    observed: jax.Array | None
    stack: int = field(metadata={"static": True})
    precision: Precision = field(metadata={"static": True})


def products(unit: nnx.Module) -> dict[str, Any]:
    """The weights of a unit, or of a stack of them, that multiply in FP8, or their shapes, by their
    path."""
    leaves = jax.tree_util.tree_leaves_with_path(unit, is_leaf=_is_variable)
    return {_name(path): w.get_value() for path, w in leaves if _is_marked(w)}


def product_name(stack: int, name: str) -> str:
    """A product's name in the whole model: `units.0.layers.0.mixer.qkv`."""
    return f"units.{stack}.{name}"


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


def _is_marked(node: object) -> bool:
    return isinstance(node, nnx.Variable) and node.get_metadata().get("fp8", False)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def init_histories(stacks: Sequence[nnx.Module], precision: Precision) -> Histories:
    """Empty histories for every product of a model; none unless FP8 has delayed scaling."""
    if precision.dtype != "fp8" or precision.scaling == "current":
        return []
    found = [list(products(stack).values()) for stack in stacks]
    return [jnp.zeros((len(ws[0]), len(ws), 3, precision.amax_history)) for ws in found]


def scale(stacks: Sequence[nnx.Module], histories: Histories, precision: Precision) -> list[Scaled]:
    """What stays the same over a step's microbatches, for each stack; nothing unless precision is
    FP8. Weights are quantized here, or, gathered in bf16, by the product."""
    if precision.dtype != "fp8":
        return []
    scaled = []
    for number, stack in enumerate(stacks):
        weights = products(stack)
        if histories:
            amax = jnp.max(histories[number], axis=-1)
        else:  # inputs and gradients are scaled where they arise
            amax = jnp.zeros((*_magnitudes(stack).shape, 3)).at[..., 1].set(_magnitudes(stack))
        inverse = inverse_scales(amax, precision.margin)
        stored = {
            name: _quantized(w, inverse[:, product, 1]) if precision.gather == "fp8" else w
            for product, (name, w) in enumerate(weights.items())
        }
        scaled.append(
            Scaled(stored=stored, inverse=inverse, observed=None, stack=number, precision=precision)
        )
    return scaled


def _quantized(w: jax.Array, inverse: jax.Array) -> jax.Array:
    """The FP8 form of stacked weights at rest, each layer by its own scale."""
    in_layers = jax.vmap(partial(quantize, dtype=VALUES))
    return mesh.accumulating(in_layers(mesh.unmarked(w), inverse))


def _magnitudes(stack: nnx.Module) -> jax.Array:
    """The largest magnitude of each weight, `[repeats, products]`."""
    each = [
        magnitude(mesh.unmarked(w), axis=tuple(range(1, w.ndim))) for w in products(stack).values()
    ]
    return jnp.stack(each, axis=1)


def unobserved(histories: Histories) -> list[jax.Array]:
    """Zeros for the magnitudes that a pass observes: `[repeats, products, 2, devices]`."""
    devices = math.prod(jax.sharding.get_abstract_mesh().shape.values())
    sharding = PartitionSpec(None, None, None, *mesh.per_device())
    return [jnp.zeros((*h.shape[:2], 2, devices), out_sharding=sharding) for h in histories]


def observing(scaled: list[Scaled], observed: list[jax.Array]) -> list[Scaled]:
    """The same with the arrays whose cotangents are the magnitudes that a pass observes."""
    if not observed:
        return scaled
    return [replace(s, observed=seen) for s, seen in zip(scaled, observed, strict=True)]


def attach(unit: nnx.Module, scaled: Scaled) -> nnx.Module:
    """One unit with an `Operand` in the place of each weight that multiplies in FP8."""
    order = list(products(unit))

    def convert(path, variable):
        if not _is_marked(variable):
            return variable
        name = _name(path)
        product = order.index(name)
        return Operand(
            kernel=variable.get_value(),
            stored=scaled.stored[name],
            inverse=scaled.inverse[product],
            observed=None if scaled.observed is None else scaled.observed[product],
            name=product_name(scaled.stack, name),
            precision=scaled.precision,
        )

    return jax.tree_util.tree_map_with_path(convert, unit, is_leaf=_is_variable)


def update(
    histories: Histories, stacks: Sequence[nnx.Module], observed: list[jax.Array]
) -> Histories:
    """The histories with this step's magnitudes: of inputs and gradients by maximum over devices,
    and of weights."""

    def push(history: jax.Array, stack: nnx.Module, seen: jax.Array) -> jax.Array:
        x, dy = jnp.moveaxis(jnp.max(seen, axis=-1), -1, 0)
        newest = jnp.stack([x, _magnitudes(stack), dy], axis=-1)
        return jnp.concatenate([newest[..., None], history[..., :-1]], axis=-1)

    if not histories:
        return []
    return [push(*each) for each in zip(histories, stacks, observed, strict=True)]
