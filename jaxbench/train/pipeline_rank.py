"""One rank of a pipeline: its actions in every schedule step (`pipeline_schedule`).

In a schedule step a rank computes one model chunk forward for one microbatch and one backward for
another, and sends both results to its neighbours. Embedding and loss are outside of the stages:
each rank embeds, and takes the loss of, one microbatch of every group, and the ranks exchange the
inputs of the first stage and the outputs of the last.

The collectives of a step overlap with the products of the other direction. Memory for activations
does not grow with the number of microbatches: a stash holds the residuals of chunks in flight, and
buffers hold inputs and outputs of one or two groups.

Arrays are local to a device, inside a `shard_map` (`mesh`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxbench import mesh
from jaxbench.jax_internals import residuals, restore_vjp
from jaxbench.models.decoder import Decoder, apply_block, embed, head_loss
from jaxbench.models.layers import ForwardContext
from jaxbench.ops import fp8, remat
from jaxbench.ops.stash import read, write
from jaxbench.recipe.settings import Run
from jaxbench.train.pipeline_schedule import Actions, interleaved_1f1b
from jaxbench.train.stages import Stages


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """State of one rank between two schedule steps.

    `x` and `dy` have arrived from the neighbours. `inputs` and `d_inputs` are inputs of the first
    stage and their gradients, of the two groups of microbatches in flight; `outputs` and
    `d_outputs` are outputs of the last stage and their gradients, of one group. `d_inputs` and
    `outputs` have one more entry, which absorbs the writes of other ranks and idle actions. `stash`
    holds (residuals, input) of model chunks between their forward and backward actions.

    The rest are sums: the loss; gradients of the embedding, of the blocks `[chunks, size, ..]`, and
    of final norm and head; the amax that FP8 observes in the blocks; and routing figures
    `[microbatches + 1, chunks, size]`, whose last entry absorbs those of idle actions.
    """

    x: jax.Array
    dy: jax.Array
    inputs: jax.Array
    d_inputs: jax.Array
    outputs: jax.Array
    d_outputs: jax.Array
    stash: Any
    loss: jax.Array
    d_embedding: Any
    d_blocks: Any
    d_norm_head: Any
    observed: Any
    routing: Any


@dataclass(frozen=True)
class Rank:
    """Weights and data of one rank, and its computation.

    `blocks` `[chunks, size, ..]` and `head` are gathered; `scaled` has the FP8 weights and scales
    of the blocks, or is None; of the `model` at rest only embedding and final norm are used.
    `tokens` and `targets` `[groups, batch, seq]` are this rank's microbatches. Activations in
    `saved` are not recomputed. Gradients are summed in `sum_dtype`.
    """

    run: Run
    stages: Stages
    saved: frozenset[str] | None
    sum_dtype: Any
    model: Decoder
    blocks: Any
    head: jax.Array
    scaled: fp8.Scaled | None
    ctx: ForwardContext
    tokens: jax.Array
    targets: jax.Array

    def run_schedule(self) -> Carry:
        """Runs all actions of a training step: warm-up, steady state, cool-down.

        Each rank starts a group of microbatches one schedule step after the rank before it. So the
        inputs of group g are first needed in steady iteration g - 1, and its last input gradients
        return in steady iteration g + 2. With 2 ranks, 2 virtual stages and 3 groups (`E` embed,
        `L` loss, `B` backward of the embedding, each of one group):

            E0 E1 | warm-up | L0 E2 steady 1 B-1 | L1 E3 steady 2 B0 | L2 | cool-down | B1 B2

        The calls of a group that does not exist are harmless, so that one loop body serves all:
        `E3` embeds the last group again into a buffer that is not read any more, and `B-1` adds the
        gradient of group 1's buffer (-1 and 1 modulo 2), which is still zero.
        """
        groups, ranks = len(self.tokens), self.stages.ranks
        schedule = interleaved_1f1b(ranks, self.stages.chunks, groups * ranks)
        warmup = schedule.warmup
        end = warmup + (groups - 1) * schedule.period

        def steady(carry: Carry, group_actions: Any) -> tuple[Carry, None]:
            group, actions = group_actions
            carry = self._losses(carry, group - 1)
            carry = self._embed(carry, group + 1) if groups > 2 else carry
            carry, _ = jax.lax.scan(self._schedule_step, carry, actions)
            return self._embed_back(carry, group - 2) if groups > 2 else carry, None

        carry = self._start(schedule.slots)
        for group in range(min(groups, 2)):
            carry = self._embed(carry, group)
        first = _local_actions(schedule.forward, 0, warmup)
        carry, _ = jax.lax.scan(self._schedule_step, carry, (first, None))
        both = (
            _local_actions(schedule.forward, warmup, end),
            _local_actions(schedule.backward, warmup, end),
        )
        if groups == 2:
            carry, _ = steady(carry, (1, both))
        elif groups > 2:
            by_group = jax.tree.map(lambda t: t.reshape(groups - 1, schedule.period), both)
            carry, _ = jax.lax.scan(steady, carry, (jnp.arange(1, groups), by_group))
        carry = self._losses(carry, groups - 1)
        last = _local_actions(schedule.backward, end, end + warmup)
        carry, _ = jax.lax.scan(self._schedule_step, carry, (None, last))
        for group in range(max(groups - 2, 0), groups):
            carry = self._embed_back(carry, group)
        return carry

    def _start(self, slots: int) -> Carry:
        (groups, _, _), ranks = self.tokens.shape, self.stages.ranks

        def zeros(tree: Any, *entries: int, dtype: Any = None) -> Any:
            return jax.tree.map(lambda a: jnp.zeros((*entries, *a.shape), dtype or a.dtype), tree)

        vjp, figures = self._types
        return Carry(
            x=zeros(self._x),
            dy=zeros(self._x),
            inputs=zeros(self._x, 2 * ranks),
            d_inputs=zeros(self._x, 2 * ranks + 1),
            outputs=zeros(self._x, ranks + 1),
            d_outputs=zeros(self._x, ranks),
            stash=zeros((residuals(vjp), self._x), slots),
            loss=jnp.zeros(()),
            d_embedding=zeros(self.model.embedding, dtype=self.sum_dtype),
            d_blocks=zeros(self.blocks, dtype=self.sum_dtype),
            d_norm_head=zeros((self.model.norm, self.head), dtype=self.sum_dtype),
            observed=None if self.scaled is None else zeros(self.scaled.observed),
            routing=zeros(figures, groups * ranks + 1, self.stages.chunks),
        )

    @cached_property
    def _x(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the hidden state that stages send."""
        return jax.eval_shape(self._embedded, self.model.embedding, self.tokens[0])

    @cached_property
    def _types(self) -> tuple[Any, Any]:
        """Types of the VJP of a model chunk and of its routing figures."""
        _, *types = jax.eval_shape(partial(self._vjp, chunk=0), self._x)
        return tuple(types)

    def _embedded(self, embedding: Any, tokens: jax.Array) -> jax.Array:
        return embed(self.run.model, embedding, tokens, self.model.dtype)

    def _embed(self, carry: Carry, group: Any) -> Carry:
        """Writes the inputs of the first stage for a group of microbatches."""
        x = self._embedded(self.model.embedding, read(self.tokens, group))
        group_inputs = jax.lax.all_gather(x, mesh.PIPELINE)
        start = group % 2 * self.stages.ranks
        return replace(
            carry, inputs=jax.lax.dynamic_update_slice_in_dim(carry.inputs, group_inputs, start, 0)
        )

    def _embed_back(self, carry: Carry, group: Any) -> Carry:
        """Adds a group's gradient of the embedding, once all its input gradients have returned."""
        ranks = self.stages.ranks
        d_inputs = jax.lax.dynamic_slice_in_dim(carry.d_inputs, group % 2 * ranks, ranks)
        dx = jax.lax.psum_scatter(d_inputs, mesh.PIPELINE, scatter_dimension=0)
        embedded = partial(self._embedded, tokens=read(self.tokens, group))
        (d_embedding,) = jax.vjp(embedded, self.model.embedding)[1](dx)
        return replace(carry, d_embedding=_add(carry.d_embedding, d_embedding))

    def _losses(self, carry: Carry, group: Any) -> Carry:
        """Adds a group's loss and its gradients: each rank takes its microbatch's output from the
        last rank, and all output gradients are gathered."""
        ranks, groups = self.stages.ranks, len(self.tokens)
        output = jax.lax.all_to_all(carry.outputs[:ranks], mesh.PIPELINE, 0, 0)[-1]
        loss_of = partial(head_loss, self.run.model, targets=read(self.targets, group))
        loss, pull = jax.vjp(loss_of, self.model.norm, self.head, output)
        *d_norm_head, dx = pull(jnp.full_like(loss, 1 / groups))
        return replace(
            carry,
            loss=carry.loss + loss / groups,
            d_norm_head=_add(carry.d_norm_head, tuple(d_norm_head)),
            d_outputs=jax.lax.all_gather(dx, mesh.PIPELINE),
        )

    def _schedule_step(self, carry: Carry, actions: tuple) -> tuple[Carry, None]:
        forward, backward = actions
        if backward is not None:
            # Read before the forward action writes, so that neither direction waits for the other.
            saved, stash = jax.lax.optimization_barrier(
                (read(carry.stash, backward["slot"]), carry.stash)
            )
            carry = self._backward(replace(carry, stash=stash), saved, backward)
        if forward is not None:
            carry = self._forward(carry, forward)
        return carry, None

    def _forward(self, carry: Carry, action: dict[str, jax.Array]) -> Carry:
        ranks, rank = self.stages.ranks, jax.lax.axis_index(mesh.PIPELINE)
        microbatch, chunk = action["microbatch"], action["chunk"]
        enters = (rank == 0) & (chunk == 0)
        x = jnp.where(enters, read(carry.inputs, microbatch % (2 * ranks)), carry.x)
        (y, _), vjp, figures = self._vjp(x, chunk=chunk)
        saved, expected = residuals(vjp), residuals(self._types[0])
        assert [r.shape for r in saved] == [r.shape for r in expected]
        leaves = (rank == ranks - 1) & (chunk == self.stages.chunks - 1) & action["busy"]
        entry = jnp.where(action["busy"], microbatch, len(self.tokens) * ranks)
        return replace(
            carry,
            x=jax.lax.ppermute(y, mesh.PIPELINE, [(i, (i + 1) % ranks) for i in range(ranks)]),
            outputs=write(carry.outputs, y, jnp.where(leaves, microbatch % ranks, ranks)),
            stash=write(carry.stash, (saved, x), action["slot"]),
            routing=write(carry.routing, figures, entry, chunk),
        )

    def _backward(self, carry: Carry, saved: Any, action: dict[str, jax.Array]) -> Carry:
        ranks, rank = self.stages.ranks, jax.lax.axis_index(mesh.PIPELINE)
        microbatch, chunk = action["microbatch"], action["chunk"]
        enters = (rank == ranks - 1) & (chunk == self.stages.chunks - 1)
        dy = jnp.where(enters, read(carry.d_outputs, microbatch % ranks), carry.dy)

        def unless_idle(tree: Any) -> Any:
            return jax.tree.map(lambda a: jnp.where(action["busy"], a, jnp.zeros_like(a)), tree)

        chunk_residuals, x = saved
        vjp = restore_vjp(self._types[0], chunk_residuals, [*self._arguments(chunk), x])
        d_layers, _, _, dx = vjp(unless_idle((dy, self._d_balance)))
        d_blocks, observed = carry.d_blocks, carry.observed
        for index, (d_block, amax) in enumerate(d_layers):
            d_blocks = _add(d_blocks, d_block, chunk, index)
            observed = _maximum(observed, unless_idle(amax), chunk, index)
        leaves = (rank == 0) & (chunk == 0) & action["busy"]
        entry = jnp.where(leaves, microbatch % (2 * ranks), 2 * ranks)
        return replace(
            carry,
            dy=jax.lax.ppermute(dx, mesh.PIPELINE, [((i + 1) % ranks, i) for i in range(ranks)]),
            d_inputs=write(carry.d_inputs, dx, entry),
            d_blocks=d_blocks,
            observed=observed,
        )

    @property
    def _d_balance(self) -> jax.Array:
        """The cotangent of a sequence's load-balance loss, over the ranks of the sequence: the loss
        is a sum over them, whose transpose is a sum again."""
        p, coefficient = self.run.parallelism, self.run.model.balance_loss
        return jnp.float32(coefficient / self.run.batch.global_batch / (p.context * p.tensor))

    def _arguments(self, chunk: Any) -> tuple[Any, Any, Any]:
        """Arguments of a model chunk beside the hidden state: its blocks, each with zeros for the
        amax that FP8 observes; their scales; the rotary tables. They are sliced outside of the
        differentiated function, so that the stash holds none of them."""
        indices = range(self.stages.size)
        layers = [read(self.blocks, chunk, index) for index in indices]
        scales = [read(self.scaled, chunk, index) for index in indices]
        observed = [None if s is None else s.observed for s in scales]
        return list(zip(layers, observed, strict=True)), scales, self.ctx.rotary

    def _vjp(self, x: jax.Array, *, chunk: Any) -> tuple[Any, Any, Any]:
        """((hidden state, sum of balance losses), VJP, routing figures) of a model chunk."""
        function = partial(_compute, ctx=self.ctx._replace(rotary=None), saved=self.saved)
        return jax.vjp(function, *self._arguments(chunk), x, has_aux=True)


