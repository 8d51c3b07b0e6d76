"""FP8 matrix products: per-tensor scaling, the XLA-native product with its gradients, and the state
of delayed scaling (Micikevicius et al. 2022).

Inputs and weights are e4m3, gradients of outputs e5m2, results bf16. A tensor is held as
`x / inverse scale` in FP8; XLA turns the product of two such tensors and their inverse scales into
one scaled cuBLASLt product on GPUs, and computes it in bf16 elsewhere.
"""

import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxbench import hlo, mesh
from jaxbench.config import Precision

PRODUCTS = {
    "qkv": "attention, input projections",
    "out": "attention and Mamba-2, output projection",
    "gate_up": "gated MLP and experts, input projections",
    "up": "MLP without gate, input projection",
    "down": "MLP and experts, output projection",
    "in_proj": "Mamba-2, input projection",
}
"""The products that run in FP8, by the name of their weight in a layer. All others do not: head,
router, attention scores, the scan of Mamba-2."""

VALUES, GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST = {dtype: float(jnp.finfo(dtype).max) for dtype in (VALUES, GRADIENTS)}
"""The largest finite value: 448 for e4m3, 57344 for e5m2."""

TENSORS = (VALUES, VALUES, GRADIENTS)
"""Types of the three tensors of a product: input, weight, gradient of the output."""

SCOPE = "fp8."
"""Prefix of a product's name in the program, from where `compiled_products` reads it."""

