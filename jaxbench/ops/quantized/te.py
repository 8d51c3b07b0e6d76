"""FP8 products by Transformer Engine, which quantizes inputs and gradients and multiplies.

Gathers, scatters, transposes and amax histories are ours. Its functions `quantize` and `gemm` are
used, not its dense layer, which would quantize a weight in every pass, gather it in bf16, and save
inputs in bf16 for the backward pass. On Hopper an FP8 product needs the summed dimension last in
both operands: every product here is [m, k] x [n, k].
"""

from functools import cache, partial
from math import isqrt, prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.jax_internals import empty_arrays_from
from jaxbench.ops import latency
from jaxbench.ops.duplicated import Duplicated
from jaxbench.ops.quantized.operand import Operand, Product, gathered
from jaxbench.ops.quantized.per_tensor import GRADIENTS, VALUES, amax_of
from jaxbench.recipe.settings import Precision
from jaxbench.xla.hlo import Program, Work
from jaxbench.xla.instruction import Instruction, Scope

GEMM, QUANTIZE = "te_gemm_v2_ffi", "te_dbias_quantize_ffi"
"""Targets of its custom calls."""

SCALING = {"delayed": "1", "current": "3"}
"""`NVTEScalingMode` of each `precision.scaling`, an attribute of every custom call."""


@cache
def _unimportable() -> str | None:
    try:
        from transformer_engine.jax import cpp_extensions, quantize  # noqa: F401
    except Exception as error:  # a missing module, library or driver: each raises its own
        return " ".join(str(error).split()) or type(error).__name__
    return None


def refusal(precision: Precision, platform: str) -> str | None:
    """Reason why Transformer Engine cannot multiply here; None if it can."""
    if platform != "gpu":
        return "Transformer Engine needs an NVIDIA GPU"
    if precision.scaling == "current" and precision.margin:
        return "Transformer Engine's current scaling leaves no precision.margin"
    if reason := _unimportable():
        return f"Transformer Engine cannot be imported (README: Transformer Engine): {reason}"
    return None


def takes(product: Product) -> bool:
    """True for the products that it can compute: all but the batched ones of experts."""
    return product.experts is None


