"""Operands of quantized matmuls, and the description and names of these matmuls."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.base.scopes import QUANTIZED
from jaxbench.ops import draws
from jaxbench.ops.dense import Seq, contract, einsum_dims, experts_dim
from jaxbench.ops.quantized.per_tensor import VALUES, quantize
from jaxbench.recipe.settings import Precision


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Operand:
    """A weight whose matmul runs in a quantized format. It replaces the weight in its layer.

    `weight` is in bf16 at rest and receives the gradient. `stored` is what is gathered: in FP8 the
    quantized array or `weight` itself, in block-scaled formats `block_scaled.Copies`.

    Only FP8 has the next two; other formats have None. `scale_inv` `[3]` are the inverse scales of
    input, weight and output gradient. Current scaling uses only the second of them. `observed` is
    zeros `[2, devices]`; its cotangent is the amax of input and gradient on each device. It is None
    under current scaling.

    `seed` is the seed of stochastic rounding; None if nothing is rounded stochastically.
    """

    weight: jax.Array
    stored: Any
    scale_inv: jax.Array | None
    observed: jax.Array | None
    seed: jax.Array | None
    name: str = field(metadata={"static": True})
    precision: Precision = field(metadata={"static": True})


def seeded(w: Any, part: int) -> Any:
    """The weight for a part of a microbatch. Each part draws numbers of its own for stochastic
    rounding."""
    if part == 0 or not isinstance(w, Operand) or w.seed is None:
        return w
    return replace(w, seed=draws.fold(w.seed, part))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Matmul:
    """A matmul and its gradients: the einsum, the partitions of the result and of the input's
    gradient, the name, and `dense.Seq`. All of it is static; a grouped matmul (`ops.grouped`) adds
    arrays."""

    equation: str = field(metadata={"static": True})
    y_spec: PartitionSpec = field(metadata={"static": True})
    dx_spec: PartitionSpec = field(metadata={"static": True})
    name: str = field(metadata={"static": True})
    seq: Seq = field(default=None, kw_only=True, metadata={"static": True})

    @property
    def dims(self) -> tuple[str, str, str]:
        """The dimensions of input, weight and result."""
        return einsum_dims(self.equation)

    @property
    def experts(self) -> int | None:
        """`dense.experts_dim`."""
        return experts_dim(self.equation)

    @property
    def gathers(self) -> bool:
        """True if it gathers the sequence of its input, and scatters that of its gradient."""
        return self.seq == "gather"

    @property
    def scatters(self) -> bool:
        """True if it scatters the sequence of its result, and gathers that of its gradient."""
        return self.seq == "scatter"

    def result(self, x, scale_inv_x, w, scale_inv_w) -> jax.Array:
        """The matmul of input and weight, in bf16. Each operand comes with its inverse scale."""
        return multiply(self.equation, x, scale_inv_x, w, scale_inv_w)

    def of_input(self, dy, scale_inv_dy, w, scale_inv_w) -> jax.Array:
        """The gradient of the input. Arguments are as in `result`."""
        x, weight, y = self.dims
        return multiply(f"{y},{weight}->{x}", dy, scale_inv_dy, w, scale_inv_w)

    def of_weight(self, x, scale_inv_x, dy, scale_inv_dy) -> jax.Array:
        """The gradient of the weight. Arguments are as in `result`."""
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


def gather_quantized(stored: jax.Array, dims: mesh.Gathered, scale_inv: jax.Array) -> jax.Array:
    """The whole FP8 weight, gathered from its stored parts inside a `shard_map`. If it was gathered
    in bf16, it is quantized here."""
    weight = mesh.gather(stored, dims)
    return weight if weight.dtype == VALUES else quantize(weight, scale_inv, VALUES)
