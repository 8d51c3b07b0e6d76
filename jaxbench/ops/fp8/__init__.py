"""Matrix products in FP8: the format (`per_tensor`), the scales of a step (`scaling`), and one file
for each implementation of the product.

A new implementation is a file and an entry in `IMPLEMENTATIONS` (and its name in
`settings.Precision.implementation`). `ops.dot` multiplies in FP8 where a weight is an `Operand`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.errors import RecipeError
from jaxbench.ops.fp8 import te, xla
from jaxbench.ops.fp8.operand import Operand, Product, compiled_products
from jaxbench.ops.fp8.scaling import (
    Histories,
    Scaled,
    attach,
    init_histories,
    observing,
    product_name,
    products,
    scale,
    unobserved,
    update,
)
from jaxbench.ops.twice import Twice
from jaxbench.recipe.settings import Precision
from jaxbench.xla.hlo import Program, Rules

__all__ = [
    "IMPLEMENTATIONS", "Histories", "Operand", "Scaled", "attach", "choose", "compiled_products",
    "dot", "init_histories", "observing", "product_name", "products", "refusals", "scale",
    "unobserved", "update",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to multiply in FP8.

    `dot` multiplies values given twice (`twice.Twice`), or the first of each alone. `takes` says
    which products it has; XLA multiplies the others. `refusal` says why it cannot do what a recipe
    asks on a platform. `rules` tell the work of its custom calls, `problem` what of a compiled
    program is not as the recipe says.
    """

    dot: Callable[[Product, Twice, Operand], Twice]
    takes: Callable[[Product], bool] = lambda product: True
    refusal: Callable[[Precision, str], str | None] = lambda precision, platform: None
    rules: Rules = field(default_factory=dict)
    problem: Callable[[Program, Precision], str | None] = lambda program, precision: None


Name = Literal["te", "xla"]

IMPLEMENTATIONS: dict[Name, Implementation] = {
    "te": Implementation(
        dot=te.dot,
        takes=te.takes,
        refusal=te.refusal,
        rules={te.GEMM: te.work},
        problem=te.problem,
    ),
    "xla": Implementation(dot=xla.dot),
}
"""By name; `auto` takes the first that can run."""


def choose(precision: Precision, platform: str) -> Name:
    """The name of the implementation that multiplies in FP8. Raises RecipeError where the one that
    is asked for cannot."""
    asked = precision.implementation
    if precision.dtype != "fp8":
        return "xla"
    if asked == "auto":
        return next(n for n in IMPLEMENTATIONS if not refusals(precision, platform)[n])
    if refused := refusals(precision, platform)[asked]:
        raise RecipeError(f"precision.implementation = {asked}: {refused}; use auto or xla")
    return asked


def refusals(precision: Precision, platform: str) -> dict[Name, str | None]:
    """Why each implementation cannot do what a recipe asks; None where it can."""
    return {name: each.refusal(precision, platform) for name, each in IMPLEMENTATIONS.items()}


def dot(equation: str, x: Twice, w: Operand, spec: PartitionSpec) -> Twice:
    """Einsum of a bf16 activation with a weight at rest, partitioned by `spec`: this product and
    both of its gradients in FP8."""
    assert w.precision.implementation != "auto"
    product = Product(equation, spec, mesh.cotangent_spec(x.value), w.name, w.precision.margin)
    chosen = IMPLEMENTATIONS[w.precision.implementation]
    return (chosen if chosen.takes(product) else IMPLEMENTATIONS["xla"]).dot(product, x, w)
