"""Operands of FP8 products, and the names of products in the compiled program."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.ops.contract import contract, einsum_dims
from jaxbench.ops.quantized.per_tensor import VALUES, quantize
from jaxbench.recipe.settings import Precision

QUANTIZED = "quantized."
"""Beginning of the scope of a product and of what makes its operands (`xla.timeline` reads it)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Operand:
    """A weight whose product runs in a quantized format; it replaces the weight in its layer.

    `weight` is in bf16 at rest and receives the gradient. `stored` is what is gathered: in FP8 the
    quantized array, or `weight` itself; in block-scaled formats `block_scaled.Copies`.
    In FP8 `scale_inv` `[3]` are the inverse scales of input, weight and output gradient, of which
    current scaling uses the second only; `observed` is zeros `[2, devices]` whose cotangent is the
    amax of input and gradient on each device, None under current scaling. `seed` is that of
    stochastic rounding. Other formats have None.
    """

    weight: jax.Array
    stored: Any
    scale_inv: jax.Array | None
    observed: jax.Array | None
    seed: jax.Array | None
    name: str = field(metadata={"static": True})
    precision: Precision = field(metadata={"static": True})


@dataclass(frozen=True)
class Product:
    """Static description of a product for its forward and backward pass: einsum, partitions of the
    result and of the input's gradient, name, and margin of the scales in powers of two."""

    equation: str
    y_spec: PartitionSpec
    dx_spec: PartitionSpec
    name: str
    margin: int

    @property
    def dims(self) -> tuple[str, str, str]:
        """Dimensions of input, weight and result."""
        return einsum_dims(self.equation)

    @property
    def experts(self) -> int | None:
        """Index of the weight's experts dimension, which is not gathered; None without experts."""
        _, w, _ = self.dims
        return w.index("E") if "E" in w else None

    def result(self, x, scale_inv_x, w, scale_inv_w, groups) -> jax.Array:
        """The product of input and weight, in bf16; operands come with their inverse scales."""
        return multiply(self.equation, x, scale_inv_x, w, scale_inv_w)

    def of_input(self, dy, scale_inv_dy, w, scale_inv_w, groups) -> jax.Array:
        """The gradient of the input, as `result`."""
        x, weight, y = self.dims
        return multiply(f"{y},{weight}->{x}", dy, scale_inv_dy, w, scale_inv_w)

    def of_weight(self, x, scale_inv_x, dy, scale_inv_dy, groups) -> jax.Array:
        """The gradient of the weight, as `result`."""
        values, w, y = self.dims
        return multiply(f"{values},{y}->{w}", x, scale_inv_x, dy, scale_inv_dy)

    def scope(self) -> Any:
        """Names the operations, for plans and for the check of a compiled program."""
        return jax.named_scope(f"{QUANTIZED}{self.name}")


def multiply(equation: str, a: jax.Array, scale_inv_a, b: jax.Array, scale_inv_b) -> jax.Array:
    """Einsum of two FP8 tensors with their inverse scales, in bf16."""
    return contract(equation, _dequantized(a, scale_inv_a), _dequantized(b, scale_inv_b))


def _dequantized(x: jax.Array, scale_inv: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16) * scale_inv.astype(jnp.bfloat16)


def gathered(stored: jax.Array, dims: mesh.Gathered, scale_inv: jax.Array) -> jax.Array:
    """The gathered FP8 weight from its stored parts, inside a `shard_map`; quantized here if it was
    gathered in bf16."""
    weight = mesh.gather(stored, dims)
    return weight if weight.dtype == VALUES else quantize(weight, scale_inv, VALUES)
