"""Weights at rest and in the stages of a pipeline.

At rest every weight is sharded over `pipeline` like over `fsdp`, whatever its layer: state,
optimizer and checkpoints know no stages. Once per step each rank is brought the whole of its own
layers, and gradients go back the same way, transposed. Layer = (chunk P + rank) K + place in its
chunk. Depths that do not divide are padded with layers of zero weights, which add nothing to their
input.

Everything here is one device's own, inside a `shard_map`.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxbench import mesh
from jaxbench.recipe.settings import Run


@dataclass(frozen=True)
class Stages:
    """How the layers of a model lie on the `ranks` of a pipeline, `size` in each of a rank's
    `chunks`."""

    ranks: int
    chunks: int
    layers: int

    @classmethod
    def of(cls, run: Run) -> "Stages":
        """Those of a run."""
        return cls(run.parallelism.pipeline, run.parallelism.virtual_stages, run.model.layers)

    @property
    def size(self) -> int:
        """Layers of a chunk, with the padding."""
        return -(-self.layers // (self.ranks * self.chunks))

    @property
    def padding(self) -> int:
        """Layers that are computed without being there."""
        return self.ranks * self.chunks * self.size - self.layers

    def bring(self, w: jax.Array, dims: mesh.Gathered, absent: float = 0) -> jax.Array:
        """This rank's layers `[chunks, size, ..]`, gathered over `dims`, of a weight at rest
        `[layers, ..]`; `absent` fills the padding."""
        w = jnp.pad(w, [(0, self.padding), *((0, 0) for _ in w.shape[1:])], constant_values=absent)
        w = w.reshape(self.chunks, self.ranks, self.size, *w.shape[1:])
        if not dims:
            rank = jax.lax.axis_index(mesh.PIPELINE)
            return jax.lax.dynamic_index_in_dim(w, rank, 1, keepdims=False)
        ((dim, axes),) = dims
        assert axes[-1] == mesh.PIPELINE
        w = jax.lax.all_to_all(w, mesh.PIPELINE, 1, dim + 2, tiled=True)[:, 0]
        rest = axes[:-1]
        return jax.lax.all_gather(w, rest, axis=dim + 1, tiled=True) if rest else w

    def send_back(self, grad: jax.Array, dims: mesh.Gathered, shape: tuple[int, ...]) -> jax.Array:
        """The transpose of `bring`: gradients of this rank's layers to where a weight of this
        `shape` lies at rest, summed over those who had gathered it. Zeros stand for the layers of
        others."""
        there = jax.ShapeDtypeStruct(shape, grad.dtype)
        (at_rest,) = jax.linear_transpose(partial(self.bring, dims=dims), there)(grad)
        return at_rest
