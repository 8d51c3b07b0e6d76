"""FP8 matmuls by XLA.

On GPUs XLA turns the matmul of two FP8 tensors and their inverse scales into one scaled cuBLASLt
matmul with a bf16 result. Elsewhere it computes the matmul in bf16.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.ops.quantized.operand import Matmul, Operand, gather_quantized
from jaxbench.ops.quantized.per_tensor import GRADIENTS, VALUES, amax_of, quantize, scale_inv_of
from jaxbench.ops.remat import ALWAYS, save


def dot(matmul: Matmul, x: jax.Array, w: Operand) -> jax.Array:
    """Matmul of a bf16 activation with a weight at rest. The matmul and both of its gradients are
    in FP8.

    Under current scaling the scales of input and gradient come from each device's local part, under
    delayed scaling from past steps on all devices.
    """
    return _dot(x, w.weight, w.observed, w.stored, w.scale_inv, matmul)


@jax.custom_vjp
def _dot(x, weight, observed, stored, scale_inv, matmul):
    return _forward(x, weight, observed, stored, scale_inv, matmul)[0]


def _forward(x, weight, observed, stored, scale_inv, matmul):
    current, dims = observed is None, mesh.gathered_dims(stored, matmul.experts)

    def local_amax(x, matmul):
        with matmul.scope():
            amax = amax_of(x)
            # Shards that are gathered have one scale.
            return (mesh.max_over_tensor(amax) if current and matmul.gathers else amax)[None]

    def local(x, amax, stored, scale_inv, matmul):
        with matmul.scope():
            scale_inv_x = scale_inv_of(amax[0], VALUES) if current else scale_inv[0]
            quantized = quantize(x, scale_inv_x, VALUES)
            quantized = mesh.gather_seq(quantized) if matmul.gathers else quantized
            weight = gather_quantized(stored, dims, scale_inv[1])
            y = matmul.result(quantized, scale_inv_x, weight, scale_inv[1])
            return (mesh.scatter_seq(y) if matmul.scatters else y), quantized

    # A recomputation quantizes x again. It takes the scale from the saved amax, so that it reads x
    # once.
    observe = mesh.on_each_device(local_amax, mesh.per_device(), check_vma=False)
    amax = save(observe(x, matmul), ALWAYS)
    of_input = mesh.spec("batch seq embed", mesh.ACTIVATION) if matmul.gathers else mesh.spec_of(x)
    specs = matmul.y_spec, of_input
    run = mesh.on_each_device(local, specs, check_vma=False)
    y, quantized = run(x, amax, stored, scale_inv, matmul)
    return y, (quantized, amax, stored, scale_inv, observed, matmul)


def _backward(residuals, dy):
    quantized, amax, stored, scale_inv, observed, matmul = residuals
    current, dims = observed is None, mesh.gathered_dims(stored, matmul.experts)
    # The barrier makes XLA compute the amax no later than the FP8 gradient, so that the bf16
    # gradient can be freed. With tensor or context parallelism the barrier would delay gradients
    # that are sent to other ranks, which costs more.
    together = not mesh.used(mesh.TENSOR, mesh.CONTEXT)

    def local(dy, quantized, amax, stored, scale_inv, matmul):
        with matmul.scope():
            amax_dy = amax_of(dy)
            scale_inv_x, scale_inv_w, scale_inv_dy = scale_inv
            if current:
                scale_inv_x = scale_inv_of(amax[0], VALUES)
                largest = mesh.max_over_tensor(amax_dy) if matmul.scatters else amax_dy
                scale_inv_dy = scale_inv_of(largest, GRADIENTS)
            gradient = quantize(dy, scale_inv_dy, GRADIENTS)
            if together:
                gradient, amax_dy = jax.lax.optimization_barrier((gradient, amax_dy))
            gradient = mesh.gather_seq(gradient) if matmul.scatters else gradient
            weight = gather_quantized(stored, dims, scale_inv_w)
            dx = matmul.of_input(gradient, scale_inv_dy, weight, scale_inv_w)
            dx = mesh.scatter_seq(dx) if matmul.gathers else dx
            dw = matmul.of_weight(quantized, scale_inv_x, gradient, scale_inv_dy)
        return dx, mesh.scatter(dw, dims), jnp.stack([amax, amax_dy[None]])

    specs = (matmul.dx_spec, mesh.cotangent_spec(stored), PartitionSpec(None, *mesh.per_device()))
    run = mesh.on_each_device(local, specs, check_vma=False)
    dx, dw, amaxes = run(dy, quantized, amax, stored, scale_inv, matmul)
    return dx, dw, None if current else amaxes, None, None, None


_dot.defvjp(_forward, _backward)
