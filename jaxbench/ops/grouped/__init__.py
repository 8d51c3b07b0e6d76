"""Grouped matmuls: each row times the weight of its group, an expert, whose number of rows is known
only at run time. Work follows the rows, not the memory that is kept for them.

Rows *arrive* on a device in the order in which other ranks sent them, with gaps. *Permuted* by
group, each group padded to whole blocks of `BLOCK` rows, they are what a product can work on. No
permuted copy of what arrives is written: the products into the permuted order gather their rows,
those out of it scatter theirs.

Letters: A rows that arrive, R permuted rows, E groups, D and N the features of arriving and of
permuted rows. One file for each implementation; the registry here chooses among them, and the check
of compiled programs and the plan read its entries.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxbench import mesh
from jaxbench.errors import RecipeError
from jaxbench.ops.grouped import pallas, xla
from jaxbench.ops.grouped.groups import BLOCK, NONE, Groups, group
from jaxbench.recipe.settings import Execution
from jaxbench.xla.hlo import Rules

__all__ = [
    "BLOCK", "IMPLEMENTATIONS", "NONE", "Groups", "Implementation", "choose", "from_permuted",
    "group", "to_permuted",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """The three products of one device's rows and groups, all with weights `[E, D, N]`: of arriving
    rows with weights, as permuted ones; of permuted rows with transposed weights, as arriving ones;
    and of both kinds of rows, summed over each group, as the gradient of the weights.

    Rows of padding are zeros in permuted results; among arriving ones they are undefined.
    `platforms` are those on which it runs (None: all); `rules` give the work of its custom calls,
    all of which a compiled step must contain.
    """

    to_permuted: Callable[..., Float[Array, "R N"]]
    from_permuted: Callable[..., Float[Array, "A D"]]
    weights: Callable[..., Float[Array, "E D N"]]
    platforms: tuple[str, ...] | None = None
    rules: Rules = field(default_factory=dict)


IMPLEMENTATIONS = {
    "pallas": Implementation(
        to_permuted=pallas.to_permuted,
        from_permuted=pallas.from_permuted,
        weights=pallas.weights,
        platforms=("gpu",),
        rules=pallas.RULES,
    ),
    "xla": Implementation(
        to_permuted=xla.to_permuted, from_permuted=xla.from_permuted, weights=xla.weights
    ),
}
"""By name; `auto` takes the first that runs on the platform."""


def choose(execution: Execution, dtype: str, platform: str) -> str:
    """The name of the implementation that computes products in a dtype on a platform. Raises
    RecipeError where the requested one cannot."""
    able = [
        name
        for name, implementation in IMPLEMENTATIONS.items()
        if platform in (implementation.platforms or (platform,))
        and not (name == "pallas" and dtype == "fp32")
    ]
    if execution.grouped_matmul == "auto":
        return able[0]
    if execution.grouped_matmul not in able:
        raise RecipeError(
            f"execution.grouped_matmul = {execution.grouped_matmul} computes no {dtype} products "
            f"on a {platform}; expected auto or {' or '.join(able)}"
        )
    return execution.grouped_matmul


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def to_permuted(
    implementation: str, x: Float[Array, "A D"], w: Float[Array, "E D *N"], groups: Groups
) -> Float[Array, "R *N"]:
    """Arriving rows times the weights of their groups, permuted by group."""
    product = IMPLEMENTATIONS[implementation].to_permuted

    def local(x, w, groups):
        return product(x, _matrices(w), groups).reshape(-1, *w.shape[2:])

    spec = PartitionSpec(mesh.partition(x)[0], *mesh.partition(w)[2:])
    return _on_each_device(local, spec)(x, w, groups)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def from_permuted(
    implementation: str, y: Float[Array, "R *N"], w: Float[Array, "E D *N"], groups: Groups
) -> Float[Array, "A D"]:
    """Permuted rows times the transposed weights of their groups, in their order of arrival."""
    product = IMPLEMENTATIONS[implementation].from_permuted

    def local(y, w, groups):
        return product(y.reshape(y.shape[0], -1), _matrices(w), groups)

    spec = PartitionSpec(mesh.partition(y)[0], mesh.partition(w)[1])
    return _on_each_device(local, spec)(y, w, groups)


def _gradient(implementation: str, x, y, w, groups) -> Float[Array, "E D *N"]:
    """The gradient of weights from arriving and permuted rows, one of them a cotangent."""
    product = IMPLEMENTATIONS[implementation].weights

    def local(x, y, groups):
        grad = product(x, y.reshape(y.shape[0], -1), groups)
        return grad.reshape(-1, x.shape[1], *y.shape[1:])

    return _on_each_device(local, mesh.cotangent_spec(w))(x, y, groups)


def _to_permuted_backward(implementation, operands, dy):
    x, w, groups = operands
    dx = from_permuted(implementation, dy, w, groups)
    return dx, _gradient(implementation, x, dy, w, groups), None


def _from_permuted_backward(implementation, operands, dx):
    y, w, groups = operands
    dy = to_permuted(implementation, dx, w, groups)
    return dy, _gradient(implementation, dx, y, w, groups), None


def _forward(product: Callable) -> Callable:
    return lambda implementation, *operands: (product(implementation, *operands), operands)


to_permuted.defvjp(_forward(to_permuted), _to_permuted_backward)
from_permuted.defvjp(_forward(from_permuted), _from_permuted_backward)


def _on_each_device(local: Callable, spec: PartitionSpec) -> Callable:
    # Kernels know no types of Explicit axes.
    return mesh.on_each_device(local, spec, check_vma=False)


def _matrices(w: Float[Array, "E D *N"]) -> Float[Array, "E D N"]:
    return w.reshape(*w.shape[:2], -1)
