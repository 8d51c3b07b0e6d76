"""One rank of a pipeline: its actions in every schedule step (`pipeline_schedule`).

In a schedule step a rank computes one model chunk forward for one microbatch, and one backward for
another, and sends both results to its neighbours. Embedding and loss are outside the stages: each
rank embeds one microbatch of every group, and computes its loss.

Hidden states travel in rings between these ranks and the first and last stage. Each rank holds one
hidden state, and passes it to the rank before it in every schedule step. The first stage, on rank
0, takes the P inputs of a group from the ring in P consecutive steps. The last stage puts its
outputs into another ring in P steps, such that each reaches the rank that computes its loss when
the group is complete. Their gradients travel likewise.

The collectives of a step overlap with the matmuls of the other direction. Memory for activations
does not grow with the number of microbatches: a stash holds the residuals of chunks in flight, and
each ring holds one hidden state.

Arrays are local to a device, inside a `shard_map` (`mesh`).
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxbench import mesh
from jaxbench.jax_internals import residuals, restore_vjp
from jaxbench.models.context import Context
from jaxbench.models.decoder import apply_block
from jaxbench.models.layers import LoadBias, sum_dtype
from jaxbench.ops import quantized
from jaxbench.ops.dense import is_variable
from jaxbench.ops.remat import Policy, checkpoint
from jaxbench.ops.stash import add, maximum, read, write
from jaxbench.recipe.settings import Run
from jaxbench.train.pipeline_ends import Ends, EndWeights
from jaxbench.train.pipeline_schedule import Actions, interleaved_1f1b
from jaxbench.train.pipeline_stages import Stages


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """State of one rank between two schedule steps.

    - `x`, `dy`: the hidden state and the gradient received from the neighbours
    - `inputs`, `d_inputs`, `outputs`: this rank's places in the rings of inputs of the first stage,
      of their gradients, and of outputs of the last stage or, after the loss, of their gradients
    - `next_input`: this rank's input of the next group, put into `inputs` when that group begins
    - `d_input`: the gradient of this rank's input in the last group whose gradients have all
      returned
    - `d_output`: `outputs` as received from the ring, before an output of the last stage replaced
      it: on the last rank the gradient of that stage's next backward action
    - `stash`: (residuals, input) of model chunks between their forward and backward actions

    The rest are sums:

    - the loss
    - gradients of the blocks `[chunks, ..]` and of the weights of both ends (`Ends`)
    - the amax that FP8 observes in blocks and ends
    - routing figures `[microbatches + 1, chunks, size]`; idle actions write to the last entry
    - routing figures of multi-token prediction `[groups]`
    """

    x: jax.Array
    dy: jax.Array
    inputs: jax.Array
    next_input: jax.Array
    d_inputs: jax.Array
    d_input: jax.Array
    outputs: jax.Array
    d_output: jax.Array
    stash: Any
    loss: jax.Array
    d_blocks: Any
    d_ends: EndWeights
    observed: Any
    ends_observed: Any
    routing: Any
    ends_routing: Any


@dataclass(frozen=True)
class Rank:
    """Weights and data of one rank, and its computation.

    `blocks` are the gathered weights of the blocks of a model chunk, each `[chunks, ..]`. They are
    a list, so that with a single chunk XLA slices nothing. `scaled` has the quantized weights and
    scales of each, or None. `first_sequences` has the number of the first sequence of each
    microbatch, `[ranks, groups]`.
    """

    run: Run
    stages: Stages
    ends: Ends
    blocks: list[Any]
    scaled: list[quantized.Scaled | None]
    first_sequences: jax.Array

    def run_schedule(self) -> Carry:
        """Runs all actions of a training step: warm-up, steady state, cool-down.

        Each rank starts a group of microbatches one schedule step after the rank before it. The
        inputs of group g are therefore first needed in steady iteration g - 1, and its last input
        gradients return in steady iteration g + 2. With 2 ranks, 2 virtual stages and 3 groups (`E`
        embed, `L` loss, `B` backward of the embedding, each of one group):

            E0 E1 | warm-up | L0 E2 steady 1 B-1 | L1 E3 steady 2 B0 | L2 | cool-down | B1 B2

        One loop body serves all iterations, because calls for a group that does not exist are
        harmless: `E3` embeds the last group again, and nobody reads the result; the input gradients
        of `B-1` are still zero.
        """
        groups, ranks = self._groups, self.stages.ranks
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
        if groups > 1:
            carry = self._embed_back(carry, groups - 2)
        carry = replace(carry, d_input=self._to_rank_before(carry.d_inputs))
        return self._embed_back(carry, groups - 1)

    def _start(self, slots: int) -> Carry:
        groups, first = self._groups, self.ends.enter(0)[0]

        def zeros(tree: Any, *entries: int, dtype: Any = None) -> Any:
            return jax.tree.map(lambda a: jnp.zeros((*entries, *a.shape), dtype or a.dtype), tree)

        vjp, figures = self._types
        *_, ends_figures = jax.eval_shape(partial(self.ends.leave, group=0), self._x)
        return Carry(
            x=zeros(self._x),
            dy=zeros(self._x),
            inputs=first,
            next_input=self.ends.enter(1)[0] if groups > 1 else first,
            d_inputs=zeros(self._x),
            d_input=zeros(self._x),
            outputs=zeros(self._x),
            d_output=zeros(self._x),
            stash=zeros((residuals(vjp), self._x), slots),
            loss=jnp.zeros(()),
            d_blocks=self._zero_sums(self.blocks),
            d_ends=self._zero_sums(self.ends.weights),
            observed=[None if s is None else zeros(s.observed) for s in self.scaled],
            ends_observed=self.ends.observed,
            routing=zeros(figures, groups * self.stages.ranks + 1, self.stages.chunks),
            ends_routing=zeros(ends_figures, groups),
        )

    def _zero_sums(self, weights: Any) -> Any:
        """Zeros to which gradients are added."""

        def zeros(w: Any) -> Any:
            dtype = sum_dtype(w, self.run.precision)
            return jax.tree.map(lambda a: jnp.zeros(a.shape, dtype), w)

        return jax.tree.map(zeros, weights, is_leaf=is_variable)

    @property
    def _groups(self) -> int:
        return len(self.ends.batch.tokens)

    @cached_property
    def _x(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the hidden state that stages send."""
        return jax.eval_shape(self.ends.enter, 0)[0]

    @cached_property
    def _types(self) -> tuple[Any, Any]:
        """Types of the VJP of a model chunk and of its routing figures."""
        _, *types = jax.eval_shape(partial(self._vjp, chunk=0, microbatch=0), self._x)
        return tuple(types)

    def _embed(self, carry: Carry, group: Any) -> Carry:
        """Computes this rank's input of the first stage for a group of microbatches."""
        return replace(carry, next_input=self.ends.enter(group)[0])

    def _embed_back(self, carry: Carry, group: Any) -> Carry:
        """Adds a group's gradients of the weights in front of the stages, from its `d_input`."""
        d_weights, amax = self.ends.enter(group)[1](carry.d_input)
        before, behind = carry.ends_observed
        return replace(
            carry,
            d_ends=carry.d_ends.plus(d_weights),
            ends_observed=(maximum(before, amax), behind),
        )

    def _losses(self, carry: Carry, group: Any) -> Carry:
        """Adds a group's loss and its gradients, once every rank has the output for which it
        computes the loss. The ring then brings the gradients of the outputs to the last rank,
        beginning with the one of rank 0."""
        (loss, _), pull, figures = self.ends.leave(carry.outputs, group)
        share = jnp.full_like(loss, 1 / self._groups)
        d_weights, amax, dx = pull((share, self._d_balance))
        before, behind = carry.ends_observed
        return replace(
            carry,
            loss=carry.loss + loss * share,
            d_ends=carry.d_ends.plus(d_weights),
            ends_observed=(before, maximum(behind, amax)),
            ends_routing=write(carry.ends_routing, figures, group),
            outputs=(arrived := self._to_rank_before(dx)),
            d_output=arrived,
        )

    def _to_rank_before(self, x: jax.Array) -> jax.Array:
        """Sends to the rank before: a step of a ring."""
        ranks = self.stages.ranks
        return jax.lax.ppermute(x, mesh.PIPELINE, [((i + 1) % ranks, i) for i in range(ranks)])

    def _schedule_step(self, carry: Carry, actions: tuple) -> tuple[Carry, None]:
        forward, backward = actions
        arrived, d_output = self._to_rank_before(carry.outputs), carry.d_output
        carry = replace(carry, outputs=arrived, d_output=arrived)
        if backward is not None:
            # Read before the forward action writes, so that neither direction waits for the other.
            saved, stash = jax.lax.optimization_barrier(
                (read(carry.stash, backward["slot"]), carry.stash)
            )
            carry = self._backward(replace(carry, stash=stash), saved, d_output, backward)
        if forward is not None:
            carry = self._forward(carry, forward)
        return carry, None

    def _forward(self, carry: Carry, action: dict[str, jax.Array]) -> Carry:
        ranks, rank = self.stages.ranks, jax.lax.axis_index(mesh.PIPELINE)
        microbatch, chunk = action["microbatch"], action["chunk"]
        inputs = jnp.where(action["new_group"], carry.next_input, carry.inputs)
        x = jnp.where((rank == 0) & (chunk == 0), inputs, carry.x)
        (y, _), vjp, figures = self._vjp(x, chunk=chunk, microbatch=microbatch)
        saved, expected = residuals(vjp), residuals(self._types[0])
        assert [r.shape for r in saved] == [r.shape for r in expected]
        y, passed, arrived = _after((y, self._to_rank_before(inputs), carry.outputs))
        leaves = (rank == ranks - 1) & (chunk == self.stages.chunks - 1) & action["busy"]
        entry = jnp.where(action["busy"], microbatch, self._groups * ranks)
        return replace(
            carry,
            x=jax.lax.ppermute(y, mesh.PIPELINE, [(i, (i + 1) % ranks) for i in range(ranks)]),
            inputs=passed,
            outputs=jnp.where(leaves, y, arrived),
            stash=write(carry.stash, (saved, x), action["slot"]),
            routing=write(carry.routing, figures, entry, chunk),
        )

    def _backward(
        self, carry: Carry, saved: Any, d_output: jax.Array, action: dict[str, jax.Array]
    ) -> Carry:
        ranks, rank = self.stages.ranks, jax.lax.axis_index(mesh.PIPELINE)
        chunk = action["chunk"]
        enters = (rank == ranks - 1) & (chunk == self.stages.chunks - 1)
        dy = jnp.where(enters, d_output, carry.dy)

        def unless_idle(tree: Any) -> Any:
            return jax.tree.map(lambda a: jnp.where(action["busy"], a, jnp.zeros_like(a)), tree)

        def loads_unless_idle(g: Any) -> Any:  # a load counts tokens, whatever the cotangent is
            return unless_idle(g) if isinstance(g, LoadBias) else g

        chunk_residuals, x = saved
        arguments = [*self._arguments(chunk, action["microbatch"]), x]
        vjp = restore_vjp(self._types[0], chunk_residuals, arguments)
        d_blocks, _, _, dx = vjp(unless_idle((dy, self._d_balance)))
        d_blocks, amax = zip(*d_blocks, strict=True)
        d_blocks = jax.tree.map(loads_unless_idle, list(d_blocks), is_leaf=is_variable)
        if self.stages.chunks > 1:
            # XLA would let matmuls add to the sums, and copy a chunk's sums out of their stack.
            d_blocks = jax.tree.map(jax.lax.optimization_barrier, d_blocks)
        dx, d_inputs = _after((dx, self._to_rank_before(carry.d_inputs)))
        leaves = (rank == 0) & (chunk == 0) & action["busy"]
        return replace(
            carry,
            dy=self._to_rank_before(dx),
            d_inputs=jnp.where(leaves, dx, d_inputs),
            d_input=jnp.where(action["new_group"], d_inputs, carry.d_input),
            d_blocks=add(carry.d_blocks, d_blocks, chunk),
            observed=maximum(carry.observed, unless_idle(list(amax)), chunk),
        )

    @property
    def _d_balance(self) -> jax.Array:
        """The cotangent of a sequence's load-balance loss, divided by the number of ranks that hold
        the sequence: the loss is a `psum` over them, whose transpose is another `psum`."""
        p, coefficient = self.run.parallelism, self.run.model.balance_loss
        return jnp.float32(coefficient / self.run.batch.global_batch / (p.context * p.tensor))

    def _arguments(self, chunk: Any, microbatch: Any) -> tuple[Any, Any, Context]:
        """Arguments of a model chunk other than the hidden state: its blocks, each with zeros whose
        gradients are the amax observed in FP8; the `Scaled` of each; and the context. They are
        sliced outside the differentiated function, so that they do not become residuals."""
        blocks, all_scaled = read(self.blocks, chunk), read(self.scaled, chunk)
        observed = [None if scaled is None else scaled.observed for scaled in all_scaled]
        group, rank = jnp.divmod(microbatch, self.stages.ranks)
        here = self.stages.first_layer(chunk, jax.lax.axis_index(mesh.PIPELINE))
        sequence = self.first_sequences[rank, group]
        ctx = self.ends.ctx.with_counters(sequence=sequence, layer=here)
        return list(zip(blocks, observed, strict=True)), all_scaled, ctx

    def _vjp(self, x: jax.Array, *, chunk: Any, microbatch: Any) -> tuple[Any, Any, Any]:
        """((hidden state, sum of balance losses), VJP, routing figures) of a model chunk."""
        function = partial(_compute, policy=self.ends.policy)
        return jax.vjp(function, *self._arguments(chunk, microbatch), x, has_aux=True)


