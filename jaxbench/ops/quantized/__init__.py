"""Quantized matmuls: the FP8 format (`per_tensor`), block-scaled formats (`block_formats`), the
scales of a step (`scaling`), and one or two files for each implementation of the matmul.

A new implementation is a file and an entry in `IMPLEMENTATIONS` (and its name in
`settings.Precision.implementation`). `dense.dot` calls `dot` if a weight is an `Operand`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.base.errors import RecipeError
from jaxbench.ops.dense import Seq
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
    "choose", "dot", "dot_blocks", "gathers_quantized", "in_bf16", "init_histories",
    "is_block_scaled", "is_of_experts", "name_in_model", "quantized_weights", "seeded", "xla",
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


def dot(equation: str, x: jax.Array, w: Operand, spec: PartitionSpec, seq: Seq = None) -> jax.Array:
    """Einsum of a bf16 activation with a weight at rest; `spec` is the partition of the result.
    This matmul and both of its gradients run in the quantized format of the weight. Only a weight
    that `gathers_quantized` takes a `seq`."""
    matmul = Matmul(equation, spec, mesh.cotangent_spec(x), w.name, seq=seq)
    chosen = IMPLEMENTATIONS[_requested(w.precision)]
    if not chosen.takes(matmul):
        chosen = IMPLEMENTATIONS["xla"]
    if is_block_scaled(w):
        return dot_blocks(matmul, x, w, chosen.block_matmuls())
    return chosen.dot(matmul, x, w)


def gathers_quantized(w: Any) -> bool:
    """True if a matmul with this weight gathers a sequence after its shards are quantized, as
    XLA's matmuls in FP8 do. The gather has half the bytes then, and no rank quantizes the shards of
    others. All other matmuls gather it in bf16."""
    if not isinstance(w, Operand) or is_block_scaled(w):
        return False
    return _requested(w.precision) == "xla"


def is_block_scaled(w: Any) -> bool:
    """True if matmuls with this weight are block-scaled."""
    return isinstance(w, Operand) and w.precision.dtype in BLOCKS


dot_blocks = lazy("quantized.block_scaled.dot")
