"""FP8 products by Transformer Engine's kernels: it quantizes inputs and gradients, and multiplies;
we gather, scatter, transpose and keep the history.

Its lower functions (`quantize`, `gemm`) are used and not its dense layer, which would quantize a
weight in every pass, gather it in bf16, and keep inputs in bf16 for the backward pass. On Hopper an
FP8 product wants the summed dimension last in both operands: every product here is [m, k] x [n, k].
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from math import isqrt, prod
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.ops import latency
from jaxbench.ops.fp8.operand import Operand, Product, gathered
from jaxbench.ops.fp8.per_tensor import GRADIENTS, VALUES, magnitude
from jaxbench.ops.twice import Twice
from jaxbench.recipe.settings import Precision
from jaxbench.xla.hlo import Instruction, Program, Scope, Work

GEMM, QUANTIZE = "te_gemm_v2_ffi", "te_dbias_quantize_ffi"
"""Targets of its custom calls."""

SCALING = {"delayed": "1", "current": "3"}
"""Its numbers (`NVTEScalingMode`) for the ways to find a scale, as they stand in every call."""


@cache
def _unimportable() -> str | None:
    try:
        from transformer_engine.jax import cpp_extensions, quantize  # noqa: F401
    except Exception as error:  # a missing module, library or driver: each raises its own
        return " ".join(str(error).split()) or type(error).__name__
    return None


def refusal(precision: Precision, platform: str) -> str | None:
    """Why it cannot multiply here; None if it can."""
    if platform != "gpu":
        return "Transformer Engine needs an NVIDIA GPU"
    if precision.scaling == "current" and precision.margin:
        return "Transformer Engine's current scaling leaves no precision.margin"
    if reason := _unimportable():
        return f"Transformer Engine cannot be imported (README: Transformer Engine): {reason}"
    return None


def takes(product: Product) -> bool:
    """Whether it has this product: not the batches of products that experts are."""
    return product.experts is None


def work(i: Instruction, scope: Scope) -> Work:
    """A product of [m, k] and [n, k]: the square root of the three arrays' sizes multiplied is
    m n k."""
    dtype = scope[i.operands[0]].arrays[0][0]
    x, w = (prod(scope[i.operands[n]].arrays[0][1]) for n in (0, 2))
    y = prod(i.arrays[0][1])
    mnk = isqrt(x * w * y)
    return Work("product", dtype, 2 * mnk, (1, mnk // w, mnk // x, mnk // y))


def problem(program: Program, precision: Precision) -> str | None:
    """What of a compiled program is not as the recipe says; None if all is."""
    calls = [i for i, _, _ in program.walk() if i.target in (GEMM, QUANTIZE)]
    modes = {i.attribute(r"scaling_mode = (\d+)") for i in calls}
    if modes == {SCALING[precision.scaling]}:
        return None
    return (
        f"{precision.scaling} scaling was asked for, but Transformer Engine was called with the "
        f"modes {sorted(map(str, modes))} instead of {SCALING[precision.scaling]}"
    )


def dot(product: Product, x: Twice, w: Operand) -> Twice:
    """Einsum of a bf16 activation with a weight at rest, as `xla.dot`. Its kernels take what is in
    memory: the first of each value."""
    return Twice.of(_dot(product, x.value, w.kernel, w.observed, w.stored, w.inverse))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(product, x, kernel, observed, stored, inverse):
    return _forward(product, x, kernel, observed, stored, inverse)[0]


def _forward(product, x, kernel, observed, stored, inverse):
    dims, delayed = mesh.gathered_dims(stored), observed is not None

    def local(x, stored, inverse):
        with product.scope():
            shapes = _Shapes(product, x)
            data, inverse_x, amax = _quantized(shapes.flat(x), VALUES, inverse[0], delayed)
            weight = gathered(stored, dims, inverse[1])
            y = _multiply(data, inverse_x, shapes.outputs_first(weight), inverse[1], delayed)
        y = y.reshape(*x.shape[: shapes.batch], *shapes.outputs(weight))
        return y, data.reshape(x.shape), inverse_x[None], amax[None]

    each = mesh.per_device()
    specs = product.y_spec, PartitionSpec(*mesh.partition(x)), each, each
    run = mesh.on_each_device(local, specs, check_vma=False)
    y, data, inverse_x, amax = run(x, stored, inverse)
    return y, (data, inverse_x, amax, stored, inverse, observed)


def _backward(product, residuals, dy):
    data, inverse_x, amax, stored, inverse, observed = residuals
    dims, delayed = mesh.gathered_dims(stored), observed is not None

    def local(dy, data, inverse_x, amax, stored, inverse):
        with product.scope():
            shapes = _Shapes(product, data)
            weight = gathered(stored, dims, inverse[1])
            flat = dy.reshape(shapes.flat(data).shape[0], -1)
            gradient, inverse_dy, amax_dy = _quantized(flat, GRADIENTS, inverse[2], delayed)
            inputs_first = shapes.inputs_first(weight)
            dx = _multiply(gradient, inverse_dy, inputs_first, inverse[1], delayed)
            x = shapes.flat(data).T, inverse_x[0]
            operands = (x, (gradient.T, inverse_dy))
            # The gradient as the weight lies, inputs or outputs first.
            (a, b) = operands if shapes.summed_first else operands[::-1]
            dw = _multiply(*a, *b, delayed).reshape(weight.shape)
        return dx.reshape(data.shape), mesh.scatter(dw, dims), jnp.stack([amax, amax_dy[None]])

    specs = (product.dx_spec, mesh.cotangent_spec(stored), PartitionSpec(None, *mesh.per_device()))
    run = mesh.on_each_device(local, specs, check_vma=False)
    dx, dw, seen = run(dy, data, inverse_x, amax, stored, inverse)
    return dx, dw, seen if delayed else None, None, None


_dot.defvjp(_forward, _backward)


class _Shapes:
    """A product as one of matrices, for one device's input."""

    def __init__(self, product: Product, x: jax.Array):
        into, through, out = product.letters
        summed, kept = [
            "".join(dim for dim in dims if (dim in out) == shown)
            for dims, shown in ((into, False), (through, True))
        ]
        assert into.endswith(summed)
        assert out.endswith(kept)
        assert through in (summed + kept, kept + summed)
        self.batch = len(into) - len(summed)
        self.summed_first = through.startswith(summed)
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
    x: jax.Array, dtype: Any, inverse: jax.Array, delayed: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(x in FP8, inverse scale, largest magnitude), in one kernel under delayed scaling; current
    scaling finds its scale first, and says no magnitude."""
    from transformer_engine.jax import cpp_extensions, quantize, sharding

    # Its delayed quantizer inherits the mode of current scaling, unless it is told.
    layout = {"scaling_mode": _mode(delayed), "q_layout": quantize.QuantizeLayout.ROWWISE}
    quantizer: Any = quantize.CurrentScaleQuantizer(q_dtype=dtype, **layout)
    if delayed:
        quantizer = quantize.DelayedScaleQuantizer(
            q_dtype=dtype, scale=1 / inverse[None], amax_history=jnp.zeros(2), **layout
        )
    with sharding.global_shard_guard(sharding.MeshResource()), _empty_from(x):
        scaled = cpp_extensions.quantize(x, quantizer)
    # Its kernel takes the magnitude too; what stands in for it on a CPU does not say it.
    kernel = cpp_extensions.quantization.QuantizePrimitive.enabled()
    return scaled.data, scaled.scale_inv[0], scaled.amax[0] if kernel else magnitude(x)


def _mode(delayed: bool) -> Any:
    from transformer_engine.jax.quantize import ScalingMode

    return ScalingMode.DELAYED_TENSOR_SCALING if delayed else ScalingMode.CURRENT_TENSOR_SCALING


def _multiply(a: jax.Array, inverse_a, b: jax.Array, inverse_b, delayed: bool) -> jax.Array:
    """[m, k] x [n, k] in FP8 as [m, n] in bf16."""
    from transformer_engine.jax import cpp_extensions, quantize, sharding

    (m, k), (n, _) = a.shape, b.shape
    a, b = (
        quantize.ScaledTensorFactory.create_1x(
            data, inverse[None], scaling_mode=_mode(delayed), dq_dtype=jnp.bfloat16
        )
        for data, inverse in ((a, inverse_a), (b, inverse_b))
    )
    guard = sharding.global_shard_guard(sharding.MeshResource())
    with guard, _empty_from(inverse_a), latency.of_product(2 * m * n * k, "fp8"):
        return cpp_extensions.gemm(a, b, contracting_dims=((1,), (1,)))


@contextmanager
def _empty_from(x: jax.Array) -> Iterator[None]:
    """Arrays without elements, which Transformer Engine passes to its kernels, are made from `x`.

    As constants they are moved out of the `shard_map` when a scan around it is differentiated, and
    the partitioner of jax 0.11 crashes on them.
    """
    make = jnp.empty

    def empty(shape: Any, dtype: Any = None, **options: Any) -> jax.Array:
        if 0 in np.atleast_1d(shape):
            return x.ravel()[:0].astype(dtype).reshape(shape)
        return make(shape, dtype, **options)

    with mock.patch.object(jnp, "empty", empty):
        yield