_after = jax.lax.optimization_barrier
"""`_after((y, *received))` returns its arrays, `y` only once the others have been received. So `y`
is sent after the transfers of the rings. XLA would otherwise leave these to the end of a schedule
step, where no matmul hides them."""


def _compute(blocks: Any, all_scaled: Any, ctx: Context, x: jax.Array, *, policy: Policy) -> Any:
    """A model chunk, as in `Rank._vjp`."""
    balance, sums = jnp.zeros(()), []
    for weights, scaled in zip(blocks, all_scaled, strict=True):
        constants = scaled, ctx.counters.layer
        x, figures = checkpoint(apply_block, policy)(x, weights, constants, ctx)
        ctx = ctx.at_layer(len(weights[0].layers))
        balance += sum(jnp.sum(layer.balance_loss) for layer in figures)
        sums.append(jax.tree.map(partial(jnp.sum, axis=0), figures))
    stacked = jax.tree.map(lambda *blocks: jnp.stack(blocks).astype(jnp.float32), *sums)
    return (x, balance), stacked


def _local_actions(actions: Actions, start: int, stop: int) -> dict[str, jax.Array]:
    """This rank's actions in the schedule steps from `start` to `stop`."""
    rank = jax.lax.axis_index(mesh.PIPELINE)
    return {name: jnp.asarray(t[start:stop])[:, rank] for name, t in vars(actions).items()}
