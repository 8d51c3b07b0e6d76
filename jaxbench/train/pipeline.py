"""Loss and gradients of a step with a pipeline: one SPMD program, in which ranks differ by their
actions (`pipeline_schedule`) and not by their code.

State, optimizer and checkpoints know no stages: at rest every weight is sharded over `pipeline` as
over `fsdp`. Inside one `shard_map` over all axes, each rank gathers the weights of its layers
(`pipeline_stages`) and of the ends (`pipeline_ends`), runs the schedule (`pipeline_rank`), and
reduce-scatters its gradients.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.models.context import Context, Sequences, make_context
from jaxbench.models.decoder import Decoder, prediction_segment, segments
from jaxbench.ops import quantized
from jaxbench.ops.moe import routing
from jaxbench.ops.stash import read
from jaxbench.recipe.model import repeating_blocks, stacks
from jaxbench.recipe.settings import Run
from jaxbench.train.pipeline_ends import Ends, EndWeights, Output
from jaxbench.train.pipeline_rank import Carry, Rank
from jaxbench.train.pipeline_stages import Stages


def accumulate(
    weights: Decoder,
    scaled: list[quantized.Scaled],
    batches: Sequences,
    run: Run,
) -> tuple[jax.Array, routing.RoutingSummary, Decoder, list[jax.Array]]:
    """(mean loss, routing figures, gradients, observed amax) over all microbatches of a step, with
    the same types as one forward and backward pass without a pipeline.

    `weights` come from `mesh.accumulating`, and `scaled` from `Quantization.scaled`. Tokens and
    targets of the `batches` are `"microbatch batch seq"`.
    """
    head, pull_head = jax.vjp(Decoder.head_weight, weights)
    ctx = make_context(run.model, run.batch.sequence_length, run.execution, run.precision)
    pipeline = _Pipeline(run, weights, head, scaled)

    parts = weights.stacks, weights.embedding, Output(weights.norm, head, weights.prediction)
    observed = [s.observed for s in scaled if s.observed is not None]
    d_parts, observed = jax.tree.map(mesh.cotangent_spec, (parts, observed))
    out_specs = PartitionSpec(), d_parts, observed, PartitionSpec()
    run_all = jax.shard_map(pipeline.on_rank, out_specs=out_specs, check_vma=False)
    loss, (d_stacks, embedding, output), observed, figures = run_all(
        weights, head, scaled, batches, ctx
    )
    grads = jax.tree.map(lambda w: w, weights)
    grads.stacks, grads.embedding = d_stacks, embedding
    grads.norm, d_head, grads.prediction = output
    if weights.head is None:
        (tied,) = pull_head(d_head.astype(head.dtype))
        grads.embedding = jax.tree.map(jnp.add, embedding, tied.embedding)
    else:
        grads.head = weights.head.replace(d_head)
    return loss, _mean_figures(figures, run.microbatch * run.batch_ranks), grads, observed


class _Pipeline:
    """The program of a pipeline around its schedule: gathers before it, scatters after it.

    The constructor reads off the types of weights which dimensions are gathered, because inside the
    `shard_map` arrays are local, and their types name no axes. The stages compute the stack of
    index `staged`. The ends of the pipeline compute the stacks `before` and `behind` it.
    """

    def __init__(self, run: Run, weights: Decoder, head: Any, scaled: Any):
        self.run = run
        self.stages, self.repeats = Stages.of(run), [times for _, times in stacks(run.model)]
        self.staged = len(repeating_blocks(run.model)) - 1
        self.before = range(self.staged)
        self.behind = range(self.staged + 1, len(self.repeats))
        self.stack_dims = [list(map(_gathered_dims, jax.tree.leaves(s))) for s in weights.stacks]
        self.prediction_bf16 = (
            prediction_segment(run.model, run.execution, run.precision).bf16
            if run.model.prediction
            else frozenset()
        )
        self.prediction_dims = list(map(_gathered_dims, jax.tree.leaves(weights.prediction)))
        self.head_dims = _gathered_dims(head)
        self.stored_dims = [list(map(_gathered_dims, jax.tree.leaves(s.stored))) for s in scaled]

    def on_rank(
        self, weights: Decoder, head: Any, scaled: Any, batches: Sequences, ctx: Context
    ) -> tuple[jax.Array, Any, list[jax.Array], Any]:
        """On one device: (loss, gradients at rest of (stacks, embedding, output layers), observed
        amax, routing figures)."""
        *_, segment = segments(self.run.model, self.run.execution, self.run.precision)
        stacked, structure = jax.tree.flatten(weights.stacks[self.staged])
        dims = self.stack_dims[self.staged]
        before, before_scaled = self._bring_end(self.before, weights, scaled)
        behind, behind_scaled = self._bring_end(self.behind, weights, scaled)
        prediction = _each(mesh.gather, weights.prediction, self.prediction_dims)
        output = Output(weights.norm, mesh.gather(head, self.head_dims), prediction)
        first_sequences = jnp.reshape(batches.first_sequence, (self.stages.ranks, -1))
        own = first_sequences[jax.lax.axis_index(mesh.PIPELINE)]
        rank = Rank(
            run=self.run,
            stages=self.stages,
            ends=Ends(
                cfg=self.run.model,
                dtype=weights.dtype,
                ctx=ctx,
                policy=segment.policy,
                weights=EndWeights(weights.embedding, before, output, behind),
                before_scaled=before_scaled,
                behind_scaled=behind_scaled,
                prediction_bf16=self.prediction_bf16,
                batch=batches._replace(first_sequence=own),
            ),
            blocks=self._of_chunk(
                jax.tree.unflatten(structure, map(self.stages.gather_layers, stacked, dims))
            ),
            scaled=self._of_chunk(self._bring_scaled(scaled[self.staged]) if scaled else None),
            first_sequences=first_sequences,
        )
        carry = rank.run_schedule()
        d_blocks = _stack(carry.d_blocks, axis=1)
        d_staged = [
            self.stages.scatter_gradients(grad, dims, w.shape)
            for grad, dims, w in zip(jax.tree.leaves(d_blocks), dims, stacked, strict=True)
        ]
        d_stacks = [
            *self._scatter_end(self.before, carry.d_ends.before),
            jax.tree.unflatten(structure, d_staged),
            *self._scatter_end(self.behind, carry.d_ends.behind),
        ]
        d_norm, d_head, d_prediction = carry.d_ends.output
        d_output = Output(
            d_norm,
            mesh.scatter(d_head, self.head_dims),
            _each(mesh.scatter, d_prediction, self.prediction_dims),
        )
        d_parts = nnx.List(d_stacks), carry.d_ends.embedding, d_output
        return carry.loss, d_parts, self._observed(carry, scaled), self._routing(carry)

    def _bring_end(self, part: range, weights: Decoder, scaled: Any) -> tuple[list, list]:
        """(blocks, the `Scaled` of each or None) of the stacks in `part`, gathered."""
        blocks, all_scaled = [], []
        for index in part:
            stack = _each(mesh.gather, weights.stacks[index], self.stack_dims[index])
            stack_scaled = None
            if scaled:
                stored = _each(mesh.gather, scaled[index].stored, self.stored_dims[index])
                stack_scaled = replace(scaled[index], stored=stored)
            for block in range(self.repeats[index]):
                blocks.append(read(stack, block))
                all_scaled.append(read(stack_scaled, block))
        return blocks, all_scaled

    def _scatter_end(self, part: range, d_blocks: list) -> Iterator[Any]:
        """The transpose of `_bring_end`: gradients of the stacks in `part`, at rest."""
        rest = iter(d_blocks)
        for index in part:
            stack = _stack(list(islice(rest, self.repeats[index])))
            yield _each(mesh.scatter, stack, self.stack_dims[index])

    def _bring_scaled(self, scaled: quantized.Scaled) -> quantized.Scaled:
        gather, dims = self.stages.gather_layers, self.stored_dims[self.staged]
        figures = scaled.observed, scaled.seeds
        observed, seeds = jax.tree.map(partial(gather, dims=[]), figures)
        # Padding of 1: 0 / 0 would be NaN.
        scale_inv = jax.tree.map(partial(gather, dims=[], padding=1), scaled.scale_inv)
        stored = _each(gather, scaled.stored, dims)
        return replace(scaled, stored=stored, scale_inv=scale_inv, observed=observed, seeds=seeds)

    def _of_chunk(self, tree: Any) -> list[Any]:
        """The blocks of a model chunk, `[chunks, ..]`, from leaves `[chunks, size, ..]`."""
        return [jax.tree.map(itemgetter((slice(None), k)), tree) for k in range(self.stages.size)]

    def _observed(self, carry: Carry, scaled: Any) -> list[jax.Array]:
        """The observed amax of every stack; none under current scaling."""
        if not scaled or scaled[0].observed is None:
            return []
        before, behind = map(iter, carry.ends_observed)
        shape = scaled[self.staged].observed.shape
        return [
            *(jnp.stack(list(islice(before, self.repeats[index]))) for index in self.before),
            self.stages.scatter_gradients(_stack(carry.observed, axis=1), [], shape),
            *(jnp.stack(list(islice(behind, self.repeats[index]))) for index in self.behind),
        ]

    def _routing(self, carry: Carry) -> Any:
        """`RoutingFigures` of each layer with experts, `[microbatches, layers, ..]`, summed over
        sequences and ranks."""
        axes = mesh.PIPELINE, *mesh.BATCH
        ranks, rank = self.stages.ranks, jax.lax.axis_index(mesh.PIPELINE)

        def at_rest(figure: jax.Array) -> jax.Array:
            shape = self.stages.blocks, *figure.shape[3:]
            send = partial(self.stages.scatter_gradients, dims=[], shape=shape)
            return jax.lax.psum(jax.vmap(send)(figure[:-1]), axes)

        def of_microbatches(figure: jax.Array) -> jax.Array:
            """Figures of all microbatches, from `[groups, ..]`: this rank's one of each group."""
            own = jnp.arange(ranks) == rank
            own = own.reshape(1, ranks, *(1 for _ in figure.shape[1:]))
            spread = jnp.where(own, figure[:, None], 0.0).reshape(-1, 1, *figure.shape[1:])
            return jax.lax.psum(spread, axes)

        staged = jax.tree.map(at_rest, carry.routing)
        return *staged, *jax.tree.map(of_microbatches, carry.ends_routing)


