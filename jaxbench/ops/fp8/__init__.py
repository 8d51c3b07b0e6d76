"""Matrix products in FP8: the format (`per_tensor`), the scales of a step (`scaling`), and one file
for each implementation of the product.

A new implementation is a file and an entry in `IMPLEMENTATIONS` (and its name in
`settings.Precision.implementation`). `ops.dot` multiplies in FP8 where a weight is an `Operand`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.errors import RecipeError
from jaxbench.ops.fp8 import scaling, te, xla
from jaxbench.ops.fp8.operand import Operand, Product, compiled_products
from jaxbench.ops.fp8.scaling import (
    Histories,
    Scaled,
    attach,
    init_histories,
    observing,
    product_name,
    products,
    unobserved,
    update,
)
from jaxbench.recipe.settings import Precision
from jaxbench.xla.hlo import Rules

__all__ = [
    "IMPLEMENTATIONS", "Histories", "Operand", "Scaled", "attach", "choose", "compiled_products",
    "dot", "init_histories", "observing", "product_name", "products", "scale", "unobserved",
    "update",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to multiply in FP8.

    `dot` multiplies. `quantized` says whether it takes weights that were quantized before they are
    gathered. `rules` tell the work of its custom calls. `refusal` says why it cannot run on a
    platform.
    """

    dot: Callable[[Product, jax.Array, Operand], jax.Array]
    quantized: bool = False
    rules: Rules = field(default_factory=dict)
    refusal: Callable[[str], str | None] = lambda platform: None


Name = Literal["te", "xla"]

IMPLEMENTATIONS: dict[Name, Implementation] = {
    "te": Implementation(
        dot=te.dot,
        rules=dict.fromkeys(("te_gemm_ffi", "te_gemm_v2_ffi"), te.work),
        refusal=te.refusal,
    ),
    "xla": Implementation(dot=xla.dot, quantized=True),
}
"""By name; `auto` takes the first that can run."""


def choose(precision: Precision, platform: str) -> Name:
    """The name of the implementation that multiplies in FP8. Raises RecipeError where the one that
    is asked for cannot run."""
    asked = precision.implementation
    if asked == "auto":
        return next(n for n, each in IMPLEMENTATIONS.items() if each.refusal(platform) is None)
    if refused := IMPLEMENTATIONS[asked].refusal(platform):
        raise RecipeError(refused)
    return asked


def scale(stacks: Sequence[nnx.Module], histories: Histories, precision: Precision) -> list[Scaled]:
    """`scaling.scale` for the implementation of `precision`: weights are quantized before they are
    gathered where it takes them so and the recipe does not say otherwise."""
    before = precision.gather == "fp8" and chosen(precision).quantized
    return scaling.scale(stacks, histories, precision, quantized=before)


def chosen(precision: Precision) -> Implementation:
    """The implementation that a precision names."""
    assert precision.implementation != "auto"
    return IMPLEMENTATIONS[precision.implementation]


def dot(equation: str, x: jax.Array, w: Operand, spec: PartitionSpec) -> jax.Array:
    """Einsum of a bf16 activation with a weight at rest, partitioned by `spec`: this product and
    both of its gradients in FP8."""
    product = Product(equation, spec, mesh.cotangent_spec(x), w.name, w.precision.margin)
    return chosen(w.precision).dot(product, x, w)
