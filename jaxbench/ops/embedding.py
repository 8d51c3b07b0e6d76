"""Embedding lookup without a gather of the table."""

import jax

from jaxbench import mesh


def look_up(table: jax.Array, tokens: jax.Array, dtype) -> jax.Array:
    """The rows of `table` (`"vocab embed"`) for `tokens` (`"batch seq"`), as `"batch shard_seq
    embed"` of `dtype`.

    The table is split over `embed`. Each rank looks up the tokens of all ranks in its own columns.
    An all-to-all then exchanges some columns of all tokens for all columns of the rank's own
    tokens. This moves activations instead of the table. Its transpose brings every token's gradient
    to the rank that holds the columns, so nothing is left to reduce.
    """
    seq, shard_seq = (mesh.axes(dim) for dim in ("seq", "shard_seq"))
    batch = mesh.used(*(axis for axis in mesh.TABLE_EMBED if axis in mesh.SEQUENCES))

    def local(table, tokens):
        for dim, axes in ((0, batch), (1, seq)):
            if axes:
                tokens = jax.lax.all_gather(tokens, axes, axis=dim, tiled=True)
        x = table[tokens].astype(dtype)
        for dim, axes in ((1, shard_seq), (0, batch)):
            if axes:
                x = jax.lax.all_to_all(x, axes, dim, 2, tiled=True)
        return x

    out = mesh.spec("batch shard_seq embed", mesh.ACTIVATION)
    return mesh.on_each_device(local, out)(table, tokens)
