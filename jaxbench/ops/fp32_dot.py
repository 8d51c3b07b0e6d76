"""A matmul in fp32 on tensor cores that multiply bf16.

An fp32 number is the sum of three bf16 numbers, since each holds 8 of its 24 bits. Products of bf16
numbers are exact in fp32. A matmul of the parts is therefore as exact as one in fp32. It runs at a
third of the rate of bf16, and GPUs multiply fp32 numbers at about a twentieth (Henry et al. 2019,
"Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations"). The
gradient of the activation is rounded to bf16, so two parts of each operand are enough there.

That holds for numbers from about 1e-33 to 3.39e38. An infinite operand gives NaN.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32

from jaxbench import mesh
from jaxbench.ops.dense import contract


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dot(
    x: Float[Array, "B S D"], w: Float32[Array, "D E"], spec: PartitionSpec
) -> Float32[Array, "B S E"]:
    """The matmul of a bf16 or fp32 activation with a weight, partitioned by `spec`."""
    if x.dtype != jnp.bfloat16:
        exact = jax.lax.Precision.HIGHEST
        return contract("BSD,DE->BSE", x, w, precision=exact, out_sharding=spec)
    batch, seq, experts = spec.partitions
    of_parts = PartitionSpec(batch, seq, None, experts)
    return _summed("BSD,DPE->BSPE", x, jnp.stack(_parts(w, 3), 1), of_parts)


def _backward(
    spec: PartitionSpec, operands: tuple[Array, Array], dy: Float32[Array, "B S E"]
) -> tuple[Array, Array]:
    x, w = operands
    of_x, of_w = mesh.cotangent_spec(x), mesh.cotangent_spec(w)
    if x.dtype != jnp.bfloat16:
        exact = jax.lax.Precision.HIGHEST
        dx = contract("BSE,DE->BSD", dy, w, precision=exact, out_sharding=of_x)
        return dx, contract("BSD,BSE->DE", x, dy, precision=exact, out_sharding=of_w)
    # (a + b) (c + d) without b d, which is below the rounding of dx
    a, b, rest = _parts(dy, 3)
    c, d = _parts(w, 2)
    left, right = jnp.stack([a, b, a], 2), jnp.stack([c, c, d], 1)
    dx = contract("BSPE,DPE->BSD", left, right, out_sharding=of_x)
    none, experts = of_w.partitions
    of_parts = PartitionSpec(none, None, experts, unreduced=of_w.unreduced)
    return dx, _summed("BSD,BSPE->DPE", x, jnp.stack([a, b, rest], 2), of_parts)


dot.defvjp(lambda x, w, spec: (dot(x, w, spec), (x, w)), _backward)


def _parts(x: Float32[Array, "*dims"], count: int) -> list[Array]:
    """The bf16 numbers that add up to `x`, the largest first. Three of them are all of it."""
    parts = []
    for _ in range(count):
        # XLA may drop a cast to bf16 and back, so we round explicitly.
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x -= part
    return parts


def _summed(equation: str, a: Array, b: Array, spec: PartitionSpec) -> Float32[Array, "..."]:
    """A matmul with the parts `P` of one operand, summed over them."""
    y = contract(equation, a, b, preferred_element_type=jnp.float32, out_sharding=spec)
    return jnp.sum(y, -2)