def work(i: Instruction, scope: Scope) -> Work:
    """Work of a product of [m, k] and [n, k]: the sizes of the three arrays multiply to
    (m n k)^2."""
    dtype = scope[i.operands[0]].arrays[0][0]
    x, w = (prod(scope[i.operands[n]].arrays[0][1]) for n in (0, 2))
    y = prod(i.arrays[0][1])
    mnk = isqrt(x * w * y)
    return Work("product", dtype, 2 * mnk, (1, mnk // w, mnk // x, mnk // y))


def problem(program: Program, precision: Precision) -> str | None:
    """Difference between a compiled program and the recipe; None if there is none."""
    calls = [i for i, _, _ in program.walk() if i.target in (GEMM, QUANTIZE)]
    modes = {i.attribute(r"scaling_mode = (\d+)") for i in calls}
    if modes == {SCALING[precision.scaling]}:
        return None
    return (
        f"{precision.scaling} scaling was requested, but Transformer Engine was called with the "
        f"modes {sorted(map(str, modes))} instead of {SCALING[precision.scaling]}"
    )


def dot(product: Product, x: Duplicated, w: Operand) -> Duplicated:
    """Einsum of a bf16 activation with a weight at rest, as `xla.dot`. Its kernels read operands
    from memory, so the duplicated producers are unused."""
    return Duplicated.of(_dot(product, x.value, w.weight, w.observed, w.stored, w.scale_inv))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(product, x, weight, observed, stored, scale_inv):
    return _forward(product, x, weight, observed, stored, scale_inv)[0]


def _forward(product, x, weight, observed, stored, scale_inv):
    dims, delayed = mesh.gathered_dims(stored), observed is not None

    def local(x, stored, scale_inv):
        with product.scope():
            shapes = _Shapes(product, x)
            data, scale_inv_x, amax = _quantized(shapes.flat(x), VALUES, scale_inv[0], delayed)
            weight = gathered(stored, dims, scale_inv[1])
            y = _multiply(data, scale_inv_x, shapes.outputs_first(weight), scale_inv[1], delayed)
        y = y.reshape(*x.shape[: shapes.batch], *shapes.outputs(weight))
        return y, data.reshape(x.shape), scale_inv_x[None], amax[None]

    per_device = mesh.per_device()
    specs = product.y_spec, PartitionSpec(*mesh.partition(x)), per_device, per_device
    run = mesh.on_each_device(local, specs, check_vma=False)
    y, data, scale_inv_x, amax = run(x, stored, scale_inv)
    return y, (data, scale_inv_x, amax, stored, scale_inv, observed)


def _backward(product, residuals, dy):
    data, scale_inv_x, amax, stored, scale_inv, observed = residuals
    dims, delayed = mesh.gathered_dims(stored), observed is not None

    def local(dy, data, scale_inv_x, amax, stored, scale_inv):
        with product.scope():
            shapes = _Shapes(product, data)
            weight = gathered(stored, dims, scale_inv[1])
            flat = dy.reshape(shapes.flat(data).shape[0], -1)
            gradient, scale_inv_dy, amax_dy = _quantized(flat, GRADIENTS, scale_inv[2], delayed)
            inputs_first = shapes.inputs_first(weight)
            dx = _multiply(gradient, scale_inv_dy, inputs_first, scale_inv[1], delayed)
            x = shapes.flat(data).T, scale_inv_x[0]
            operands = (x, (gradient.T, scale_inv_dy))
            # In the order of the weight's dimensions: inputs or outputs first.
            (a, b) = operands if shapes.summed_first else operands[::-1]
            dw = _multiply(*a, *b, delayed).reshape(weight.shape)
        return dx.reshape(data.shape), mesh.scatter(dw, dims), jnp.stack([amax, amax_dy[None]])

    specs = (product.dx_spec, mesh.cotangent_spec(stored), PartitionSpec(None, *mesh.per_device()))
    run = mesh.on_each_device(local, specs, check_vma=False)
    dx, dw, amaxes = run(dy, data, scale_inv_x, amax, stored, scale_inv)
    return dx, dw, amaxes if delayed else None, None, None


_dot.defvjp(_forward, _backward)


class _Shapes:
    """Reshapes of a product to one of matrices, for one device's input."""

    def __init__(self, product: Product, x: jax.Array):
        x_dims, w_dims, out = product.dims
        summed, kept = [
            "".join(dim for dim in dims if (dim in out) == shown)
            for dims, shown in ((x_dims, False), (w_dims, True))
        ]
        assert x_dims.endswith(summed)
        assert out.endswith(kept)
        assert w_dims in (summed + kept, kept + summed)
        self.batch = len(x_dims) - len(summed)
        self.summed_first = w_dims.startswith(summed)
        self.split = len(summed) if self.summed_first else len(kept)

    def flat(self, x: jax.Array) -> jax.Array:
        """An input as [tokens, inputs]."""
        return x.reshape(prod(x.shape[: self.batch]), -1)

    def outputs(self, w: jax.Array) -> tuple[int, ...]:
        """The dimensions of a weight that the product keeps."""
        return w.shape[self.split :] if self.summed_first else w.shape[: self.split]

    def _matrix(self, w: jax.Array) -> jax.Array:
        return w.reshape(prod(w.shape[: self.split]), -1)

    def outputs_first(self, w: jax.Array) -> jax.Array:
        """A weight as [outputs, inputs]."""
        return self._matrix(w).T if self.summed_first else self._matrix(w)

    def inputs_first(self, w: jax.Array) -> jax.Array:
        """A weight as [inputs, outputs]."""
        return self._matrix(w) if self.summed_first else self._matrix(w).T


def _quantized(
    x: jax.Array, dtype: Any, scale_inv: jax.Array, delayed: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(x in FP8, inverse scale, amax): one kernel under delayed scaling; current scaling takes the
    scale first and returns no amax."""
    from transformer_engine.jax import cpp_extensions, quantize, sharding

    # Without `scaling_mode` its delayed quantizer would default to current scaling.
    layout = {"scaling_mode": _mode(delayed), "q_layout": quantize.QuantizeLayout.ROWWISE}
    quantizer: Any = quantize.CurrentScaleQuantizer(q_dtype=dtype, **layout)
    if delayed:
        quantizer = quantize.DelayedScaleQuantizer(
            q_dtype=dtype, scale=1 / scale_inv[None], amax_history=jnp.zeros(2), **layout
        )
    with sharding.global_shard_guard(sharding.MeshResource()), empty_arrays_from(x):
        scaled = cpp_extensions.quantize(x, quantizer)
    # Its GPU kernel returns the amax; its fallback on a CPU does not.
    on_gpu = cpp_extensions.quantization.QuantizePrimitive.enabled()
    return scaled.data, scaled.scale_inv[0], scaled.amax[0] if on_gpu else amax_of(x)


def _mode(delayed: bool) -> Any:
    from transformer_engine.jax.quantize import ScalingMode

    return ScalingMode.DELAYED_TENSOR_SCALING if delayed else ScalingMode.CURRENT_TENSOR_SCALING


def _multiply(a: jax.Array, scale_inv_a, b: jax.Array, scale_inv_b, delayed: bool) -> jax.Array:
    """[m, k] x [n, k] in FP8 as [m, n] in bf16."""
    from transformer_engine.jax import cpp_extensions, quantize, sharding

    (m, k), (n, _) = a.shape, b.shape
    a, b = (
        quantize.ScaledTensorFactory.create_1x(
            data, scale_inv[None], scaling_mode=_mode(delayed), dq_dtype=jnp.bfloat16
        )
        for data, scale_inv in ((a, scale_inv_a), (b, scale_inv_b))
    )
    guard = sharding.global_shard_guard(sharding.MeshResource())
    with guard, empty_arrays_from(scale_inv_a), latency.of_product(2 * m * n * k, "fp8"):
        return cpp_extensions.gemm(a, b, contracting_dims=((1,), (1,)))
