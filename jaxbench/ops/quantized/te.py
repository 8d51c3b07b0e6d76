"""Matmuls by Transformer Engine, which quantizes inputs and gradients and multiplies. This file has
the FP8 matmuls and what the block-scaled ones (`te_blocks`) share with them.

Gathers, scatters, transposes and amax histories are ours. We use its functions `quantize` and
`gemm`, not its dense layer. The dense layer would quantize a weight in every pass, gather it in
bf16, and save inputs in bf16 for the backward pass. On Hopper an FP8 matmul needs the summed
dimension last in both operands, so every FP8 matmul here is [m, k] x [n, k].
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.jax_internals import empty_arrays_from, replaced
from jaxbench.ops.implementations import latency_hint
from jaxbench.ops.quantized import hadamard
from jaxbench.ops.quantized.operand import Matmul, Operand, gather_quantized
from jaxbench.ops.quantized.per_tensor import GRADIENTS, VALUES, amax_of
from jaxbench.recipe.settings import BLOCKS, Precision

SCALING = {"delayed": "1", "current": "3", "mxfp8": "2", "nvfp4": "4"}
"""The `JAXX_Scaling_Mode` of each `precision.scaling` of FP8 and of each block-scaled format. It is
an attribute of matmuls and quantizations."""


@cache
def _unimportable() -> str | None:
    try:
        from transformer_engine.jax import cpp_extensions, quantize  # noqa: F401
    except Exception as error:  # a missing module, library or driver: each raises its own
        return " ".join(str(error).split()) or type(error).__name__
    return None


def refusal(platform: str) -> str | None:
    """Why Transformer Engine cannot multiply here; None if it can."""
    if platform != "gpu":
        return "Transformer Engine needs an NVIDIA GPU"
    if reason := _unimportable():
        return f"Transformer Engine cannot be imported (README: Transformer Engine): {reason}"
    return None


def takes(matmul: Matmul) -> bool:
    """True for the matmuls that it can compute: all except the batched ones of experts."""
    return matmul.experts is None


def scaling_mode(precision: Precision) -> str:
    """The scaling mode that the quantizations and matmuls of a recipe must have."""
    return SCALING[precision.scaling if precision.dtype == "fp8" else precision.dtype]


def dot(matmul: Matmul, x: jax.Array, w: Operand) -> jax.Array:
    """Einsum of a bf16 activation with a weight at rest, as `xla.dot`."""
    return _dot(matmul, x, w.weight, w.observed, w.stored, w.scale_inv)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(matmul, x, weight, observed, stored, scale_inv):
    return _forward(matmul, x, weight, observed, stored, scale_inv)[0]


def _forward(matmul, x, weight, observed, stored, scale_inv):
    dims, scaling = mesh.gathered_dims(stored), _scaling_of(observed)

    def local(x, stored, scale_inv):
        with matmul.scope():
            shapes = _Shapes(matmul)
            data, scale_inv_x, amax = _quantized(shapes.flat(x), VALUES, scale_inv[0], scaling)
            weight = gather_quantized(stored, dims, scale_inv[1])
            y = _multiply(data, scale_inv_x, shapes.outputs_first(weight), scale_inv[1], scaling)
        y = y.reshape(*x.shape[: shapes.batch], *shapes.outputs(weight))
        return y, data.reshape(x.shape), scale_inv_x[None], amax[None]

    per_device = mesh.per_device()
    specs = matmul.y_spec, mesh.spec_of(x), per_device, per_device
    run = mesh.on_each_device(local, specs, check_vma=False)
    y, data, scale_inv_x, amax = run(x, stored, scale_inv)
    return y, (data, scale_inv_x, amax, stored, scale_inv, observed)


def _backward(matmul, residuals, dy):
    data, scale_inv_x, amax, stored, scale_inv, observed = residuals
    dims, scaling = mesh.gathered_dims(stored), _scaling_of(observed)

    def local(dy, data, scale_inv_x, amax, stored, scale_inv):
        with matmul.scope():
            shapes = _Shapes(matmul)
            weight = gather_quantized(stored, dims, scale_inv[1])
            flat = dy.reshape(shapes.flat(data).shape[0], -1)
            gradient, scale_inv_dy, amax_dy = _quantized(flat, GRADIENTS, scale_inv[2], scaling)
            inputs_first = shapes.inputs_first(weight)
            dx = _multiply(gradient, scale_inv_dy, inputs_first, scale_inv[1], scaling)
            x = shapes.flat(data).T, scale_inv_x[0]
            operands = (x, (gradient.T, scale_inv_dy))
            # The order follows the weight's dimensions: inputs or outputs first.
            (a, b) = operands if shapes.summed_first else operands[::-1]
            dw = _multiply(*a, *b, scaling).reshape(weight.shape)
        return dx.reshape(data.shape), mesh.scatter(dw, dims), jnp.stack([amax, amax_dy[None]])

    specs = (matmul.dx_spec, mesh.cotangent_spec(stored), PartitionSpec(None, *mesh.per_device()))
    run = mesh.on_each_device(local, specs, check_vma=False)
    dx, dw, amaxes = run(dy, data, scale_inv_x, amax, stored, scale_inv)
    return dx, dw, None if observed is None else amaxes, None, None


_dot.defvjp(_forward, _backward)


def _scaling_of(observed: jax.Array | None) -> str:
    """The `precision.scaling` of FP8. Only current scaling has no `observed`."""
    return "current" if observed is None else "delayed"


class _Shapes:
    """Reshapes one device's operands of a matmul to matrices."""

    def __init__(self, matmul: Matmul):
        x_dims, w_dims, out = matmul.dims
        summed = "".join(dim for dim in x_dims if dim not in out)
        kept = "".join(dim for dim in w_dims if dim in out)
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
        """The dimensions of a weight that the matmul keeps."""
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
    x: jax.Array, dtype: Any, scale_inv: jax.Array, scaling: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(x in FP8, inverse scale, amax). Under delayed scaling one kernel computes all of it. Current
    scaling computes the scale first, and its amax is not used."""
    from transformer_engine.jax import quantize

    # Without `scaling_mode` the delayed quantizer would default to current scaling.
    layout = {"scaling_mode": mode(scaling), "q_layout": quantize.QuantizeLayout.ROWWISE}
    quantizer: Any = quantize.CurrentScaleQuantizer(q_dtype=dtype, **layout)
    if scaling == "delayed":
        quantizer = quantize.DelayedScaleQuantizer(
            q_dtype=dtype, scale=1 / scale_inv[None], amax_history=jnp.zeros(2), **layout
        )
    scaled = quantize_by(quantizer, x)
    # The GPU kernel returns the amax; the fallback on a CPU does not.
    return scaled.data, scaled.scale_inv[0], scaled.amax[0] if on_gpu() else amax_of(x)


def _multiply(a: jax.Array, scale_inv_a, b: jax.Array, scale_inv_b, scaling: str) -> jax.Array:
    """[m, k] x [n, k] in FP8. The result is [m, n] in bf16."""
    return multiply((a, scale_inv_a[None]), (b, scale_inv_b[None]), (1, 1), scaling)


def on_gpu() -> bool:
    """True if Transformer Engine's kernels quantize, and not its fallback in plain JAX."""
    from transformer_engine.jax.cpp_extensions import quantization

    return quantization.QuantizePrimitive.enabled()


