"""Matmuls in MXFP8 and NVFP4: how weights are quantized at rest, and the three matmuls of a step.

Blocks run along the contraction, so each of the three matmuls needs its own operands, quantized
from the tensors in high precision. The forward matmul takes the input and the weight. The input's
gradient takes the output gradient and the weight. The weight's gradient takes the input and the
output gradient, both along the tokens. The residual of a matmul is its input's copy along tokens.
The forward pass of a layer that is recomputed quantizes along features only, and the recomputation
along tokens, and along features where it needs the result (`jax_internals.if_used`).

Here the tensors of a device are matrices, one for each expert: activations are `[E, T, I]` and `[E,
T, U]`, tokens by features, and weights are `[E, D, O]`. E is 1 without experts. A matmul contracts
D or O.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import compress
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, UInt32

from jaxbench import mesh
from jaxbench.jax_internals import if_used
from jaxbench.ops import draws
from jaxbench.ops.implementations import latency_hint
from jaxbench.ops.quantized import hadamard, kernels
from jaxbench.ops.quantized.block_formats import FORMATS, Blocks, dequantized, mxfp8, nvfp4
from jaxbench.ops.quantized.operand import Matmul, Operand
from jaxbench.ops.quantized.per_tensor import amax_of
from jaxbench.recipe.checks import require
from jaxbench.recipe.settings import AXES, BLOCKS, Precision

BLOCK_SCALED_DOT = "__op$block_scaled_dot"
"""The custom call that XLA replaces by cuDNN's block-scaled matmul. `jax.nn.scaled_matmul` makes it
too, but without its last operand, the scale of a whole result (XLA's block_scaling_rewriter.h)."""

Copies = dict[str, Blocks | Array]
"""The quantized copies (`Blocks.packed`) of a weight `[.., D, O]`, by the names of `copies`. A copy
that cannot be quantized at rest is replaced by the weight itself."""


def copies(precision: Precision, experts: bool) -> tuple[str, ...]:
    """The names of a weight's copies.

    `first` is for matmuls that contract the weight's first dimension (after the experts). `last` is
    for matmuls that contract the other dimensions; its blocks run along the last dimension. NVFP4's
    blocks are square, so without experts one copy, `square`, serves both. The `first` copy of
    experts is transposed, `[E, O, D]`, so that kernels read both copies along the contraction.
    """
    return ("square",) if precision.dtype == "nvfp4" and not experts else ("first", "last")


def at_rest(rows: int, name: str, precision: Precision) -> bool:
    """True if a copy is quantized before it is gathered. `rows` are the rows of a device's part of
    the weight. Blocks that have several rows must not be spread over two devices: MXFP8's `last`
    copy has blocks of one row, and NVFP4's blocks are square."""
    one_row = name == "last" and precision.dtype == "mxfp8"
    return one_row or rows % BLOCKS[precision.dtype] == 0


def quantize_weight(w: Array, amax: Array, precision: Precision, experts: bool) -> Copies:
    """The copies of a device's part of a weight, as matrices `[.., D, O]`. `amax` is the amax of
    the whole weight."""
    w = w.reshape(*w.shape[: int(experts) + 1], -1)
    check(precision, {"columns of a weight": w.shape[-1]})
    return {
        name: _quantized(w, name, amax, precision).packed()
        if at_rest(w.shape[-2], name, precision)
        else w
        for name in copies(precision, experts)
    }


def quantize_stack(w: Array, amax: Array, precision: Precision, experts: bool) -> Copies:
    """The copies of a weight at rest of all layers of a stack, on the current mesh. The weight of
    each layer has its own fp32 scale."""
    quantize = partial(quantize_weight, precision=precision, experts=experts)
    columns = 2 + experts  # of the matrix, after layers, experts and rows
    *before, rows = (split := mesh.partition(w))[:columns]
    # The columns replace several dimensions and take the axes of all of them.
    of_columns = tuple(jax.tree.leaves(split[columns:])) or None
    inverse = PartitionSpec() if precision.dtype == "nvfp4" else None
    on_a_device = jax.typeof(w).sharding.shard_shape(w.shape)[columns - 1]
    specs: dict[str, Any] = {}
    for copy in copies(precision, experts):
        if at_rest(on_a_device, copy, precision):
            turned = experts and copy == "first"
            matrix = (of_columns, rows) if turned else (rows, of_columns)
            spec = PartitionSpec(*before, *matrix)
            specs[copy] = Blocks(spec, spec, inverse)
        else:
            specs[copy] = PartitionSpec(*before, rows, of_columns)
    parts = mesh.on_each_device(jax.vmap(quantize), specs, check_vma=False)(mesh.unmarked(w), amax)
    # We leave out the scale of a whole weight: its gradient is an unreduced zero, and XLA would
    # merge it with other zeros.
    return jax.tree.map(lambda part: mesh.accumulating(part) if part.ndim > 1 else part, parts)


def _quantized(w: Array, name: str, amax: Array, precision: Precision) -> Blocks:
    """One copy of a weight `[D, O]`, or of the weights of experts `[E, D, O]`."""
    experts = w.ndim == 3
    turned = experts and name == "first"
    matrix = w.swapaxes(1, 2) if turned else w
    axis = matrix.ndim - (2 if name == "first" and not turned else 1)
    if precision.dtype == "mxfp8":
        return mxfp8(matrix, axis)
    blocks = nvfp4(matrix, (w.ndim - 2, w.ndim - 1), amax)
    return _of_each_row(blocks) if experts else blocks


def _of_each_row(w: Blocks) -> Blocks:
    """Blocks `[E, rows, columns]` with a scale for every row."""
    in_block = w.values.shape[1] // w.scales.shape[1]
    return Blocks(w.values, jnp.repeat(w.scales, in_block, 1), w.inverse)


def check(precision: Precision, sizes: dict[str, int]) -> None:
    """Raises RecipeError if blocks do not divide the sizes that a device quantizes."""
    block = BLOCKS[precision.dtype]
    for what, size in sizes.items():
        require(
            size % block == 0,
            f"precision.dtype = {precision.dtype}: blocks of {block} must divide the {size} {what} "
            "that a device holds; fewer ranks (fsdp, tensor, context) leave it more",
        )


def quantize_activation(
    x: Float[Array, "E T F"],
    precision: Precision,
    of: kernels.Rows | None,
    draw: UInt32[Array, ""] | None = None,
    wanted: tuple[bool, bool] = kernels.BOTH,
) -> tuple[Blocks, ...]:
    """Quantizes a device's part of an activation or of its gradient, or some of its rows. Returns
    what is `wanted` of (`[E, T, F]` in blocks along features, `[E, F, T]` in blocks along tokens),
    packed.

    In NVFP4 each of the two has one fp32 scale for this part. Gradients, which have a `draw`, are
    rounded stochastically. With `precision.hadamard` the operand of a weight's gradient is
    transformed.
    """
    tokens = {} if of else {"tokens of a microbatch": x.shape[1]}
    check(precision, tokens | {"features": x.shape[2]})
    seeds = None if draw is None else jnp.stack([draws.fold(draw, n) for n in range(2)])
    if mesh.platform() == "gpu" and kernels.takes(x, of):
        if precision.dtype == "mxfp8":
            return kernels.quantize_mxfp8(x, of, wanted)
        return kernels.quantize_nvfp4(x, seeds, precision.hadamard, of, wanted)
    if of and of.index is not None:
        x = jnp.take(x, of.index, axis=1, mode="fill", fill_value=0)
        x = x.reshape(of.experts, -1, x.shape[2])

    def quantized(matrix: Array, n: int) -> Blocks:
        if precision.dtype == "mxfp8":
            return mxfp8(matrix, 2)
        uniform = None if seeds is None else partial(draws.uniform, seeds[n])
        return nvfp4(matrix, (2,), amax_of(matrix), uniform)

    turned = precision.dtype == "nvfp4" and precision.hadamard
    matrices = x, (hadamard.transformed(x, 1) if turned else x).swapaxes(1, 2)
    return tuple(
        quantized(matrix, n).packed() for n, matrix in compress(enumerate(matrices), wanted)
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Matmuls:
    """The matmuls of one device, which `dot` uses. These are XLA's, with dense weights. Subclasses
    are Transformer Engine's (`te_blocks`) and those of groups (`ops.grouped.scaled` and
    `ops.grouped.batched`)."""

    def quantize(
        self,
        x: Array,
        precision: Precision,
        side: str,
        draw: Array | None = None,
        wanted: tuple[bool, bool] = kernels.BOTH,
    ) -> tuple[Blocks, ...]:
        """`quantize_activation` of an activation that is multiplied by the copy `side`."""
        x, of = self.rows(x, side)
        return quantize_activation(x, precision, of, draw, wanted)

    def rows(self, x: Array, side: str) -> tuple[Array, kernels.Rows | None]:
        """(an activation that is multiplied by the copy `side`, its rows that are quantized)."""
        return x, None

    def by_weight(self, rows: Blocks, w: Blocks, side: str) -> Array:
        """Multiplies the first result of `quantize` by a gathered weight, which is the copy
        `side`."""
        return multiply(rows, operand(w, side))

    def of_weight(self, first: Blocks, last: Blocks) -> Array:
        """The gradient of `[E, D, O]` from the second results of `quantize`, for the activation
        with the features D and the activation with the features O."""
        return multiply(first, last)


def dot(matmul: Matmul, x: jax.Array, w: Operand, by: Matmuls) -> jax.Array:
    """Matmul of a bf16 activation with a weight at rest. The matmul and both of its gradients run
    in the recipe's format."""
    return _dot(matmul, w.precision, x, w.weight, w.stored, w.seed, by)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dot(matmul, precision, x, weight, stored, seed, by):
    return _forward(matmul, precision, x, weight, stored, seed, by)[0]


def _forward(matmul, precision, x, weight, stored, seed, by):
    x_dims, w_dims, y_dims = matmul.dims
    side, of = "first" if _sums_first(matmul) else "last", FORMATS[precision.dtype]
    copy, gather = _copy(stored, side, matmul, precision)

    def quantize(wanted, matrix, by):
        return by.quantize(matrix, precision, side, wanted=wanted)

    def local(x, copy, weight, by):
        with matmul.scope():
            w = gather(copy)
            matrix = _matrix(x, x_dims, w_dims)
            rows, columns = if_used(quantize, 2, matrix, by)
            y = by.by_weight(rows.unpacked(of), w, side)
        sizes = dict(zip(x_dims + w_dims, x.shape + _shape(w, side, matmul, weight), strict=True))
        # A residual has no logical dimensions: it is one matrix on each device.
        columns = jax.tree.map(lambda part: part[None], columns)
        return y.reshape([sizes.get(d, -1) for d in y_dims]), columns

    specs = matmul.y_spec, mesh.per_device()
    y, columns = mesh.on_each_device(local, specs, check_vma=False)(x, copy, weight, by)
    return y, (columns, weight, stored, seed, by)


def _backward(matmul, precision, residuals, dy):
    columns, weight, stored, seed, by = residuals
    x_dims, w_dims, y_dims = matmul.dims
    side, of = "last" if _sums_first(matmul) else "first", FORMATS[precision.dtype]
    copy, gather = _copy(stored, side, matmul, precision)
    dims = mesh.gathered_dims(weight, matmul.experts)

    def local(dy, columns, copy, weight, seed, by):
        with matmul.scope():
            draw = None if seed is None else draws.fold(seed, *_place())
            matrix = _matrix(dy, y_dims, w_dims)
            rows, of_dy = by.quantize(matrix, precision, side, draw)
            w = gather(copy)
            dx = by.by_weight(rows.unpacked(of), w, side)
            of_dy = of_dy.unpacked(of)
            of_x = jax.tree.map(lambda part: part[0], columns).unpacked(of)
            dw = by.of_weight(*((of_x, of_dy) if side == "last" else (of_dy, of_x)))
        w_shape = _shape(w, side, matmul, weight)
        sizes = dict(zip(y_dims + w_dims, dy.shape + w_shape, strict=True))
        dx = dx.reshape([sizes.get(d, -1) for d in x_dims])
        return dx, mesh.scatter(dw.reshape(w_shape), dims)

    specs = matmul.dx_spec, mesh.cotangent_spec(weight)
    run = mesh.on_each_device(local, specs, check_vma=False)
    dx, dw = run(dy, columns, copy, weight, seed, by)
    return dx, dw, None, None, None


_dot.defvjp(_forward, _backward)


def _sums_first(matmul: Matmul) -> bool:
    """True if the matmul contracts the first dimension of its weight (after the experts)."""
    x, w, _ = matmul.dims
    return w[int(matmul.experts is not None)] in x


def _copy(
    stored: Copies, side: str, matmul: Matmul, precision: Precision
) -> tuple[Blocks | Array, Callable[[Any], Blocks]]:
    """The copy of a weight for matmuls that contract its `first` dimension or its `last` ones.
    Returns (the copy, a function that gathers it inside a `shard_map` and quantizes it if
    necessary)."""
    name = side if side in stored else "square"
    copy = stored[name]
    split = mesh.gathered_dims(copy.values if isinstance(copy, Blocks) else copy, matmul.experts)

    def gather(copy: Any) -> Blocks:
        if isinstance(copy, Blocks):
            whole = copy.map(lambda part: mesh.gather(part, split))
            return whole.unpacked(FORMATS[precision.dtype])
        weight = mesh.gather(copy, split)
        return _quantized(weight, name, amax_of(weight), precision)

    return copy, gather


def _place() -> list[Array]:
    """The indices of this device on the axes of the mesh. Called inside a `shard_map`."""
    return [jax.lax.axis_index(axis) for axis in mesh.used(*AXES)]


def _matrix(x: Array, dims: str, w_dims: str) -> Float[Array, "E T F"]:
    """Reshapes an activation to a matrix for each expert. Its dimensions are experts, if any, then
    tokens, then features."""
    experts = int(dims[0] in w_dims)
    tokens = sum(dim not in w_dims for dim in dims)
    features = prod(x.shape[experts + tokens :])
    return x.reshape(x.shape[0] if experts else 1, -1, features)


def _shape(w: Blocks, side: str, matmul: Matmul, weight: Array) -> tuple[int, ...]:
    """The shape of a gathered weight with all of its dimensions. `weight` is the part at rest."""
    rows = w.values.shape[:-1]
    if matmul.experts is not None and side == "first":
        rows = rows[0], w.values.shape[-1]
    return *rows, *weight.shape[len(rows) :]


def operand(w: Blocks, side: str) -> Blocks:
    """A gathered weight as `[E, kept, contracted]`, with a scale for each kept element."""
    if w.values.ndim == 3:
        return w

    def matrix(part: Array) -> Array:
        return part[None].swapaxes(1, 2) if side == "first" else part[None]

    return _of_each_row(w.map(matrix))


def multiply(a: Blocks, b: Blocks) -> Float[Array, "E m n"]:
    """`[E, m, k]` times the transpose of `[E, n, k]`, in bf16. Blocks run along k.

    On a GPU cuDNN's kernel multiplies its sums in fp32 by the scale of both tensors together. XLA
    takes this scale in bf16, which rounds it as much as the result.
    """
    if mesh.platform() != "gpu":  # jax 0.10 has no such matmul on a CPU
        wide = jnp.einsum("emk,enk->emn", dequantized(a), dequantized(b))
        return wide.astype(jnp.bfloat16)
    (experts, m, k), n = a.values.shape, b.values.shape[1]
    operands = [a.values, b.values, a.scales, b.scales]
    if a.inverse is not None and b.inverse is not None:
        operands.append((a.inverse * b.inverse).astype(jnp.bfloat16))
    call = jax.ffi.ffi_call(
        BLOCK_SCALED_DOT,
        jax.ShapeDtypeStruct((experts, m, n), jnp.bfloat16),
        custom_call_api_version=2,
        legacy_backend_config="",
    )
    with latency_hint(2 * experts * m * n * k, a.format):
        return call(*operands)
