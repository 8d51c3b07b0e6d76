"""Products of activations with weights that are sharded at rest, and elementwise vectors."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.ops import quantized
from jaxbench.ops.contract import contract, einsum_dims
from jaxbench.ops.duplicated import Duplicated, single


def dot(equation: str, x: jax.Array, w: nnx.Variable | quantized.Operand, dims: str) -> jax.Array:
    """Einsum of an activation with a weight that is sharded at rest: all-gather the weight, then
    multiply, in FP8 where the weight is an `quantized.Operand`.

    `dims` are the logical dimensions of the result. Where the product sums over a dimension that is
    split over `tensor`, the result stays unreduced over `tensor`, and the caller's next
    `mesh.scatter_seq` sums it. In the backward pass the gradient of the weight is
    reduce-scattered. A dimension of experts, the letter E, is a batch of products.
    """
    return single(dot_duplicated(equation, Duplicated.of(x), w, dims))


def dot_duplicated(
    equation: str, x: Duplicated, w: nnx.Variable | quantized.Operand, dims: str
) -> Duplicated:
    """`dot` with a duplicated producer of its input and of its result's gradient; bf16 products use
    `value` only."""
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
    swaps the operands of the weight gradient, which XLA then transposes in memory before it is
    scattered."""
    return contract(equation, x, w, out_sharding=spec)


def _backward(equation, spec, operands, dy):
    x, w = operands
    x_dims, w_dims, y = einsum_dims(equation)
    dx = contract(f"{y},{w_dims}->{x_dims}", dy, w, out_sharding=mesh.cotangent_spec(x))
    dw = contract(f"{x_dims},{y}->{w_dims}", x, dy, out_sharding=mesh.cotangent_spec(w))
    return dx, dw


_product.defvjp(lambda equation, spec, x, w: (_product(equation, spec, x, w), (x, w)), _backward)


def scale(x: jax.Array, gain: jax.Array) -> jax.Array:
    """`x` times a vector along its last dimension; the vector's gradient stays local to each
    rank."""
    return x * along(gain, x)


def shift(x: jax.Array, bias: jax.Array) -> jax.Array:
    """`x` plus a vector along its last dimension, with gradients as in `scale`."""
    return x + along(bias, x)


def broadcast_heads(x: jax.Array, like: jax.Array) -> jax.Array:
    """Features of all heads, `"batch seq head_dim"`, for each head of another array; the gradient
    is the sum over a device's own heads."""
    shape, (batch, seq, heads, _) = (*like.shape[:3], x.shape[-1]), mesh.partition(like)
    sharding = PartitionSpec(batch, seq, heads, None)
    return jax.lax.broadcast_in_dim(x, shape, (0, 1, 3), out_sharding=sharding)


def biased(x: jax.Array, bias: jax.Array, dims: Sequence[int] | None = None) -> jax.Array:
    """`x` plus a bias along the dimensions `dims` of `x`, its last ones by default; in fp32,
    returned in the dtype of `x`, with gradients as in `scale`."""
    wide = x.astype(jnp.float32)
    return (wide + along(bias, x, dims)).astype(x.dtype)


def along(vector: jax.Array, x: jax.Array, dims: Sequence[int] | None = None) -> jax.Array:
    """A vector along the dimensions `dims` of an array like `x`, its last ones by default."""
    sharding = PartitionSpec(*mesh.partition(x))
    dims = range(x.ndim - vector.ndim, x.ndim) if dims is None else dims
    return jax.lax.broadcast_in_dim(vector, x.shape, dims, out_sharding=sharding)