def mode(scaling: str) -> Any:
    """Transformer Engine's name for a key of `SCALING`."""
    from transformer_engine.jax.quantize import ScalingMode
    from transformer_engine_jax import JAXX_Scaling_Mode

    return ScalingMode(JAXX_Scaling_Mode(int(SCALING[scaling])))


@contextmanager
def _traced(x: jax.Array) -> Iterator[None]:
    """Lets us trace Transformer Engine's functions inside a `shard_map`, as for one device, which
    holds `x`. We replace its matrix of the Hadamard transform by the same matrix that is not a
    constant (`hadamard.matrix`)."""
    from transformer_engine.jax import sharding
    from transformer_engine.jax.cpp_extensions import quantization

    alone = jax.sharding.AbstractMesh((), ())
    with (
        sharding.global_shard_guard(sharding.MeshResource()),
        replaced(sharding, "_get_mesh", lambda: alone),
        replaced(quantization, "get_rht_matrix", lambda: hadamard.matrix(jnp.bfloat16)),
        empty_arrays_from(x),
    ):
        yield


def quantize_by(quantizer: Any, x: jax.Array) -> Any:
    """Quantizes a matrix by one of Transformer Engine's quantizers."""
    from transformer_engine.jax import cpp_extensions

    with _traced(x):
        return cpp_extensions.quantize(x, quantizer)


def multiply(
    a: tuple[jax.Array, ...],
    b: tuple[jax.Array, ...],
    contracted: tuple[int, int],
    scaling: str,
) -> jax.Array:
    """The matmul of two matrices, in bf16. `contracted` is the summed dimension of each. A matrix
    comes as values, inverse scales and, in NVFP4, its amax `[1]`. `scaling` is a key of
    `SCALING`."""
    from transformer_engine.jax import cpp_extensions, quantize

    tensors = [
        quantize.ScaledTensorFactory.create_1x(
            *parts, scaling_mode=mode(scaling), dq_dtype=jnp.bfloat16, is_colwise=dim == 0
        )
        for parts, dim in zip((a, b), contracted, strict=True)
    ]
    m, n = (x[0].shape[1 - dim] for x, dim in zip((a, b), contracted, strict=True))
    flops, dtype = 2 * m * n * a[0].shape[contracted[0]], scaling if scaling in BLOCKS else "fp8"
    # In MXFP8 it swizzles the scales of both operands by XLA, whose two kernels are marked too.
    marked = 3 if scaling == "mxfp8" else 1
    with _traced(a[1]), latency_hint(flops // marked, dtype):
        return cpp_extensions.gemm(*tensors, contracting_dims=tuple((dim,) for dim in contracted))
