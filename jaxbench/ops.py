"""The operators that models are made of, and the only module that names a kernel library.

Dimension letters: B batch, S sequence, D embed, N heads, K kv heads, G heads of a group, H head
dim, F ffn, V vocabulary, E experts, R rows of an expert.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxbench import mesh, softcap
from jaxbench.config import Execution

CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
"""JAX's primitive of the cuDNN forward kernel. Its results are the attention output and the softmax
statistics."""


def dot(equation: str, x: jax.Array, w: jax.Array, dims: str) -> jax.Array:
    """Einsum of an activation with a weight that is sharded at rest: all-gather the weight, then
    multiply.

    `dims` are the logical dimensions of the result. Where the product sums over a dimension that is
    split over `tensor`, the result stays unreduced over `tensor`, and the caller's next
    `mesh.shard` decides how it is summed. In the backward pass the gradient of the weight is
    reduce-scattered. A dimension of experts, the letter E, is a batch of products.
    """
    inputs, out = equation.split("->")
    x_dims, w_dims = inputs.split(",")
    split_sum = mesh.contracts_tensor(x, x_dims, kept=out)
    unreduced = {"tensor"} if split_sum else set()
    experts = w_dims.index("E") if "E" in w_dims else None
    return jnp.einsum(
        equation,
        x,
        mesh.unshard(w, experts),
        out_sharding=mesh.spec(dims, mesh.ACTIVATION, unreduced=unreduced),
    )


def scale(x: jax.Array, gain: jax.Array) -> jax.Array:
    """`x` times a vector along its last dimension; every rank keeps its own part of the vector's
    gradient."""
    sharding = PartitionSpec(*mesh.partition(x))
    return x * jax.lax.broadcast_in_dim(gain, x.shape, (x.ndim - 1,), out_sharding=sharding)


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