State = dict[str, jax.Array]
"""Delayed scaling: for each product the largest magnitudes of past steps, `[layers, 3, history]`,
newest first; the three tensors are input, weight and gradient of the output."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Operand:
    """A weight whose product runs in FP8, in the place of the weight in a layer.

    `kernel` is the bf16 weight at rest, which receives the gradient. `stored` is what a pass
    gathers: its FP8 form, or the kernel itself. `inverse` are the inverse scales of input, weight
    and gradient; under current scaling the first and the last are unused. `observed` is zeros
    `[2, devices]`, whose cotangent is the largest magnitude of input and gradient on each device;
    None under current scaling. Both are None while `pack` has taken them out.
    """

    kernel: jax.Array
    stored: jax.Array
    inverse: jax.Array | None
    observed: jax.Array | None
    name: str = field(metadata={"static": True})
    precision: Precision = field(metadata={"static": True})


def inverse_scale(amax: jax.Array, dtype: Any, margin: int = 0) -> jax.Array:
    """What a tensor of largest magnitude `amax` is divided by: amax 2^margin / (largest value of
    `dtype`); 1 for zeros.

    Rounded up to a bf16 value, so that the bf16 factor in `multiply` is this very number. An `amax`
    that is not finite is passed on, so that the loss is not finite either.
    """
    smallest = jnp.finfo(jnp.float32).tiny
    exact = jnp.maximum(amax * (2.0**margin / LARGEST[dtype]), smallest)
    bits = jax.lax.bitcast_convert_type(exact, jnp.uint32) + jnp.uint32(0xFFFF)
    rounded = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(amax == 0, 1.0, jnp.where(jnp.isfinite(amax), rounded, amax))


def quantize(x: jax.Array, inverse: jax.Array, dtype: Any) -> jax.Array:
    """`x / inverse` rounded to FP8. What is out of range saturates at the largest value; NaN
    stays."""
    limit = LARGEST[dtype]
    return jnp.clip(x.astype(jnp.float32) * (1 / inverse), -limit, limit).astype(dtype)


def multiply(equation: str, a: jax.Array, inverse_a, b: jax.Array, inverse_b) -> jax.Array:
    """Einsum of two FP8 tensors with their inverse scales, in bf16."""
    return jnp.einsum(equation, _dequantize(a, inverse_a), _dequantize(b, inverse_b))


def _dequantize(x: jax.Array, inverse: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16) * inverse.astype(jnp.bfloat16)


def magnitude(x: jax.Array, axis: Any = None) -> jax.Array:
    """The largest magnitude in `x`, fp32."""
    return jnp.max(jnp.abs(x), axis).astype(jnp.float32)


def dot(equation: str, x: jax.Array, w: Operand, spec: PartitionSpec) -> jax.Array:
    """Einsum of a bf16 activation with a weight at rest, partitioned by `spec`: this product and
    both of its gradients in FP8.

    Current scaling takes the scale of each device's own part of input and gradient, delayed scaling
    that of past steps on all devices.
    """
    product = Product(equation, spec, mesh.cotangent_spec(x), w.name, w.precision.margin)
    return _dot(product, x, w.kernel, w.observed, w.stored, w.inverse)


@dataclass(frozen=True)
class Product:
    """What forward and backward pass of a product know when they are traced."""

    equation: str
    y_spec: PartitionSpec
    dx_spec: PartitionSpec
    name: str
    margin: int

    @property
    def experts(self) -> int | None:
        """Which dimension of the weight counts experts, of which each rank uses its own."""
        through = self.equation.split("->")[0].split(",")[1]
        return through.index("E") if "E" in through else None

    def scope(self) -> Any:
        """Names the operations, for `compiled_products`."""
        return jax.named_scope(SCOPE + self.name)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(product, x, kernel, observed, stored, inverse):
    return _forward(product, x, kernel, observed, stored, inverse)[0]


def _forward(product, x, kernel, observed, stored, inverse):
    current, shards = observed is None, mesh.shards(stored, product.experts)

    def local(x, stored, inverse):
        with product.scope():
            amax = magnitude(x)
            inverse_x = inverse_scale(amax, VALUES, product.margin) if current else inverse[0]
            quantized = quantize(x, inverse_x, VALUES)
            weight = _gathered(stored, shards, inverse[1])
            y = multiply(product.equation, quantized, inverse_x, weight, inverse[1])
        return y, quantized, amax[None]

    specs = product.y_spec, PartitionSpec(*mesh.partition(x)), mesh.per_device()
    y, quantized, amax = jax.shard_map(local, out_specs=specs, check_vma=False)(x, stored, inverse)
    return y, (quantized, amax, stored, inverse, observed)


def _backward(product, residuals, dy):
    quantized, amax, stored, inverse, observed = residuals
    current, shards = observed is None, mesh.shards(stored, product.experts)
    inputs, y = product.equation.split("->")
    x, w = inputs.split(",")

    def local(dy, quantized, amax, stored, inverse):
        with product.scope():
            amax_dy = magnitude(dy)
            inverse_x, inverse_w, inverse_dy = inverse
            if current:
                inverse_x = inverse_scale(amax[0], VALUES, product.margin)
                inverse_dy = inverse_scale(amax_dy, GRADIENTS, product.margin)
            gradient = quantize(dy, inverse_dy, GRADIENTS)
            # Together: where the largest magnitude is taken later, the bf16 gradient is kept alive.
            gradient, amax_dy = jax.lax.optimization_barrier((gradient, amax_dy))
            weight = _gathered(stored, shards, inverse_w)
            dx = multiply(f"{y},{w}->{x}", gradient, inverse_dy, weight, inverse_w)
            dw = multiply(f"{x},{y}->{w}", quantized, inverse_x, gradient, inverse_dy)
        return dx, mesh.scatter(dw, shards), jnp.stack([amax, amax_dy[None]])

    specs = (product.dx_spec, mesh.cotangent_spec(stored), PartitionSpec(None, *mesh.per_device()))
    dx, dw, seen = jax.shard_map(local, out_specs=specs, check_vma=False)(
        dy, quantized, amax, stored, inverse
    )
    return dx, dw, None if current else seen, None, None


_dot.defvjp(_forward, _backward)


def _gathered(stored, shards, inverse) -> jax.Array:
    stored = mesh.gather(stored, shards)
    return stored if stored.dtype == VALUES else quantize(stored, inverse, VALUES)


def products(model: nnx.Module) -> dict[str, Any]:
    """The weights of `PRODUCTS` in a model, or their shapes, by path; layers are stacked on axis
    0."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_variable)
    return {name: v.get_value() for path, v in leaves if (name := _product_name(path))}


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _product_name(path: tuple) -> str | None:
    """The path as `units.0.layers.0.mixer.qkv`, for a weight in `PRODUCTS`."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return name if name.rsplit(".", 1)[-1] in PRODUCTS else None


def init_state(model: nnx.Module, precision: Precision) -> State:
    """Empty histories for every product of the model; none unless FP8 has delayed scaling."""
    if precision.dtype != "fp8" or precision.scaling == "current":
        return {}
    history = precision.amax_history
    return {name: jnp.zeros((w.shape[0], 3, history)) for name, w in products(model).items()}


def quantize_weights(
    weights: nnx.Module, state: State, precision: Precision
) -> dict[str, dict[str, jax.Array]]:
    """For each product what stays the same over a step's microbatches: `stored` and `inverse` of
    its `Operand`, stacked over layers. Empty unless precision is FP8. Transformer Engine quantizes
    what it has gathered.
    """
    if precision.dtype != "fp8":
        return {}
    constants = {}
    for name, kernel in products(weights).items():
        if precision.scaling == "current":
            # Inputs and gradients are scaled where they arise.
            amax = jnp.zeros((kernel.shape[0], 3)).at[:, 1].set(_magnitudes(kernel))
        else:
            amax = jnp.max(state[name], axis=-1)
        inverse = jnp.stack(
            [inverse_scale(amax[:, i], t, precision.margin) for i, t in enumerate(TENSORS)], axis=1
        )
        stored = kernel
        if precision.gather == "fp8" and precision.implementation == "xla":
            in_layers = jax.vmap(partial(quantize, dtype=VALUES))
            stored = mesh.accumulating(in_layers(mesh.unmarked(kernel), inverse[:, 1]))
        constants[name] = {"stored": stored, "inverse": inverse}
    return constants


def _magnitudes(kernel: jax.Array) -> jax.Array:
    """The largest magnitude of each layer's weight."""
    return magnitude(mesh.unmarked(kernel), axis=tuple(range(1, kernel.ndim)))


