"""The operators that models are made of, and the only module that names a kernel library.

Dimension letters: B batch, S sequence, D embed, N heads, K kv heads, G heads of a group, H head
dim, F ffn, V vocabulary, E experts, R rows of an expert.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxbench import fp8, mesh, softcap
from jaxbench.config import Execution, Precision, RecipeError

CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
"""JAX's primitive of the cuDNN forward kernel. Its results are the attention output and the softmax
statistics."""


def dot(equation: str, x: jax.Array, w: nnx.Variable | fp8.Operand, dims: str) -> jax.Array:
    """Einsum of an activation with a weight that is sharded at rest: all-gather the weight, then
    multiply, in FP8 where the weight is an `fp8.Operand`.

    `dims` are the logical dimensions of the result. Where the product sums over a dimension that is
    split over `tensor`, the result stays unreduced over `tensor`, and the caller's next
    `mesh.shard` decides how it is summed. In the backward pass the gradient of the weight is
    reduce-scattered. A dimension of experts, the letter E, is a batch of products.
    """
    inputs, out = equation.split("->")
    x_dims, w_dims = inputs.split(",")
    split_sum = mesh.contracts_tensor(x, x_dims, kept=out)
    unreduced = {"tensor"} if split_sum else set()
    spec = mesh.spec(dims, mesh.ACTIVATION, unreduced=unreduced)
    if isinstance(w, fp8.Operand):
        product = te_dot if w.precision.implementation == "te" else fp8.dot
        return product(equation, x, w, spec)
    experts = w_dims.index("E") if "E" in w_dims else None
    return jnp.einsum(equation, x, mesh.unshard(w[...], experts), out_sharding=spec)


def fp8_implementation(precision: Precision) -> Literal["te", "xla"]:
    """Who multiplies in FP8: `te` or `xla`. Raises RecipeError where Transformer Engine is asked
    for and cannot run.

    It compiles for the GPU of this process only, so never for GPUs that are not there.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None
    can_run = installed and jax.default_backend() == "gpu"
    if precision.implementation == "te" and not can_run:
        raise RecipeError(
            "precision.implementation = te needs an NVIDIA GPU and Transformer Engine (README: "
            "Transformer Engine); use auto or xla"
        )
    return "te" if can_run and precision.implementation != "xla" else "xla"


def kernels(execution: Execution, precision: Precision, cap: float | None = None) -> dict[str, str]:
    """What computes attention and matrix products on the current mesh, for the record."""
    products: str = precision.dtype
    if precision.dtype == "fp8":
        by = fp8_implementation(precision)
        products += f" by {by}" if mesh.platform() == "gpu" else ", emulated in bf16"
    return {"attention": attention_implementation(execution, cap), "products": products}


def te_dot(equation: str, x: jax.Array, w: fp8.Operand, spec: PartitionSpec) -> jax.Array:
    """`fp8.dot` by Transformer Engine: it quantizes and multiplies, we gather, scatter and keep the
    history."""
    product = fp8.Product(equation, spec, mesh.cotangent_spec(x), w.name, w.precision.margin)
    return _te_dot(product, x, w.kernel, w.observed, w.inverse)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _te_dot(product, x, kernel, observed, inverse):
    return _te_forward(product, x, kernel, observed, inverse)[0]


def _te_forward(product, x, kernel, observed, inverse):
    shards, quantizers = (
        mesh.shards(kernel, product.experts),
        partial(_te_quantizers, observed is not None),
    )

    def local(x, kernel, inverse):
        with product.scope():
            return _te_dense(product.equation, x, mesh.gather(kernel, shards), quantizers(inverse))

    y = jax.shard_map(local, out_specs=product.y_spec, check_vma=False)(x, kernel, inverse)
    return y, (x, kernel, observed, inverse)


def _te_backward(product, residuals, dy):
    x, kernel, observed, inverse = residuals
    shards, quantizers = (
        mesh.shards(kernel, product.experts),
        partial(_te_quantizers, observed is not None),
    )

    def local(dy, x, kernel, inverse):
        with product.scope():
            dense = partial(_te_dense, product.equation)
            weight = mesh.gather(kernel, shards)
            dx, dw, seen = jax.vjp(dense, x, weight, quantizers(inverse))[1](dy)
        if observed is None:
            return dx, mesh.scatter(dw, shards)
        # Each tensor's new history holds this one magnitude.
        amax = jnp.stack([jnp.max(q.amax_history) for q in (seen.x, seen.dgrad)])
        return dx, mesh.scatter(dw, shards), amax[:, None]

    specs: tuple = (product.dx_spec, mesh.cotangent_spec(kernel))
    if observed is not None:
        specs = (*specs, PartitionSpec(None, *mesh.per_device()))
    dx, dw, *seen = jax.shard_map(local, out_specs=specs, check_vma=False)(dy, x, kernel, inverse)
    return dx, dw, seen[0] if seen else None, None


_te_dot.defvjp(_te_forward, _te_backward)


def _te_quantizers(delayed: bool, inverse: jax.Array) -> Any:
    """Transformer Engine's quantizers of input, weight and gradient."""
    from transformer_engine.jax import quantize as te

    def quantizer(dtype: Any, inverse: jax.Array) -> Any:
        if not delayed:
            return te.CurrentScaleQuantizer(q_dtype=dtype)
        history = jnp.zeros(2)
        return te.DelayedScaleQuantizer(
            q_dtype=dtype, scale=1 / inverse[None], amax_history=history
        )

    x, kernel, gradient = map(quantizer, fp8.TENSORS, inverse)
    return te.QuantizerSet(x=x, kernel=kernel, dgrad=gradient)


