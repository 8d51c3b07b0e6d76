"""Loss and gradients of a step with a pipeline: one SPMD program in which ranks differ by their
actions (`pipeline_schedule`), not by their code.

State, optimizer and checkpoints have no stages: at rest every weight is sharded over `pipeline` as
over `fsdp`. Inside one `shard_map` over all axes each rank gathers its layers (`stages`), runs the
schedule (`pipeline_rank`), and scatters its gradients.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.experts import routing
from jaxbench.models.decoder import Decoder, forward_context, segments
from jaxbench.models.layers import ForwardContext
from jaxbench.ops import fp8
from jaxbench.recipe.settings import Run
from jaxbench.train.pipeline_rank import Carry, Rank
from jaxbench.train.stages import Stages

Values = tuple[jax.Array, routing.Figures]


def accumulate(
    weights: Decoder,
    scaled: list[fp8.Scaled],
    tokens: jax.Array,
    targets: jax.Array,
    run: Run,
    sum_dtype: Any,
) -> tuple[tuple[Values, Decoder], list[jax.Array]]:
    """(((mean loss, routing figures), gradients), observed amax) over all microbatches of a step,
    with the types of one forward and backward pass without a pipeline.

    `weights` come from `mesh.accumulating`, `scaled` from `fp8.with_observed`; `tokens` and
    `targets` are `"microbatch batch seq"`. Gradients are summed in `sum_dtype`.
    """
    head, pull_head = jax.vjp(Decoder.head_weight, weights)
    ctx = forward_context(run.model, run.batch.sequence_length, run.execution, run.precision)
    pipeline = _Pipeline(run, sum_dtype, weights.stacks[0], head, scaled, ctx)

    parts = weights.stacks[0], weights.embedding, weights.norm, head
    observed = [s.observed for s in scaled if s.observed is not None]
    d_parts, observed = jax.tree.map(mesh.cotangent_spec, (parts, observed))
    out_specs = PartitionSpec(), d_parts, observed, PartitionSpec()
    run_all = jax.shard_map(pipeline.on_rank, out_specs=out_specs, check_vma=False)
    loss, (blocks, embedding, norm, d_head), observed, figures = run_all(
        weights, head, scaled, tokens, targets, ctx.rotary
    )
    grads = jax.tree.map(lambda w: w, weights)
    grads.stacks, grads.embedding, grads.norm = nnx.List([blocks]), embedding, norm
    if weights.head is None:
        (tied,) = pull_head(d_head.astype(head.dtype))
        grads.embedding = jax.tree.map(jnp.add, embedding, tied.embedding)
    else:
        grads.head = weights.head.replace(d_head)
    return ((loss, _mean_figures(figures, run.microbatch * run.batch_ranks)), grads), observed


class _Pipeline:
    """The program of a pipeline around its schedule: gathers before it, scatters after it.

    Which dimensions of weights are gathered is taken from their types here, outside the
    `shard_map`, inside which arrays are local and their types name no axes.
    """

    def __init__(
        self, run: Run, sum_dtype: Any, blocks: nnx.Module, head: Any, scaled: Any,
        ctx: ForwardContext,
    ):  # fmt: skip
        self.run, self.sum_dtype, self.ctx = run, sum_dtype, ctx
        self.stages = Stages.of(run)
        self.block_dims = [_gathered_dims(w) for w in jax.tree.leaves(blocks)]
        self.head_dims = _gathered_dims(head)
        self.stored_dims = [
            {name: _gathered_dims(w) for name, w in s.stored.items()} for s in scaled
        ]

    def on_rank(
        self, weights: Decoder, head: Any, scaled: Any, tokens: Any, targets: Any, rotary: Any
    ) -> tuple[jax.Array, Any, list[jax.Array], Any]:
        """On one device: (loss, gradients at rest of blocks, embedding, norm and head, observed
        amax, routing figures)."""
        (segment,) = segments(self.run.model, self.run.execution, self.run.precision)
        blocks, structure = jax.tree.flatten(weights.stacks[0])
        local_blocks = map(self.stages.gather_layers, blocks, self.block_dims)
        rank = Rank(
            run=self.run,
            stages=self.stages,
            saved=segment.saved,
            sum_dtype=self.sum_dtype,
            model=weights,
            blocks=jax.tree.unflatten(structure, local_blocks),
            head=mesh.gather(head, self.head_dims),
            scaled=next(map(self._bring_scaled, scaled, self.stored_dims), None),
            ctx=self.ctx._replace(rotary=rotary),
            tokens=tokens,
            targets=targets,
        )
        carry = rank.run_schedule()
        d_blocks = [
            self.stages.scatter_gradients(grad, dims, w.shape)
            for grad, dims, w in zip(
                jax.tree.leaves(carry.d_blocks), self.block_dims, blocks, strict=True
            )
        ]
        d_norm, d_head = carry.d_norm_head
        d_head = mesh.scatter(d_head, self.head_dims)
        d_parts = jax.tree.unflatten(structure, d_blocks), carry.d_embedding, d_norm, d_head
        observed = [
            self.stages.scatter_gradients(carry.observed, [], s.observed.shape)
            for s in scaled
            if s.observed is not None
        ]
        return carry.loss, d_parts, observed, self._routing(carry)

    def _bring_scaled(self, scaled: fp8.Scaled, dims: dict[str, mesh.Gathered]) -> fp8.Scaled:
        gather, observed = self.stages.gather_layers, scaled.observed
        return replace(
            scaled,
            stored={name: gather(w, dims[name]) for name, w in scaled.stored.items()},
            scale_inv=gather(scaled.scale_inv, [], padding=1),  # 0 / 0 would be NaN
            observed=None if observed is None else gather(observed, []),
        )

    def _routing(self, carry: Carry) -> Any:
        """(balance loss, load, dropped assignments) of each layer with experts and each microbatch,
        `[microbatches, layers, ..]`, summed over sequences and ranks."""
        layers = self.run.model.layers
        axes = mesh.PIPELINE, *mesh.BATCH

        def at_rest(figure: jax.Array) -> jax.Array:
            shape = layers, *figure.shape[3:]
            send = partial(self.stages.scatter_gradients, dims=[], shape=shape)
            return jax.lax.psum(jax.vmap(send)(figure[:-1]), axes)

        return jax.tree.map(at_rest, carry.routing)


def _gathered_dims(w: Any) -> mesh.Gathered:
    """Gathered dimensions of a weight at rest: not that of experts, which is never split over
    `pipeline`."""
    return [(dim, axes) for dim, axes in mesh.gathered_dims(w) if mesh.PIPELINE in axes]


def _mean_figures(layers: tuple, sequences: int) -> routing.Figures:
    """Routing figures as means over microbatches of `sequences` each."""
    if not layers:
        return {}
    losses, load, dropped = (jnp.concatenate(parts, axis=1) for parts in zip(*layers, strict=True))
    figures = jax.vmap(routing.figures)(
        losses[..., None] / sequences, load[..., None, :], dropped[..., None]
    )
    return jax.tree.map(partial(jnp.mean, axis=0), figures)
