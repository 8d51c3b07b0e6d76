"""The passes of a step whose layers are split over the ranks of a pipeline: one program for all
ranks, in which they differ by their duties (`timetable`), not by their code.

State, optimizer and checkpoints know no stages: at rest every weight is sharded over `pipeline` as
over `fsdp`. Inside one `shard_map` over all axes each rank is brought its layers (`stages`),
computes all ticks (`ticks`), and sends its gradients back.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.experts import routing
from jaxbench.models.decoder import Decoder, make_pass, stretches
from jaxbench.models.layers import Pass
from jaxbench.ops import fp8
from jaxbench.recipe.settings import Run
from jaxbench.train.stages import Stages
from jaxbench.train.ticks import Carry, Rank

Values = tuple[jax.Array, routing.Figures]


def passes(
    weights: Decoder,
    scaled: list[fp8.Scaled],
    tokens: jax.Array,
    targets: jax.Array,
    run: Run,
    sums: Any,
) -> tuple[tuple[Values, Decoder], list[jax.Array]]:
    """(((mean loss, figures of the routing), gradients), magnitudes that FP8 observed) over all
    microbatches of a step, typed as those of one pass without a pipeline.

    `weights` are `mesh.accumulating`, `scaled` is `fp8.observing`; gradients are summed in the
    dtype `sums`.
    """
    head, pull_head = jax.vjp(Decoder.head_weight, weights)
    shared = make_pass(run.model, run.batch.sequence_length, run.execution, run.precision)
    passes = _Passes(run, sums, weights.units[0], head, scaled, shared.kernel)

    parts = weights.units[0], weights.embedding, weights.norm, head
    observed = [s.observed for s in scaled if s.observed is not None]
    d_parts, observed = jax.tree.map(mesh.cotangent_spec, (parts, observed))
    out_specs = PartitionSpec(), d_parts, observed, PartitionSpec()
    run_all = jax.shard_map(passes.on_rank, out_specs=out_specs, check_vma=False)
    loss, (units, embedding, norm, d_head), observed, routed = run_all(
        weights, head, scaled, tokens, targets, shared.rotary
    )
    grads = jax.tree.map(lambda w: w, weights)
    grads.units, grads.embedding, grads.norm = nnx.List([units]), embedding, norm
    if weights.head is None:
        (tied,) = pull_head(d_head.astype(head.dtype))
        grads.embedding = jax.tree.map(jnp.add, embedding, tied.embedding)
    else:
        grads.head = weights.head.replace(d_head)
    return ((loss, _figures(routed, run.microbatch * run.batch_ranks)), grads), observed


class _Passes:
    """What all ranks of a pipeline do around their ticks. Knows, from types that a rank does not
    see, which dimensions of weights are gathered."""

    def __init__(self, run: Run, sums: Any, units: nnx.Module, head: Any, scaled: Any, kernel: str):
        self.run, self.sums, self.kernel = run, sums, kernel
        self.stages = Stages.of(run)
        self.unit_dims = [_gathered_dims(w) for w in jax.tree.leaves(units)]
        self.head_dims = _gathered_dims(head)
        self.stored_dims = [
            {name: _gathered_dims(w) for name, w in each.stored.items()} for each in scaled
        ]

    def on_rank(
        self, weights: Decoder, head: Any, scaled: Any, tokens: Any, targets: Any, rotary: Any
    ) -> tuple[jax.Array, Any, list[jax.Array], Any]:
        """On one device: (loss, gradients of units, embedding, norm and head at rest, magnitudes,
        figures of the routing)."""
        (stretch,) = stretches(self.run.model, self.run.execution, self.run.precision)
        units, structure = jax.tree.flatten(weights.units[0])
        brought = map(self.stages.bring, units, self.unit_dims)
        rank = Rank(
            run=self.run,
            stages=self.stages,
            saved=stretch.saved,
            sums=self.sums,
            model=weights,
            units=jax.tree.unflatten(structure, brought),
            head=mesh.gather(head, self.head_dims),
            scaled=next(map(self._bring_scaled, scaled, self.stored_dims), None),
            shared=Pass(rotary, self.kernel),
            tokens=tokens,
            targets=targets,
        )
        carry = rank.run_ticks()
        d_units = [
            self.stages.send_back(grad, dims, w.shape)
            for grad, dims, w in zip(
                jax.tree.leaves(carry.d_units), self.unit_dims, units, strict=True
            )
        ]
        d_norm, d_head = carry.d_ends
        d_head = mesh.scatter(d_head, self.head_dims)
        d_parts = jax.tree.unflatten(structure, d_units), carry.d_embedding, d_norm, d_head
        observed = [
            self.stages.send_back(carry.observed, [], s.observed.shape)
            for s in scaled
            if s.observed is not None
        ]
        return carry.loss, d_parts, observed, self._routed(carry)

    def _bring_scaled(self, scaled: fp8.Scaled, dims: dict[str, mesh.Gathered]) -> fp8.Scaled:
        bring, observed = self.stages.bring, scaled.observed
        return replace(
            scaled,
            stored={name: bring(w, dims[name]) for name, w in scaled.stored.items()},
            inverse=bring(scaled.inverse, [], absent=1),  # zeros are 0 in FP8 by any other scale
            observed=None if observed is None else bring(observed, []),
        )

    def _routed(self, carry: Carry) -> Any:
        """(balance loss, load, dropped choices) of each layer with experts, in each microbatch
        `[M, layers, ..]`, summed over its sequences and ranks."""
        layers = self.run.model.layers
        everyone = mesh.PIPELINE, *mesh.BATCH

        def at_rest(figure: jax.Array) -> jax.Array:
            shape = layers, *figure.shape[3:]
            send = partial(self.stages.send_back, dims=[], shape=shape)
            return jax.lax.psum(jax.vmap(send)(figure[:-1]), everyone)

        return jax.tree.map(at_rest, carry.routed)


def held_gradients(model: Decoder, run: Run) -> int:
    """Entries of the gradients that one device sums up during a step: of whole layers of its own,
    with the padding, of the whole head, and of its part of the table."""
    stages, sizes = Stages.of(run), jax.sharding.get_abstract_mesh().shape

    def at_rest(tree: Any) -> list[int]:
        return [math.prod(w.sharding.shard_shape(w.shape)) for w in jax.tree.leaves(tree)]

    def whole(tree: Any) -> int:
        gathered = [
            math.prod(sizes[axis] for _, axes in _gathered_dims(w) for axis in axes)
            for w in jax.tree.leaves(tree)
        ]
        return sum(size * ranks for size, ranks in zip(at_rest(tree), gathered, strict=True))

    own_layers = stages.chunks * stages.size / run.model.layers
    head = jax.eval_shape(Decoder.head_weight, model)
    return (
        round(whole(model.units) * own_layers)
        + whole((model.norm, head))
        + sum(at_rest(model.embedding))
    )


def _gathered_dims(w: Any) -> mesh.Gathered:
    """The dimensions over which a weight at rest is gathered: not that of experts, over which no
    pipeline is laid."""
    return [(dim, axes) for dim, axes in mesh.gathered_dims(w) if mesh.PIPELINE in axes]


def _figures(routed: list, sequences: int) -> routing.Figures:
    """Means over microbatches, of so many sequences each."""
    if not routed:
        return {}
    losses, load, dropped = (jnp.concatenate(parts, axis=1) for parts in zip(*routed, strict=True))
    each = jax.vmap(routing.figures)(
        losses[..., None] / sequences, load[..., None, :], dropped[..., None]
    )
    return jax.tree.map(lambda figure: jnp.mean(figure, axis=0), each)
