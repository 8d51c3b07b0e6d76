"""Causal attention: one file for each kernel, and the registry that chooses among them.

A new kernel is a file and an entry in `IMPLEMENTATIONS`. If recipes may ask for it, its name also
goes into `recipe.settings.Execution.attention`. Remat policies, the check of compiled programs and
the plan all read that entry.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxbench import mesh
from jaxbench.base.errors import RecipeError
from jaxbench.ops import implementations
from jaxbench.ops.attention import cudnn, plain
from jaxbench.ops.implementations import AMPERE, Task
from jaxbench.recipe.settings import Execution


@dataclass(frozen=True, kw_only=True)
class Implementation(implementations.Implementation):
    """A kernel, or XLA's matmuls, by which attention is computed.

    `call` takes one device's query (`B S N H`), key (`B S K H`) and value (`B S K V`), then scale,
    window and sinks as `attend` does. `fp32` is false for a kernel that takes no fp32 operands. A
    remat policy saves the results of `saved_primitive` as `attention`. If it is None, `call` itself
    names the results by `checkpoint_name`.
    """

    call: Callable[..., jax.Array]
    fp32: bool = True
    saved_primitive: str | None = None


IMPLEMENTATIONS = {
    "cudnn": Implementation(
        call=cudnn.call,
        least=AMPERE,
        fp32=False,
        calls=cudnn.CALLS,
        refusal=cudnn.refusal,
        saved_primitive=cudnn.FORWARD_PRIMITIVE,
    ),
    "xla": Implementation(call=plain.call),
}
"""The kernels by name. `auto` takes the first one that fits dtype and platform; if that one
refuses the model, `choose` raises an error."""


def choose(execution: Execution, task: Task) -> str:
    """The name of the kernel that computes a model's attention.

    Raises RecipeError if the requested kernel does not fit, or if the chosen one cannot compute the
    model's attention.
    """

    def mismatch(name: str) -> str | None:
        kernel = IMPLEMENTATIONS[name]
        no_fp32 = "computes no fp32 attention"
        refused = no_fp32 if task.dtype == "fp32" and not kernel.fp32 else None
        return kernel.not_on(task) or refused

    chosen = implementations.choose("attention", execution.attention, IMPLEMENTATIONS, mismatch)
    if task.cfg.attention_mixer and (refused := IMPLEMENTATIONS[chosen].refusal(task)):
        raise RecipeError(f"{refused}; use execution.attention=xla")
    return chosen


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    kernel: str,
    scale: float,
    window: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal grouped-query attention by one of `IMPLEMENTATIONS`. Arrays are `"batch seq heads
    head_dim"`, both in and out. A score is `scale` times query . key. With a `window` a query sees
    at most that many positions, including its own. `sinks`, `"heads"`, are an additional logit in
    each head's softmax.

    Over the `context` axis, shards of the sequence are exchanged for shards of the heads and back
    (DeepSpeed-Ulysses; Jacobs et al. 2023). Each rank then attends over whole sequences under the
    kernel's own causal mask. The work is balanced by construction, and sequences stay in their
    natural order. If a device has fewer key heads than there are ranks, each is sent to all the
    ranks that have its queries.
    """
    context = mesh.axes("seq")

    def local(q, k, v, sinks):
        if context:
            ranks = jax.lax.axis_size(context)
            copies = ranks // math.gcd(ranks, k.shape[2])
            k, v = (jnp.repeat(x, copies, axis=2) if copies > 1 else x for x in (k, v))
            q, k, v = (jax.lax.all_to_all(x, context, 2, 1, tiled=True) for x in (q, k, v))
        sinks = None if sinks is None else _own_heads(sinks, q.shape[2])
        out = IMPLEMENTATIONS[kernel].call(q, k, v, scale, window, sinks)
        return jax.lax.all_to_all(out, context, 1, 2, tiled=True) if context else out

    heads = mesh.spec("batch seq heads head_dim", mesh.ACTIVATION)
    return mesh.on_each_device(local, heads)(query, key, value, sinks)


def _own_heads(sinks: jax.Array, count: int) -> jax.Array:
    """Selects the sinks of the `count` heads that a device computes from the sinks of its tensor
    rank."""
    sinks = mesh.varying(sinks)
    if not (context := mesh.axes("seq")):
        return sinks
    first = count * jax.lax.axis_index(context)
    return jax.lax.dynamic_slice_in_dim(sinks, first, count)
