"""FP8 products by XLA.

XLA turns the product of two FP8 tensors and their inverse scales into one scaled cuBLASLt product
with a bf16 result on GPUs, and computes it in bf16 elsewhere.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.ops.contract import contract
from jaxbench.ops.fp8.operand import Operand, Product, gathered
from jaxbench.ops.fp8.per_tensor import GRADIENTS, VALUES, inverse_scale, magnitude, quantize
from jaxbench.ops.remat import SMALL, save
from jaxbench.ops.twice import Twice


def dot(product: Product, x: Twice, w: Operand) -> Twice:
    """Einsum of a bf16 activation with a weight at rest: this product and both of its gradients in
    FP8.

    Current scaling takes the scale of each device's own part of input and gradient, delayed scaling
    that of past steps on all devices.
    """
    return _dot(product, x, w.kernel, w.observed, w.stored, w.inverse)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(product, x, kernel, observed, stored, inverse):
    return _forward(product, x, kernel, observed, stored, inverse)[0]


def _forward(product, x, kernel, observed, stored, inverse):
    current, dims = observed is None, mesh.gathered_dims(stored, product.experts)

    def local(x, stored, inverse):
        with product.scope():
            amax = magnitude(x.again)
            inverse_x = inverse_scale(amax, VALUES, product.margin) if current else inverse[0]
            quantized = quantize(x.value, inverse_x, VALUES)
            weight = gathered(stored, dims, inverse[1])
            y = multiply(product.equation, quantized, inverse_x, weight, inverse[1])
        return y, quantized, amax[None]

    specs = product.y_spec, PartitionSpec(*mesh.partition(x.value)), mesh.per_device()
    run = mesh.on_each_device(local, specs, check_vma=False)
    y, quantized, amax = run(x, stored, inverse)
    return Twice(y, y), (quantized, save(amax, SMALL), stored, inverse, observed)


def _backward(product, residuals, dy):
    quantized, amax, stored, inverse, observed = residuals
    current, dims = observed is None, mesh.gathered_dims(stored, product.experts)
    x, w, y = product.letters
    # Where the largest magnitude is taken later, the bf16 gradient is kept alive. Where activations
    # cross ranks in a layer, what they wait for counts for more.
    together = not mesh.used(mesh.TENSOR, mesh.CONTEXT)

    def local(dy, quantized, amax, stored, inverse):
        with product.scope():
            amax_dy = magnitude(dy.again)
            inverse_x, inverse_w, inverse_dy = inverse
            if current:
                inverse_x = inverse_scale(amax[0], VALUES, product.margin)
                inverse_dy = inverse_scale(amax_dy, GRADIENTS, product.margin)
            gradient = quantize(dy.value, inverse_dy, GRADIENTS)
            if together:
                gradient, amax_dy = jax.lax.optimization_barrier((gradient, amax_dy))
            weight = gathered(stored, dims, inverse_w)
            dx = multiply(f"{y},{w}->{x}", gradient, inverse_dy, weight, inverse_w)
            dw = multiply(f"{x},{y}->{w}", quantized, inverse_x, gradient, inverse_dy)
        return dx, mesh.scatter(dw, dims), jnp.stack([amax, amax_dy[None]])

    specs = (product.dx_spec, mesh.cotangent_spec(stored), PartitionSpec(None, *mesh.per_device()))
    run = mesh.on_each_device(local, specs, check_vma=False)
    dx, dw, seen = run(dy, quantized, amax, stored, inverse)
    return Twice(dx, None), dw, None if current else seen, None, None


_dot.defvjp(_forward, _backward)


def multiply(equation: str, a: jax.Array, inverse_a, b: jax.Array, inverse_b) -> jax.Array:
    """Einsum of two FP8 tensors with their inverse scales, in bf16."""
    return contract(equation, _dequantized(a, inverse_a), _dequantized(b, inverse_b))


def _dequantized(x: jax.Array, inverse: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16) * inverse.astype(jnp.bfloat16)
