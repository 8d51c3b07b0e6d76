"""Cross entropy over a vocabulary that may be sharded, fused with the head's matmul.

The head is the widest layer (128k columns), and the fp32 logits of all tokens would be the largest
array of the step. We therefore process the tokens in chunks (`chunk_tokens`). For each chunk the
forward pass computes the fp32 logits, the loss and at once the gradient of the logits. So logits
are computed only once, the forward pass computes all gradients, and the backward pass only scales
them.

The logit gradients of all chunks are stacked in bf16 (4.2 GB for Grok-1 on 8 GPUs), and the head's
gradient is one matmul over the stack. The alternative is an fp32 sum `[D, V]` over chunks. It would
read and write 8 D V bytes per chunk of 2048 tokens. The stack costs 4 V bytes per token, which is
1024 / D of that. If the stack would be larger than `STACK_BYTES`, we make and multiply it in parts;
the head's gradient is then the fp32 sum over the parts.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxbench import mesh
from jaxbench.ops.stash import scan_allocated

MASKED = -1
"""The target of a token that is left out of the loss."""

CHUNK_TOKENS = 2048
"""Tokens per chunk: enough for an efficient matmul. At 128k columns the fp32 logits take 1 GB."""

STACK_BYTES = 8 * 2**30
"""The largest size in bytes of a stack of logit gradients."""


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def cross_entropy(
    hidden: Float[Array, "B S D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B S"],
    masked: bool = False,
    gradients_first: bool = False,
) -> Float[Array, ""]:
    """Mean over all tokens of -log softmax(hidden @ head)[target], in nats, accumulated in fp32;
    with `masked` over the tokens whose target is not `MASKED`.

    `hidden` is `"batch seq embed"`, `head` is a weight at rest `"embed vocab"`, and `targets` is
    `"batch seq"`. Each rank of `SEQUENCES` has other sequences.

    With `gradients_first` the loss is available only after both gradients are. Otherwise XLA may
    compute the gradients at the end of the step and keep the stack until then.
    """
    return _forward(hidden, head, targets, masked, gradients_first)[0]


def _forward(hidden, head, targets, masked, gradients_first):
    """(loss, (d hidden, d head)) on the current mesh."""
    # Gradients are unreduced over the axes over which their arrays are reduced, so no sum over
    # these axes is needed.
    for x, axes in ((hidden, {mesh.TENSOR}), (head, set(mesh.REPLICAS))):
        assert jax.typeof(x).sharding.spec.reduced == mesh.spec("", {}, reduced=axes).reduced
    shards = tuple(axis for _, axes in mesh.gathered_dims(head) for axis in axes)
    local = partial(_local, shards=shards, masked=masked, gradients_first=gradients_first)
    out_specs = PartitionSpec(), (mesh.cotangent_spec(hidden), mesh.cotangent_spec(head))
    return mesh.on_each_device(local, out_specs, check_vma=False)(hidden, head, targets)


def _backward(masked, gradients_first, residuals, cotangent):
    def scaled(d):
        # The cotangent is 1 / the number of microbatches, and stays in fp32: 1/3 rounded to bf16
        # would make all gradients 1.002 times too large.
        return (d.astype(jnp.float32) * mesh.as_factor(cotangent, d)).astype(d.dtype)

    return *map(scaled, residuals), None


cross_entropy.defvjp(_forward, _backward)


def _local(hidden, head, targets, *, shards: tuple[str, ...], masked: bool, gradients_first: bool):
    """The results of `_forward` on one device, for its tokens and its columns of the vocabulary.
    The `embed` dimension of the head is split over the axes `shards`."""
    token_axes = (*mesh.SEQUENCES, mesh.CONTEXT)
    counted_tokens = targets.size * jax.lax.axis_size(token_axes)
    if masked:
        counted_tokens = jax.lax.psum(jnp.sum(targets != MASKED), token_axes)
    head = jax.lax.all_gather(head, shards, axis=0, tiled=True) if shards else head
    columns = head.shape[1]
    first_column = jax.lax.axis_index(mesh.TENSOR) * columns

    chunk = chunk_tokens(targets.size)
    padded = targets.size % chunk > 0

    def step(_, loss, tokens):
        hidden, targets = tokens
        logits = jnp.einsum("TD,DV->TV", hidden, head, preferred_element_type=jnp.float32)
        local_largest, local_sum = _largest_and_sum(logits)
        largest = jax.lax.pmax(local_largest, mesh.TENSOR)
        sum_exp = local_sum * jnp.exp(local_largest - largest)
        sum_exp = jax.lax.psum(sum_exp, mesh.TENSOR)
        column = (targets - first_column)[:, None]
        target = jax.lax.psum(_picked(logits, column, largest), mesh.TENSOR)
        is_counted = (targets != MASKED)[:, None] if masked or padded else True
        loss += jnp.sum(jnp.where(is_counted, jnp.log(sum_exp) - target, 0.0))
        is_target = jnp.arange(columns) == column
        probability = jnp.exp(logits - largest) / sum_exp
        d_logits = jnp.where(is_counted, (probability - is_target) / counted_tokens, 0.0)
        return loss, d_logits.astype(hidden.dtype)

    chunks = _chunks(hidden, chunk, 0), _chunks(targets, chunk, MASKED)

    def part(_, carry, chunks):
        loss, d_head = carry
        loss, d_logits = scan_allocated(step, loss, chunks)
        product = jnp.einsum("CTD,CTV->DV", chunks[0], d_logits, preferred_element_type=sum_dtype)
        d_head = product if d_head is None else d_head + product
        return (loss, d_head), jnp.einsum("CTV,DV->CTD", d_logits, head)

    parts = _parts(len(chunks[0]), targets.size * columns * hidden.dtype.itemsize)
    sum_dtype = hidden.dtype if parts == 1 else jnp.float32
    if parts == 1:
        (loss, d_head), d_hidden = part(0, (jnp.zeros(()), None), chunks)
    else:
        start = jnp.zeros(()), jnp.zeros(head.shape, sum_dtype)
        several = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), chunks)
        (loss, d_head), d_hidden = scan_allocated(part, start, several)
    if gradients_first:
        loss, d_hidden, d_head = jax.lax.optimization_barrier((loss, d_hidden, d_head))
    loss, d_head = jax.lax.psum(loss, token_axes) / counted_tokens, d_head.astype(head.dtype)
    if shards:
        d_head = jax.lax.psum_scatter(d_head, shards, scatter_dimension=0, tiled=True)
    if padded:
        d_hidden = d_hidden.reshape(-1, hidden.shape[-1])[: targets.size]
    return loss, (d_hidden.reshape(hidden.shape), d_head)


def chunk_tokens(tokens: int) -> int:
    """Tokens per chunk for this number of tokens.

    It is the largest divisor of `tokens` that is at most `CHUNK_TOKENS`. If that divisor is less
    than half of `CHUNK_TOKENS`, we use the fewest possible chunks instead; their size is a multiple
    of 8 and the last one is padded.
    """
    divisor = next(d for d in range(min(tokens, CHUNK_TOKENS), 0, -1) if tokens % d == 0)
    if tokens <= CHUNK_TOKENS or 2 * divisor >= CHUNK_TOKENS:
        return divisor
    fewest = -(-tokens // CHUNK_TOKENS)
    return 8 * -(-tokens // (8 * fewest))


def _chunks(x: Array, chunk: int, padding: int) -> Array:
    """The tokens of `[B, S, ..]` in chunks `[C, T, ..]`, with padding in the last chunk."""
    rest = x.shape[2:]
    if missing := -(x.shape[0] * x.shape[1]) % chunk:
        widths = (0, missing), *((0, 0) for _ in rest)
        x = jnp.pad(x.reshape(-1, *rest), widths, constant_values=padding)
    return x.reshape(-1, chunk, *rest)


def _picked(logits, column, largest):
    """The logit of each token's target column minus the largest logit; zero if another device has
    the column. We take it by index and not as a masked sum: XLA would fuse a sum with the gradient,
    and would then not write the gradient into its stack."""
    last = logits.shape[1] - 1
    picked = jnp.take_along_axis(logits, jnp.clip(column, 0, last), axis=-1)
    return jnp.where((column >= 0) & (column <= last), picked - largest, 0.0)


def _parts(chunks: int, size: int) -> int:
    """The smallest number of parts, each with equally many chunks, such that no part has more than
    `STACK_BYTES` of the stack's `size` bytes. It is at most the number of chunks."""
    least = min(-(-size // STACK_BYTES), chunks)
    return next(n for n in range(max(least, 1), chunks + 1) if chunks % n == 0)


def _largest_and_sum(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(largest logit, sum of exp(logit - largest)) of each token, `[T, V]` to `[T, 1]`, in one pass
    over the logits (Milakov and Gimelshein 2018, algorithm 3)."""

    def join(a, b):
        (largest_a, sum_a), (largest_b, sum_b) = a, b
        smaller = jnp.exp(-jnp.abs(largest_a - largest_b))
        a_larger = largest_a >= largest_b
        joined = jnp.where(a_larger, sum_a + sum_b * smaller, sum_a * smaller + sum_b)
        return jnp.where(a_larger, largest_a, largest_b), joined

    # The initial value is finite, since the compiler may join two initial values.
    initial = jnp.finfo(logits.dtype).min, jnp.zeros((), logits.dtype)
    largest, sum_exp = jax.lax.reduce((logits, jnp.ones_like(logits)), initial, join, (1,))
    return largest[:, None], sum_exp[:, None]