def _each(function: Callable, tree: Any, dims: list[mesh.Gathered]) -> Any:
    """`mesh.gather` or `mesh.scatter` of every weight of a tree, with the dimensions that it
    gathers."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, map(function, leaves, dims))


def _stack(blocks: list[Any], axis: int = 0) -> Any:
    """The trees of all blocks as one, their arrays stacked along `axis`."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays, axis), *blocks)


def _gathered_dims(w: Any) -> mesh.Gathered:
    """Gathered dimensions of a weight at rest. The dimension of experts is none of them, since a
    pipeline does not split it over `pipeline` (`mesh.expert_dims`)."""
    return [(dim, axes) for dim, axes in mesh.gathered_dims(w) if mesh.PIPELINE in axes]


def _mean_figures(layers: tuple, sequences: int) -> routing.RoutingSummary:
    """The mean of the summaries of all microbatches, of `sequences` each."""
    if not layers:
        return {}
    losses, load, dropped = (jnp.concatenate(parts, axis=1) for parts in zip(*layers, strict=True))
    summaries = jax.vmap(routing.summary)(
        routing.RoutingFigures(
            losses[..., None] / sequences, load[..., None, :], dropped[..., None]
        )
    )
    return jax.tree.map(partial(jnp.mean, axis=0), summaries)
