"""How a pipeline rank gathers its blocks from weights at rest, and scatters their gradients.

At rest every weight is sharded over `pipeline` as over `fsdp`, whatever its layer. Once per step
each rank gathers the whole of its blocks, and the transpose scatters the gradients. On P ranks with
chunks of K blocks, block (v P + r) K + k is block k of model chunk v of rank r. If the depth does
not divide, blocks of zero weights are padded, which add nothing to their input.

Arrays are local to a device, inside a `shard_map`.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxbench import mesh
from jaxbench.recipe.model import first_layers, repeating_blocks
from jaxbench.recipe.settings import Run


@dataclass(frozen=True)
class Stages:
    """How the repeating `blocks` of a model lie on the `ranks` of a pipeline: each rank has
    `chunks` model chunks of `size` blocks. `first_layers` are the numbers of the blocks' first
    layers, None if routing is learned."""

    ranks: int
    chunks: int
    blocks: int
    first_layers: range | None = None

    @classmethod
    def of(cls, run: Run) -> "Stages":
        """The layout of a run."""
        repeating, p = repeating_blocks(run.model), run.parallelism
        numbers = first_layers(run.model)[len(repeating) - 1]
        return cls(p.pipeline, p.virtual_stages, repeating[-1][1], numbers)

    @property
    def size(self) -> int:
        """Blocks of a model chunk, with the padding."""
        return -(-self.blocks // (self.ranks * self.chunks))

    def first_layer(self, chunk: jax.Array | int, rank: jax.Array) -> jax.Array | None:
        """The number of a model chunk's first layer (`draws.Counters`)."""
        if self.first_layers is None:
            return None
        block = (chunk * self.ranks + rank) * self.size
        return self.first_layers.start + self.first_layers.step * block

    @property
    def padding(self) -> int:
        """Blocks of zero weights that fill the last chunks."""
        return self.ranks * self.chunks * self.size - self.blocks

    def gather_layers(self, w: jax.Array, dims: mesh.Gathered, padding: float = 0) -> jax.Array:
        """This rank's blocks `[chunks, size, ..]` of a weight at rest `[blocks, ..]`, gathered over
        `dims`; padding blocks have the value `padding`."""
        w = jnp.pad(w, [(0, self.padding), *((0, 0) for _ in w.shape[1:])], constant_values=padding)
        w = w.reshape(self.chunks, self.ranks, self.size, *w.shape[1:])
        if not dims:
            rank = jax.lax.axis_index(mesh.PIPELINE)
            return jax.lax.dynamic_index_in_dim(w, rank, 1, keepdims=False)
        ((dim, axes),) = dims
        assert axes[-1] == mesh.PIPELINE
        w = jax.lax.all_to_all(w, mesh.PIPELINE, 1, dim + 2, tiled=True)[:, 0]
        rest = axes[:-1]
        return jax.lax.all_gather(w, rest, axis=dim + 1, tiled=True) if rest else w

    def scatter_gradients(
        self, grad: jax.Array, dims: mesh.Gathered, shape: tuple[int, ...]
    ) -> jax.Array:
        """The transpose of `gather_layers`: from gradients of this rank's blocks to gradients of
        the weight at rest, whose local shape is `shape`, summed over the ranks that gathered it."""
        weight = jax.ShapeDtypeStruct(shape, grad.dtype)
        (at_rest,) = jax.linear_transpose(partial(self.gather_layers, dims=dims), weight)(grad)
        return at_rest