def unobserved(state: State) -> State:
    """Zeros for the magnitudes that a pass observes: `[layers, 2, devices]` for each product."""
    devices = math.prod(jax.sharding.get_abstract_mesh().shape.values())
    sharding = PartitionSpec(None, None, *mesh.per_device())
    return {
        name: jnp.zeros((history.shape[0], 2, devices), out_sharding=sharding)
        for name, history in state.items()
    }


def attach(
    weights: nnx.Module,
    constants: dict[str, dict[str, jax.Array]],
    observed: State,
    precision: Precision,
) -> nnx.Module:
    """The model with an `Operand` in the place of each weight that `constants` name."""

    def convert(path, variable):
        name = _product_name(path)
        if name not in constants:
            return variable
        return Operand(
            kernel=variable[...], observed=observed.get(name), name=name,
            precision=precision, **constants[name],
        )  # fmt: skip

    return jax.tree_util.tree_map_with_path(convert, weights, is_leaf=_is_variable)


def detach(units: nnx.Module) -> nnx.Module:
    """The model with bf16 kernels in the place of every `Operand`."""
    return jax.tree.map(
        lambda w: nnx.Param(w.kernel) if _is_operand(w) else w,
        units,
        is_leaf=lambda node: _is_operand(node) or _is_variable(node),
    )


def pack(units: nnx.Module) -> tuple[nnx.Module, Any]:
    """The stacked units without the scales of their products, and these in one array: a scan slices
    it once, where it would launch a kernel for each product. `unpack` undoes it for one unit."""
    leaves, tree = jax.tree.flatten(units, is_leaf=_is_operand)
    operands = [leaf for leaf in leaves if _is_operand(leaf)]
    small = [{"inverse": w.inverse, "observed": w.observed} for w in operands]
    scales = jax.tree.map(lambda *arrays: jnp.stack(arrays, axis=1), *small) if small else None
    without = [replace(w, inverse=None, observed=None) if _is_operand(w) else w for w in leaves]
    return jax.tree.unflatten(tree, without), scales


def unpack(unit: nnx.Module, scales: Any) -> nnx.Module:
    """A unit with the scales that `pack` took out."""
    count = itertools.count()

    def put_back(leaf):
        if not _is_operand(leaf):
            return leaf
        product = next(count)
        return replace(leaf, **jax.tree.map(lambda array: array[product], scales))

    return jax.tree.map(put_back, unit, is_leaf=_is_operand)


def _is_operand(node: Any) -> bool:
    return isinstance(node, Operand)


def update(state: State, weights: nnx.Module, observed: State) -> State:
    """The histories with this step's magnitudes: of inputs and gradients by maximum over devices,
    and of weights."""
    kernels = products(weights)

    def push(name: str, history: jax.Array) -> jax.Array:
        x, dy = jnp.moveaxis(jnp.max(observed[name], axis=-1), 1, 0)
        newest = jnp.stack([x, _magnitudes(kernels[name]), dy], axis=1)
        return jnp.concatenate([newest[..., None], history[..., :-1]], axis=-1)

    return {name: push(name, history) for name, history in state.items()}


def compiled_products(program: hlo.Program) -> Counter[tuple[str, bool]]:
    """Runs per step of the products in a compiled program, by name and whether in FP8."""
    products = [
        (source, dtype.startswith("f8"), runs) for dtype, _, runs, source in program.gemms()
    ]
    # A product of Transformer Engine is in FP8 when its first operand is.
    products += [
        (i.attribute(hlo.SOURCE) or "", scope[i.operands[0]].arrays[0][0].startswith("f8"), runs)
        for i, scope, runs in program.walk()
        if (i.attribute(hlo.TARGET) or "").startswith(hlo.TE_GEMM)
    ]
    found: Counter[tuple[str, bool]] = Counter()
    for source, in_fp8, runs in products:
        if scope_name := re.search(rf"{SCOPE}([\w.]+)", source):
            found[scope_name.group(1), in_fp8] += runs
    return found