def _compute(
    layers: Any, scales: Any, rotary: Any, x: jax.Array, *, ctx: ForwardContext, saved: Any
) -> Any:
    """A model chunk, as in `Rank._vjp`."""

    def layer(x: jax.Array, operands: Any) -> Any:
        (block, observed), scaled, rotary = operands
        return apply_block(block, observed, scaled, x, ctx._replace(rotary=rotary))

    balance, sums = jnp.zeros(()), []
    for operands in zip(layers, scales, strict=True):
        x, figures = remat.recomputed(layer, saved)(x, (*operands, rotary))
        balance += sum(jnp.sum(losses) for losses, _, _ in figures)
        sums.append(jax.tree.map(partial(jnp.sum, axis=0), figures))
    stacked = jax.tree.map(lambda *blocks: jnp.stack(blocks).astype(jnp.float32), *sums)
    return (x, balance), stacked


def _merge(combine: Callable, tree: Any, values: Any, *index: Any) -> Any:
    """The arrays with the values combined into the entry at `index`, in place."""
    return write(tree, jax.tree.map(combine, read(tree, *index), values), *index)


_add = partial(_merge, lambda total, value: total + value.astype(total.dtype))
_maximum = partial(_merge, jnp.maximum)


def _local_actions(actions: Actions, start: int, stop: int) -> dict[str, jax.Array]:
    """This rank's actions in the schedule steps from `start` to `stop`."""
    rank = jax.lax.axis_index(mesh.PIPELINE)
    return {name: jnp.asarray(t[start:stop])[:, rank] for name, t in vars(actions).items()}
