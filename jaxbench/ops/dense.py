"""Matmuls of activations with weights that are sharded at rest, and elementwise operations with
vectors."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.ops import quantized
from jaxbench.ops.contract import contract, einsum_dims
from jaxbench.ops.duplicate_producers import Duplicated, single


def dot(equation: str, x: jax.Array, w: nnx.Variable | quantized.Operand, dims: str) -> jax.Array:
    """Einsum of an activation with a weight that is sharded at rest. It all-gathers the weight and
    then multiplies, in a quantized format if the weight is a `quantized.Operand`.

    `dims` are the logical dimensions of the result. If the matmul sums over a dimension that is
    split over `tensor`, the result stays unreduced over `tensor`, and the caller's next
    `mesh.scatter_seq` sums it. In the backward pass the weight's gradient is reduce-scattered. A
    dimension of experts, the letter E, makes a batch of matmuls.
    """
    return single(dot_duplicated(equation, Duplicated.of(x), w, dims))


def dot_duplicated(
    equation: str, x: Duplicated, w: nnx.Variable | quantized.Operand, dims: str
) -> Duplicated:
    """`dot` for an input whose producer is duplicated; the producer of the result's gradient is
    duplicated too. Matmuls in bf16 use only `value`."""
    x_dims, w_dims, out = einsum_dims(equation)
    split_sum = mesh.contracts_tensor(x.value, x_dims, kept=out)
    spec = mesh.spec(dims, mesh.ACTIVATION, unreduced={mesh.TENSOR} if split_sum else set())
    if isinstance(w, quantized.Operand):
        return quantized.dot(equation, x, w, spec)
    experts = w_dims.index("E") if "E" in w_dims else None
    weight = mesh.gather_weight(w[...], experts)
    return Duplicated.of(_product(equation, spec, x.value, weight))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation: str, spec: PartitionSpec, x: jax.Array, w: jax.Array) -> jax.Array:
    """Einsum whose gradients are computed in the dimension order of their operands. JAX's own rule
    swaps the operands of the weight gradient, and XLA then transposes the gradient in memory before
    it scatters it."""
    return contract(equation, x, w, out_sharding=spec)


def _backward(equation, spec, operands, dy):
    x, w = operands
    x_dims, w_dims, y = einsum_dims(equation)
    dx = contract(f"{y},{w_dims}->{x_dims}", dy, w, out_sharding=mesh.cotangent_spec(x))
    dw = contract(f"{x_dims},{y}->{w_dims}", x, dy, out_sharding=mesh.cotangent_spec(w))
    return dx, dw


_product.defvjp(lambda equation, spec, x, w: (_product(equation, spec, x, w), (x, w)), _backward)


def scale(x: jax.Array, gain: jax.Array) -> jax.Array:
    """`x` times a vector along its last dimension. The vector's gradient stays local to each
    rank."""
    return x * along(gain, x)


def shift(x: jax.Array, bias: jax.Array) -> jax.Array:
    """`x` plus a vector along its last dimension, with gradients as in `scale`."""
    return x + along(bias, x)


def broadcast_heads(x: jax.Array, like: jax.Array) -> jax.Array:
    """Repeats features that all heads share, `"batch seq head_dim"`, for each head of the array
    `like`. The gradient is the sum over a device's own heads."""
    shape, (batch, seq, heads, _) = (*like.shape[:3], x.shape[-1]), mesh.partition(like)
    sharding = PartitionSpec(batch, seq, heads, None)
    return jax.lax.broadcast_in_dim(x, shape, (0, 1, 3), out_sharding=sharding)


def biased(x: jax.Array, bias: jax.Array, dims: Sequence[int] | None = None) -> jax.Array:
    """`x` plus a bias along the dimensions `dims` of `x`, by default its last ones. The sum is
    computed in fp32 and returned in the dtype of `x`. Gradients are as in `scale`."""
    wide = x.astype(jnp.float32)
    return (wide + along(bias, x, dims)).astype(x.dtype)


def along(vector: jax.Array, x: jax.Array, dims: Sequence[int] | None = None) -> jax.Array:
    """Broadcasts a vector to the shape of `x`, along the dimensions `dims` of `x`, by default its
    last ones."""
    sharding = PartitionSpec(*mesh.partition(x))
    dims = range(x.ndim - vector.ndim, x.ndim) if dims is None else dims
    return jax.lax.broadcast_in_dim(vector, x.shape, dims, out_sharding=sharding)
