"""Block-scaled matmuls by Transformer Engine: `TeMatmuls` for `block_scaled.dot`.

Our code quantizes weights at rest and gathers them; Transformer Engine's matmul takes their values
and scales as they are. Transformer Engine quantizes activations, by one call for those of their
matmuls that follow.
"""

from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jaxbench.ops import draws
from jaxbench.ops.quantized import te
from jaxbench.ops.quantized.block_formats import (
    E2M1_MAX,
    E4M3_MAX,
    FORMATS,
    NVFP4,
    Blocks,
    as_bytes,
)
from jaxbench.ops.quantized.block_scaled import Matmuls, check, operand
from jaxbench.ops.quantized.kernels import BOTH
from jaxbench.recipe.checks import require
from jaxbench.recipe.settings import Precision

TURNED, MULTIPLIED = (64, 128), (32, 32)
"""The numbers of tokens and of features must be multiples of these, for NVFP4's kernels: the first
for the Hadamard transform, the second for matmuls."""

LARGEST = E4M3_MAX * E2M1_MAX
"""The amax of a tensor in NVFP4 whose fp32 scale is 1."""


def _packed(x: Any) -> Blocks:
    """A matrix that Transformer Engine has quantized, as bytes `[1, ..]`."""
    inverse = x.amax[0] / LARGEST if x.data.dtype == NVFP4.values else None
    blocks = Blocks(x.data[None], x.scale_inv[None], inverse)
    return blocks.map(as_bytes) if te.on_gpu() else blocks.packed()


def _matrix(part: Array) -> Array:
    return part[0]


def _multiply(a: Blocks, b: Blocks, contracted: tuple[int, int]) -> Array:
    return te.multiply(_parts(a), _parts(b), contracted, a.format)


def _parts(x: Blocks) -> tuple[Array, ...]:
    amax = () if x.inverse is None else (x.inverse[None] * LARGEST,)
    return x.values, x.scales, *amax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TeMatmuls(Matmuls):
    """`Matmuls` by Transformer Engine."""

    def quantize(
        self,
        x: Float[Array, "1 T F"],
        precision: Precision,
        side: str,
        draw: UInt32[Array, ""] | None = None,
        wanted: tuple[bool, bool] = BOTH,
    ) -> tuple[Blocks, ...]:
        """In MXFP8 the copy along tokens is `[1, T, F]` too."""
        tokens, features = x.shape[1:]
        check(precision, {"tokens of a microbatch": tokens, "features": features})
        options: dict[str, Any] = {}
        turned = precision.dtype == "nvfp4" and precision.hadamard
        if precision.dtype == "nvfp4":
            tile = TURNED if precision.hadamard else MULTIPLIED
            require(
                not (tokens % tile[0] or features % tile[1]),
                f"precision.implementation = te: its NVFP4 takes tiles of {tile[0]} x {tile[1]}, "
                f"not the {tokens} tokens x {features} features that a device holds; use auto or "
                "xla",
            )
            options["use_rht"] = turned and wanted[1]
            if draw is not None:
                options["stochastic_rounding_rng_state"] = draws.fold(draw, jnp.arange(4))[None]
        from transformer_engine.jax import quantize

        # Along tokens alone it has a kernel only with the transform; else it uses plain JAX.
        made = wanted if turned or wanted[0] else BOTH
        layouts = {
            BOTH: quantize.QuantizeLayout.ROWWISE_COLWISE,
            (True, False): quantize.QuantizeLayout.ROWWISE,
            (False, True): quantize.QuantizeLayout.COLWISE,
        }
        quantizer = quantize.QuantizerFactory.create(
            scaling_mode=te.mode(precision.dtype),
            q_dtype=FORMATS[precision.dtype].values,
            q_layout=layouts[made],
            **options,
        )
        results = te.quantize_by(quantizer, x[0])
        if made != BOTH:
            return (_packed(results),)
        both = results.rowwise_tensor, results.colwise_tensor
        return tuple(_packed(result) for result in compress(both, wanted))

    def by_weight(self, rows: Blocks, w: Blocks, side: str) -> Array:
        if w.format == "nvfp4":
            return _multiply(rows.map(_matrix), operand(w, side).map(_matrix), (1, 1))
        return _multiply(rows.map(_matrix), w, (1, 0 if side == "first" else 1))

    def of_weight(self, first: Blocks, last: Blocks) -> Array:
        contracted = 1 if first.format == "nvfp4" else 0
        return _multiply(first.map(_matrix), last.map(_matrix), (contracted, contracted))
