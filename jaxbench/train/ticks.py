"""The ticks of a pipeline, as one of its ranks sees them.

In each tick a rank computes one chunk of layers forward for one microbatch and one backward for
another, and hands both results on; `timetable` says which. Embedding and loss are no stage: each
rank has microbatches of its own, one of every group, and the ranks exchange what enters the first
stage and what leaves the last.

The collectives of a tick hide behind the products of the other direction. What activations take
does not grow with the number of microbatches: they wait in slots, and for one or two groups at the
ends.

Everything here is one device's own, inside a `shard_map` (`mesh`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxbench import mesh
from jaxbench.models.decoder import Decoder, apply_unit, embed, head_loss
from jaxbench.models.layers import Pass
from jaxbench.ops import fp8, remat
from jaxbench.ops.slots import at, put, residuals, restored
from jaxbench.recipe.settings import Run
from jaxbench.train.stages import Stages
from jaxbench.train.timetable import Duties, timetable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """What one tick leaves to the next, on one rank.

    `x` and `dy` have just arrived from the neighbours. `inputs` and `d_inputs` are what enters the
    first stage, and its gradient, of two groups of microbatches in turn; `outputs` and `d_outputs`
    what leaves the last, of one group; two of them have one more row for what nobody needs. `slots`
    hold the activations of chunks that wait for their backward pass. The rest are sums: the loss;
    gradients of the embedding, of the units `[chunks, size, ..]`, and of final norm and head;
    magnitudes that FP8 observes in the units; and figures of the routing, `[microbatches + 1,
    chunks, size]`, with a last row for what is computed by idle ranks.
    """

    x: jax.Array
    dy: jax.Array
    inputs: jax.Array
    d_inputs: jax.Array
    outputs: jax.Array
    d_outputs: jax.Array
    slots: Any
    loss: jax.Array
    d_embedding: Any
    d_units: Any
    d_ends: Any
    observed: Any
    routed: Any


@dataclass(frozen=True)
class Rank:
    """What one rank of a pipeline computes with.

    `units` `[chunks, size, ..]` and `head` are gathered, `scaled` is what FP8 adds to the units, or
    None; of the `model` at rest only embedding and final norm are used. `tokens` and `targets`
    `[groups, batch, seq]` are this rank's microbatches. Activations in `saved` are not recomputed.
    Gradients are summed in the dtype `sums`.
    """

    run: Run
    stages: Stages
    saved: frozenset[str] | None
    sums: Any
    model: Decoder
    units: Any
    head: jax.Array
    scaled: fp8.Scaled | None
    shared: Pass
    tokens: jax.Array
    targets: jax.Array

    def run_ticks(self) -> Carry:
        """All ticks of a step."""
        groups, ranks = len(self.tokens), self.stages.ranks
        table = timetable(ranks, self.stages.chunks, groups * ranks)
        warmup, end = table.warmup, table.warmup + (groups - 1) * table.period

        # Ranks enter a group one tick after another. So its first inputs are needed, and its last
        # gradients return, during the ticks of the group before and of the second one after it.
        def group_of_ticks(carry: Carry, now: Any) -> tuple[Carry, None]:
            group, duties = now
            carry = self._losses(carry, group - 1)
            carry = self._embed(carry, group + 1) if groups > 2 else carry
            carry, _ = jax.lax.scan(self._tick, carry, duties)
            return self._embed_back(carry, group - 2) if groups > 2 else carry, None

        carry = self._start(table.slots)
        for group in range(min(groups, 2)):
            carry = self._embed(carry, group)
        carry, _ = jax.lax.scan(self._tick, carry, (_own(table.forward, 0, warmup), None))
        between = _own(table.forward, warmup, end), _own(table.backward, warmup, end)
        if groups == 2:
            carry, _ = group_of_ticks(carry, (1, between))
        elif groups > 2:
            cut = jax.tree.map(lambda t: t.reshape(groups - 1, table.period), between)
            carry, _ = jax.lax.scan(group_of_ticks, carry, (jnp.arange(1, groups), cut))
        carry = self._losses(carry, groups - 1)
        last = _own(table.backward, end, end + warmup)
        carry, _ = jax.lax.scan(self._tick, carry, (None, last))
        for group in range(max(groups - 2, 0), groups):
            carry = self._embed_back(carry, group)
        return carry

    def _start(self, slots: int) -> Carry:
        (groups, _, _), ranks = self.tokens.shape, self.stages.ranks

        def rows(tree: Any, *count: int, dtype: Any = None) -> Any:
            return jax.tree.map(lambda a: jnp.zeros((*count, *a.shape), dtype or a.dtype), tree)

        vjp, figures = self._types
        return Carry(
            x=rows(self._x),
            dy=rows(self._x),
            inputs=rows(self._x, 2 * ranks),
            d_inputs=rows(self._x, 2 * ranks + 1),
            outputs=rows(self._x, ranks + 1),
            d_outputs=rows(self._x, ranks),
            slots=rows((residuals(vjp), self._x), slots),
            loss=jnp.zeros(()),
            d_embedding=rows(self.model.embedding, dtype=self.sums),
            d_units=rows(self.units, dtype=self.sums),
            d_ends=rows((self.model.norm, self.head), dtype=self.sums),
            observed=None if self.scaled is None else rows(self.scaled.observed),
            routed=rows(figures, groups * ranks + 1, self.stages.chunks),
        )

    @cached_property
    def _x(self) -> jax.ShapeDtypeStruct:
        """What stages hand on."""
        return jax.eval_shape(self._embedded, self.model.embedding, self.tokens[0])

    @cached_property
    def _types(self) -> tuple[Any, Any]:
        """The transpose of a chunk and the figures of its routing, as shapes."""
        _, *types = jax.eval_shape(partial(self._vjp, chunk=0), self._x)
        return tuple(types)

    def _embedded(self, embedding: Any, tokens: jax.Array) -> jax.Array:
        return embed(self.run.model, embedding, tokens, self.model.dtype)

    def _embed(self, carry: Carry, group: Any) -> Carry:
        """Fills the inputs of the first stage for a group of microbatches."""
        x = self._embedded(self.model.embedding, at(self.tokens, group))
        everyone = jax.lax.all_gather(x, mesh.PIPELINE)
        start = group % 2 * self.stages.ranks
        return replace(
            carry, inputs=jax.lax.dynamic_update_slice_in_dim(carry.inputs, everyone, start, 0)
        )

    def _embed_back(self, carry: Carry, group: Any) -> Carry:
        """Adds the gradient of the embedding once a group has come all the way back."""
        ranks = self.stages.ranks
        d_inputs = jax.lax.dynamic_slice_in_dim(carry.d_inputs, group % 2 * ranks, ranks)
        dx = jax.lax.psum_scatter(d_inputs, mesh.PIPELINE, scatter_dimension=0)
        embedded = partial(self._embedded, tokens=at(self.tokens, group))
        (d_embedding,) = jax.vjp(embedded, self.model.embedding)[1](dx)
        return replace(carry, d_embedding=_add(carry.d_embedding, d_embedding))

    def _losses(self, carry: Carry, group: Any) -> Carry:
        """Loss and gradient of a group, of whose microbatches each rank takes its own from the last
        one."""
        ranks, groups = self.stages.ranks, len(self.tokens)
        own = jax.lax.all_to_all(carry.outputs[:ranks], mesh.PIPELINE, 0, 0)[-1]
        loss_of = partial(head_loss, self.run.model, targets=at(self.targets, group))
        loss, pull = jax.vjp(loss_of, self.model.norm, self.head, own)
        *d_ends, dx = pull(jnp.full_like(loss, 1 / groups))
        return replace(
            carry,
            loss=carry.loss + loss / groups,
            d_ends=_add(carry.d_ends, tuple(d_ends)),
            d_outputs=jax.lax.all_gather(dx, mesh.PIPELINE),
        )

    def _tick(self, carry: Carry, duties: tuple) -> tuple[Carry, None]:
        forward, backward = duties
        if backward is not None:
            # Read before it is filled again, so that neither direction waits for the other.
            kept, slots = jax.lax.optimization_barrier(
                (at(carry.slots, backward["slot"]), carry.slots)
            )
            carry = self._backward(replace(carry, slots=slots), kept, backward)
        if forward is not None:
            carry = self._forward(carry, forward)
        return carry, None

    def _forward(self, carry: Carry, now: dict[str, jax.Array]) -> Carry:
        ranks, rank = self.stages.ranks, jax.lax.axis_index(mesh.PIPELINE)
        microbatch, chunk = now["microbatch"], now["chunk"]
        enters = (rank == 0) & (chunk == 0)
        x = jnp.where(enters, at(carry.inputs, microbatch % (2 * ranks)), carry.x)
        (y, _), vjp, figures = self._vjp(x, chunk=chunk)
        kept, expected = residuals(vjp), residuals(self._types[0])
        assert [r.shape for r in kept] == [r.shape for r in expected]
        leaves = (rank == ranks - 1) & (chunk == self.stages.chunks - 1) & now["busy"]
        row = jnp.where(now["busy"], microbatch, len(self.tokens) * ranks)
        return replace(
            carry,
            x=jax.lax.ppermute(y, mesh.PIPELINE, [(i, (i + 1) % ranks) for i in range(ranks)]),
            outputs=put(carry.outputs, y, jnp.where(leaves, microbatch % ranks, ranks)),
            slots=put(carry.slots, (kept, x), now["slot"]),
            routed=put(carry.routed, figures, row, chunk),
        )

    def _backward(self, carry: Carry, kept: Any, now: dict[str, jax.Array]) -> Carry:
        ranks, rank = self.stages.ranks, jax.lax.axis_index(mesh.PIPELINE)
        microbatch, chunk = now["microbatch"], now["chunk"]
        enters = (rank == ranks - 1) & (chunk == self.stages.chunks - 1)
        dy = jnp.where(enters, at(carry.d_outputs, microbatch % ranks), carry.dy)

        def unless_idle(tree: Any) -> Any:
            return jax.tree.map(lambda a: jnp.where(now["busy"], a, jnp.zeros_like(a)), tree)

        waited, x = kept
        vjp = restored(self._types[0], waited, [*self._arguments(chunk), x])
        d_layers, _, _, dx = vjp(unless_idle((dy, self._d_balance)))
        d_units, observed = carry.d_units, carry.observed
        for place, (d_unit, seen) in enumerate(d_layers):
            d_units = _add(d_units, d_unit, chunk, place)
            observed = _raise(observed, unless_idle(seen), chunk, place)
        leaves = (rank == 0) & (chunk == 0) & now["busy"]
        row = jnp.where(leaves, microbatch % (2 * ranks), 2 * ranks)
        return replace(
            carry,
            dy=jax.lax.ppermute(dx, mesh.PIPELINE, [((i + 1) % ranks, i) for i in range(ranks)]),
            d_inputs=put(carry.d_inputs, dx, row),
            d_units=d_units,
            observed=observed,
        )

    @property
    def _d_balance(self) -> jax.Array:
        """The gradient of a sequence's load-balance loss. It is the sum over the ranks of a
        sequence, whose transpose sums again."""
        p, coefficient = self.run.parallelism, self.run.model.balance_loss
        return jnp.float32(coefficient / self.run.batch.global_batch / (p.context * p.tensor))

    def _arguments(self, chunk: Any) -> tuple[Any, Any, Any]:
        """What a chunk is given beside the hidden state: its layers, each with zeros for what FP8
        observes; their scales; and the rotary tables. They are sliced here and not in what is
        differentiated, and so are no residuals: no slot holds them."""
        places = range(self.stages.size)
        layers = [at(self.units, chunk, place) for place in places]
        scales = [at(self.scaled, chunk, place) for place in places]
        observed = [None if s is None else s.observed for s in scales]
        return list(zip(layers, observed, strict=True)), scales, self.shared.rotary

    def _vjp(self, x: jax.Array, *, chunk: Any) -> tuple[Any, Any, Any]:
        """((hidden state, sum of balance losses), transpose, figures of the routing) of a chunk."""
        function = partial(_compute, kernel=self.shared.kernel, saved=self.saved)
        return jax.vjp(function, *self._arguments(chunk), x, has_aux=True)


def _compute(
    layers: Any, scales: Any, rotary: Any, x: jax.Array, *, kernel: str, saved: Any
) -> Any:
    """A chunk of layers, as `Rank._vjp` has it."""

    def layer(x: jax.Array, operands: Any) -> Any:
        (unit, observed), scaled, rotary = operands
        return apply_unit(unit, observed, scaled, x, Pass(rotary, kernel))

    balance, figures = jnp.zeros(()), []
    for operands in zip(layers, scales, strict=True):
        x, routed = remat.recomputed(layer, saved)(x, (*operands, rotary))
        balance += sum(jnp.sum(losses) for losses, _, _ in routed)
        figures.append([[jnp.sum(f, axis=0) for f in layer] for layer in routed])
    stacked = jax.tree.map(lambda *each: jnp.stack(each).astype(jnp.float32), *figures)
    return (x, balance), stacked


def _merge(combine: Callable, tree: Any, values: Any, *index: Any) -> Any:
    """The arrays with the values combined into that entry, in place."""
    return put(tree, jax.tree.map(combine, at(tree, *index), values), *index)


_add = partial(_merge, lambda total, value: total + value.astype(total.dtype))
_raise = partial(_merge, jnp.maximum)


def _own(duties: Duties, start: int, stop: int) -> dict[str, jax.Array]:
    """This rank's duties in some ticks."""
    rank = jax.lax.axis_index(mesh.PIPELINE)
    return {name: jnp.asarray(t[start:stop])[:, rank] for name, t in vars(duties).items()}
