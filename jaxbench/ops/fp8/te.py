"""FP8 products by Transformer Engine: it quantizes and multiplies, we gather, scatter and keep the
history."""

import importlib.util
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.ops.fp8.operand import Operand, Product
from jaxbench.ops.fp8.per_tensor import TENSORS
from jaxbench.xla.hlo import Instruction, Scope, Work


def refusal(platform: str) -> str | None:
    """Why it cannot run in this process; None if it can.

    It compiles for the GPU of this process only, so never for GPUs that are not there.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None
    if installed and platform == jax.default_backend() == "gpu":
        return None
    return (
        "precision.implementation = te needs an NVIDIA GPU and Transformer Engine (README: "
        "Transformer Engine); use auto or xla"
    )


def work(i: Instruction, scope: Scope) -> Work:
    """A product of [m, k] and [k, n] from the sizes of operands and result: the square root of
    their product is m k n."""
    arrays = [scope[name].arrays[0] for name in i.operands]
    (dtype, x), (_, w), (_, y) = arrays[0], arrays[1], i.arrays[0]
    return Work("product", dtype, 2 * math.isqrt(math.prod((*x, *w, *y))))


def dot(product: Product, x: jax.Array, w: Operand) -> jax.Array:
    """Einsum of a bf16 activation with a weight at rest, as `xla.dot`."""
    return _dot(product, x, w.kernel, w.observed, w.inverse)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(product, x, kernel, observed, inverse):
    return _forward(product, x, kernel, observed, inverse)[0]


def _forward(product, x, kernel, observed, inverse):
    dims = mesh.gathered_dims(kernel, product.experts)

    def local(x, kernel, inverse):
        with product.scope():
            weight = mesh.gather(kernel, dims)
            return _dense(product, x, weight, _quantizers(observed is not None, inverse))

    y = jax.shard_map(local, out_specs=product.y_spec, check_vma=False)(x, kernel, inverse)
    return y, (x, kernel, observed, inverse)


def _backward(product, residuals, dy):
    x, kernel, observed, inverse = residuals
    dims = mesh.gathered_dims(kernel, product.experts)

    def local(dy, x, kernel, inverse):
        with product.scope():
            quantizers = _quantizers(observed is not None, inverse)
            weight = mesh.gather(kernel, dims)
            dx, dw, seen = jax.vjp(partial(_dense, product), x, weight, quantizers)[1](dy)
        if observed is None:
            return dx, mesh.scatter(dw, dims)
        # Each tensor's new history holds this one magnitude.
        amax = jnp.stack([jnp.max(q.amax_history) for q in (seen.x, seen.dgrad)])
        return dx, mesh.scatter(dw, dims), amax[:, None]

    specs: tuple = (product.dx_spec, mesh.cotangent_spec(kernel))
    if observed is not None:
        specs = (*specs, PartitionSpec(None, *mesh.per_device()))
    dx, dw, *seen = jax.shard_map(local, out_specs=specs, check_vma=False)(dy, x, kernel, inverse)
    return dx, dw, seen[0] if seen else None, None


_dot.defvjp(_forward, _backward)


def _quantizers(delayed: bool, inverse: jax.Array) -> Any:
    """Transformer Engine's quantizers of input, weight and gradient."""
    from transformer_engine.jax import quantize as te

    def quantizer(dtype: Any, inverse: jax.Array) -> Any:
        if not delayed:
            return te.CurrentScaleQuantizer(q_dtype=dtype)
        history = jnp.zeros(2)
        return te.DelayedScaleQuantizer(
            q_dtype=dtype, scale=1 / inverse[None], amax_history=history
        )

    x, kernel, gradient = map(quantizer, TENSORS, inverse)
    return te.QuantizerSet(x=x, kernel=kernel, dgrad=gradient)


def _dense(product: Product, x: jax.Array, w: jax.Array, quantizers: Any) -> jax.Array:
    """The einsum of local arrays by Transformer Engine's dense layer, which wants the summed
    dimensions last in `x` and first in `w`."""
    from transformer_engine.jax.dense import dense
    from transformer_engine.jax.sharding import MeshResource, global_shard_guard

    into, through, out = product.letters
    summed = [dim for dim in into if dim not in out]
    kept = [dim for dim in through if dim in out]
    assert into.endswith("".join(summed))
    assert out.endswith("".join(kept))
    w = jnp.transpose(w, [through.index(dim) for dim in summed + kept])
    last = tuple(range(x.ndim - len(summed), x.ndim))
    with global_shard_guard(MeshResource()):
        return dense(
            x, w, contracting_dims=(last, tuple(range(len(summed)))), quantizer_set=quantizers
        )
