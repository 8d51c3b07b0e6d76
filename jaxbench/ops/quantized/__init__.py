"""Quantized matmuls: the FP8 format (`per_tensor`), block-scaled formats (`block_formats`), the
scales of a step (`scaling`), and one or two files for each implementation of the matmul.

A new implementation is a file and an entry in `IMPLEMENTATIONS` (and its name in
`settings.Precision.implementation`). `dense.dot` calls `dot` if a weight is an `Operand`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

from jaxbench import mesh
from jaxbench.base.errors import RecipeError
from jaxbench.ops.dense import Seq, result_spec
from jaxbench.ops.implementations import lazy
from jaxbench.ops.quantized import xla
from jaxbench.ops.quantized.operand import Matmul, Operand, seeded
from jaxbench.ops.quantized.scaling import (
    Histories,
    Quantization,
    Scaled,
    attach,
    in_bf16,
    init_histories,
    is_of_experts,
    name_in_model,
    quantized_weights,
)
from jaxbench.recipe.settings import BLOCKS, Precision

__all__ = [
    "IMPLEMENTATIONS", "Histories", "Matmul", "Operand", "Quantization", "Scaled", "attach",
    "choose", "dot", "dot_blocks", "in_bf16", "init_histories", "is_block_scaled", "is_of_experts",
    "name_in_model", "quantized_weights", "seeded", "xla",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """An implementation of quantized matmuls.

    `dot` multiplies in FP8, and `block_matmuls` makes the `block_scaled.Matmuls` of this
    implementation. `takes` is true for the matmuls that it can compute; XLA computes the others.
    `refusal` returns why it cannot multiply on a platform, or None. `mode` returns the scaling mode
    that its custom calls must have, or None.
    """

    dot: Callable[[Matmul, jax.Array, Operand], jax.Array]
    block_matmuls: Callable[[], Any]
    takes: Callable[[Matmul], bool] = lambda matmul: True
    refusal: Callable[[str], str | None] = lambda platform: None
    mode: Callable[[Precision], str | None] = lambda precision: None


Name = Literal["te", "xla"]

IMPLEMENTATIONS: dict[Name, Implementation] = {
    "te": Implementation(
        dot=lazy("quantized.te.dot"),
        block_matmuls=lazy("quantized.te_blocks.TeMatmuls"),
        takes=lazy("quantized.te.takes"),
        refusal=lazy("quantized.te.refusal"),
        mode=lazy("quantized.te.scaling_mode"),
    ),
    "xla": Implementation(
        dot=xla.dot,
        block_matmuls=lazy("quantized.block_scaled.Matmuls"),
    ),
}

AUTO: Name = "xla"
"""What `auto` means. It does not depend on what is installed, so that the program that was planned
also runs. Plans with Transformer Engine launch more kernels, and no GPU has measured it yet."""


def choose(precision: Precision, platform: str) -> Name:
    """The name of the implementation of quantized matmuls. Raises RecipeError if the requested one
    cannot multiply on the platform."""
    if not precision.quantized:
        return "xla"
    name = _requested(precision)
    if reason := IMPLEMENTATIONS[name].refusal(platform):
        raise RecipeError(f"precision.implementation = {name}: {reason}; use auto or xla")
    return name


def _requested(precision: Precision) -> Name:
    return AUTO if precision.implementation == "auto" else precision.implementation


def dot(equation: str, x: jax.Array, w: Operand, dims: str, seq: Seq) -> jax.Array:
    """Einsum of a bf16 activation with a weight at rest, as `dense.dot`. This matmul and both of
    its gradients run in the quantized format of the weight.

    XLA's matmuls in FP8 gather a sequence after its shards are quantized: these have half the
    bytes, and no rank quantizes the shards of others. All others gather it in bf16.
    """
    chosen, blocks = IMPLEMENTATIONS[_requested(w.precision)], is_block_scaled(w)
    if seq and chosen is IMPLEMENTATIONS["xla"] and not blocks:
        scattered = mesh.spec(dims.replace("seq", "shard_seq"), mesh.ACTIVATION)
        spec = scattered if seq == "scatter" else mesh.spec(dims, mesh.ACTIVATION)
        return xla.dot(Matmul(equation, spec, mesh.cotangent_spec(x), w.name, seq=seq), x, w)
    if seq == "gather":
        x = mesh.gather_seq(x)
    spec = result_spec(equation, x, dims)
    matmul = Matmul(equation, spec, mesh.cotangent_spec(x), w.name)
    if not chosen.takes(matmul):
        chosen = IMPLEMENTATIONS["xla"]
    if blocks:
        y = dot_blocks(matmul, x, w, chosen.block_matmuls())
    else:
        y = chosen.dot(matmul, x, w)
    return mesh.scatter_seq(y) if seq == "scatter" else y


def is_block_scaled(w: Any) -> bool:
    """True if matmuls with this weight are block-scaled."""
    return isinstance(w, Operand) and w.precision.dtype in BLOCKS


dot_blocks = lazy("quantized.block_scaled.dot")