def _te_dense(equation: str, x: jax.Array, w: jax.Array, quantizers: Any) -> jax.Array:
    """The einsum of local arrays by Transformer Engine's dense layer, which wants the summed
    dimensions last in `x` and first in `w`."""
    from transformer_engine.jax.dense import dense
    from transformer_engine.jax.sharding import MeshResource, global_shard_guard

    inputs, out = equation.split("->")
    into, through = inputs.split(",")
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


def scale(x: jax.Array, gain: jax.Array) -> jax.Array:
    """`x` times a vector along its last dimension; every rank keeps its own part of the vector's
    gradient."""
    return x * _along_last(gain, x)


def shift(x: jax.Array, bias: jax.Array) -> jax.Array:
    """`x` plus a vector along its last dimension, with gradients as in `scale`."""
    return x + _along_last(bias, x)


def _along_last(vector: jax.Array, x: jax.Array) -> jax.Array:
    sharding = PartitionSpec(*mesh.partition(x))
    return jax.lax.broadcast_in_dim(vector, x.shape, (x.ndim - 1,), out_sharding=sharding)


def save(x: jax.Array, name: str) -> jax.Array:
    """Names an activation, so that a remat policy can keep it: one of `config.ACTIVATIONS`, or
    `routing`, which every policy keeps."""
    return checkpoint_name(x, name)


def remat(body, saved: set[str] | None):
    """`body` recomputed in the backward pass, except for the activations in `saved`; None keeps
    everything.

    The attention output is kept where the kernel makes it, together with its softmax statistics:
    with both, the backward kernel needs no second forward pass. Routing decisions are always kept:
    they are small, and made again with another rounding they would differ.
    """
    if saved is None:
        return body
    named = jax.checkpoint_policies.save_only_these_names(*saved, "routing")

    def policy(primitive, *args, **params):
        if primitive.name == CUDNN_FORWARD:
            return "attention" in saved
        return named(primitive, *args, **params)

    return jax.checkpoint(body, policy=policy, prevent_cse=False)


def attention_implementation(execution: Execution, cap: float | None = None) -> str:
    """The attention kernel on the current mesh: `cudnn` on GPUs and `xla` elsewhere, unless the
    recipe names one; `blocks` with a soft cap (`softcap.attention`)."""
    if cap is not None:
        return "blocks"
    if execution.attention != "auto":
        return execution.attention
    return "cudnn" if mesh.platform() == "gpu" else "xla"


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    execution: Execution,
    cap: float | None = None,
) -> jax.Array:
    """Causal grouped-query attention, `"batch seq heads head_dim"` in and out, scores scaled by
    1/sqrt(head dim), and soft-capped if there is a `cap`.

    Over the `context` axis, shards of the sequence are exchanged for shards of the heads and back
    (DeepSpeed-Ulysses; Jacobs et al. 2023). Each rank then attends over whole sequences under the
    kernel's own causal mask: the work is balanced by construction, and sequences stay in their
    natural order.
    """
    implementation = attention_implementation(execution, cap)
    context = mesh.used("context")

    def local(q, k, v):
        if context:
            q, k, v = (jax.lax.all_to_all(x, context, 2, 1, tiled=True) for x in (q, k, v))
        if cap is not None:
            out = softcap.attention(q, k, v, cap)
        else:
            out = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation=implementation
            )
        if implementation == "xla":
            out = save(out, "attention")
        return jax.lax.all_to_all(out, context, 1, 2, tiled=True) if context else out

    heads = mesh.spec("batch seq heads head_dim", mesh.ACTIVATION)
    return jax.shard_map(local, out_specs=heads)(query, key, value)


@contextmanager
def kernels_of_target() -> Iterator[None]:
    """While a program is traced: kernels are chosen for the GPU of the current mesh.

    JAX checks head dims (above 128 only from Hopper on) against the GPU of this machine, which a
    program compiled for absent ones does not have. The check itself stays; only the answer to
    "which compute capability?" comes from the mesh.
    """
    devices = jax.sharding.get_mesh().devices

    def check(capability: str) -> bool:
        found, wanted = (
            tuple(map(int, text.split(".")))
            for text in (devices.flat[0].compute_capability, capability)
        )
        return found >= wanted

    with mock.patch.object(fused_attention_stablehlo, "check_compute_capability", check):
        yield


def embedding(table: jax.Array, tokens: jax.Array, dtype) -> jax.Array:
    """The rows of `table` (`"vocab embed"`) for `tokens` (`"batch seq"`), as `"batch shard_seq
    embed"` of `dtype`.

    The table is split over `embed` and never gathered. Each rank looks up everyone's tokens in its
    columns; an all-to-all then turns some columns of all tokens into all columns of its own tokens.
    That moves activations instead of the table, and its transpose brings every token's gradient to
    the owner of the columns, with nothing left to reduce.
    """

    def local(table, tokens):
        for dim, axes in ((0, ("fsdp", "expert")), (1, ("context",))):
            if axes := mesh.used(*axes):
                tokens = jax.lax.all_gather(tokens, axes, axis=dim, tiled=True)
        x = table[tokens].astype(dtype)
        for dim, axes in ((1, ("context", "tensor")), (0, ("fsdp", "expert"))):
            if axes := mesh.used(*axes):
                x = jax.lax.all_to_all(x, axes, dim, 2, tiled=True)
        return x

    out = mesh.spec("batch shard_seq embed", mesh.ACTIVATION)
    return jax.shard_map(local, out_specs=out)(table, tokens)
