"""Products of activations with weights that are sharded at rest, and the vectors beside them."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.ops import fp8


def dot(equation: str, x: jax.Array, w: nnx.Variable | fp8.Operand, dims: str) -> jax.Array:
    """Einsum of an activation with a weight that is sharded at rest: all-gather the weight, then
    multiply, in FP8 where the weight is an `fp8.Operand`.

    `dims` are the logical dimensions of the result. Where the product sums over a dimension that is
    split over `tensor`, the result stays unreduced over `tensor`, and the caller's next
    `mesh.scatter_seq` sums it. In the backward pass the gradient of the weight is
    reduce-scattered. A dimension of experts, the letter E, is a batch of products.
    """
    inputs, out = equation.split("->")
    x_dims, w_dims = inputs.split(",")
    split_sum = mesh.contracts_tensor(x, x_dims, kept=out)
    spec = mesh.spec(dims, mesh.ACTIVATION, unreduced={mesh.TENSOR} if split_sum else set())
    if isinstance(w, fp8.Operand):
        return fp8.dot(equation, x, w, spec)
    experts = w_dims.index("E") if "E" in w_dims else None
    return jnp.einsum(equation, x, mesh.gather_weight(w[...], experts), out_sharding=spec)


def scale(x: jax.Array, gain: jax.Array) -> jax.Array:
    """`x` times a vector along its last dimension; every rank keeps its own part of the vector's
    gradient."""
    return x * _along_last(gain, x)


def shift(x: jax.Array, bias: jax.Array) -> jax.Array:
    """`x` plus a vector along its last dimension, with gradients as in `scale`."""
    return x + _along_last(bias, x)


def _along_last(vector: jax.Array, x: jax.Array) -> jax.Array:
    sharding = PartitionSpec(*mesh.partition(x))
    return jax.lax.broadcast_in_dim(vector, x.shape, (x.ndim - 1,), out_sharding=sharding)
