"""Matmuls of activations with weights that are sharded at rest, and elementwise operations with
vectors.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.ops.implementations import lazy

_quantized_dot = lazy("quantized.dot")
_gathers_quantized = lazy("quantized.gathers_quantized")


Seq = Literal["gather", "scatter"] | None
"""How a matmul enters or leaves a tensor-parallel region: it gathers the sequence of its input
(`mesh.gather_seq`), or it sums its result over tensor ranks and scatters it (`mesh.scatter_seq`).
"""


def dot(equation: str, x: jax.Array, w: Any, dims: str, seq: Seq = None) -> jax.Array:
    """Einsum of an activation with a weight that is sharded at rest. It all-gathers the weight and
    then multiplies. The weight `w` is a variable, or for a quantized matmul a `quantized.Operand`.

    `dims` are the logical dimensions of the result, before `seq` scatters it. If the matmul sums
    over a dimension that is split over `tensor`, the result stays unreduced over `tensor`, unless
    it is scattered. In the backward pass the weight's gradient is reduce-scattered. A dimension of
    experts, the letter E, makes a batch of matmuls.
    """
    if seq and _gathers_quantized(w):
        after = dims.replace("seq", "shard_seq") if seq == "scatter" else dims
        return _quantized_dot(equation, x, w, mesh.spec(after, mesh.ACTIVATION), seq)
    if seq == "gather":
        x = mesh.gather_seq(x)
    x_dims, _, out = einsum_dims(equation)
    split_sum = mesh.sums_over_tensor(x, x_dims, kept=out)
    spec = mesh.spec(dims, mesh.ACTIVATION, unreduced={mesh.TENSOR} if split_sum else set())
    if isinstance(w, nnx.Variable):
        y = _multiply(equation, spec, x, mesh.gather_weight(w[...], experts_dim(equation)))
    else:
        y = _quantized_dot(equation, x, w, spec)
    return mesh.scatter_seq(y) if seq == "scatter" else y


def einsum_dims(equation: str) -> tuple[str, str, str]:
    """The dimensions of both operands and of the result of an einsum, one letter each."""
    operands, result = equation.split("->")
    a, b = operands.split(",")
    return a, b, result


def experts_dim(equation: str) -> int | None:
    """Index of the weight's dimension of experts, which stays split over `mesh.EXPERTS`; None
    without experts."""
    _, w, _ = einsum_dims(equation)
    return w.index("E") if "E" in w else None


def contract(equation: str, a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
    """`jnp.einsum` of two arrays. The result must have the batch dimensions first, then the
    remaining dimensions of one array, then the remaining dimensions of the other. `options` go to
    `jax.lax.dot_general`.

    If several dimensions are summed, they keep their order in `a`. `einsum` sorts them by their
    letters, and XLA then transposes an operand in memory. Raises ValueError for any other order of
    the result.
    """
    a_dims, b_dims, out = einsum_dims(equation)
    batch = [d for d in a_dims if d in b_dims and d in out]
    summed = [d for d in a_dims if d in b_dims and d not in out]
    order = "".join(batch + [d for d in a_dims + b_dims if d not in batch + summed])
    swapped = "".join(batch + [d for d in b_dims + a_dims if d not in batch + summed])
    if out not in (order, swapped):
        raise ValueError(f"{equation}: expected {order} or {swapped}")
    if out != order:
        a, b, a_dims, b_dims = b, a, b_dims, a_dims

    def positions(dims: list[str]) -> tuple[list[int], list[int]]:
        return [a_dims.index(d) for d in dims], [b_dims.index(d) for d in dims]

    dimension_numbers = positions(summed), positions(batch)
    if batch and mesh.platform() == "cpu":
        # On a CPU XLA accumulates in bf16 if the sum is not over the last dimension of `a`.
        wide = [x.astype(jnp.float32) for x in (a, b)]
        return jax.lax.dot_general(wide[0], wide[1], dimension_numbers, **options).astype(a.dtype)
    return jax.lax.dot_general(a, b, dimension_numbers, **options)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(equation: str, spec: PartitionSpec, x: jax.Array, w: jax.Array) -> jax.Array:
    """Einsum whose gradients are computed in the dimension order of their operands. JAX's own rule
    swaps the operands of the weight gradient, and XLA then transposes the gradient in memory before
    it scatters it."""
    return contract(equation, x, w, out_sharding=spec)


def _multiply_backward(equation, spec, operands, dy):
    x, w = operands
    x_dims, w_dims, y = einsum_dims(equation)
    dx = contract(f"{y},{w_dims}->{x_dims}", dy, w, out_sharding=mesh.cotangent_spec(x))
    dw = contract(f"{x_dims},{y}->{w_dims}", x, dy, out_sharding=mesh.cotangent_spec(w))
    return dx, dw


_multiply.defvjp(
    lambda equation, spec, x, w: (_multiply(equation, spec, x, w), (x, w)), _multiply_backward
)


def is_variable(node: object) -> bool:
    """True for a node of a model's pytree that is a variable."""
    return isinstance(node, nnx.Variable)


def broadcast_heads(x: jax.Array, like: jax.Array) -> jax.Array:
    """Repeats features that all heads share, `"batch seq head_dim"`, for each head of the array
    `like`. The gradient is the sum over a device's own heads."""
    shape, (batch, seq, heads, _) = (*like.shape[:3], x.shape[-1]), mesh.partition(like)
    sharding = PartitionSpec(batch, seq, heads, None)
    return jax.lax.broadcast_in_dim(x, shape, (0, 1, 3), out_sharding=sharding)


def biased(x: jax.Array, bias: jax.Array, dims: Sequence[int] | None = None) -> jax.Array:
    """`x` plus a bias along the dimensions `dims` of `x`, by default its last ones. The sum is
    computed in fp32 and returned in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    return (wide + broadcast_vector(bias, x, dims)).astype(x.dtype)


def broadcast_vector(
    vector: jax.Array, x: jax.Array, dims: Sequence[int] | None = None
) -> jax.Array:
    """Broadcasts a vector to the shape of `x`, along the dimensions `dims` of `x`, by default its
    last ones. The vector's gradient stays local to each rank."""
    sharding = mesh.spec_of(x)
    dims = range(x.ndim - vector.ndim, x.ndim) if dims is None else dims
    return jax.lax.broadcast_in_dim(vector, x.shape, dims, out_sharding=sharding)
