"""Grouped matmuls: each row is multiplied by the weight of its group. A group is an expert, and its
number of rows is known only at run time. The work depends on the rows, not on the memory that is
reserved for them. (Only `batched` multiplies all that is reserved: groups of one size.)

Rows *arrive* on a device in the order in which other ranks sent them, with gaps. A matmul can work
on *permuted* rows: sorted by group, with each group padded to whole blocks of `BLOCK` rows. We
write no permuted copy of the arriving rows: a matmul into the permuted order gathers its rows. The
results of a matmul out of it are left permuted; they are then gathered, and added up for each
arriving row.

Letters: A rows that arrive, R permuted rows, E groups, D features of arriving rows, N features of
permuted rows. There is one file for each implementation. The registry here chooses among them; the
check of compiled programs and the plan read its entries.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxbench import mesh
from jaxbench.base.scopes import TRITON
from jaxbench.ops import implementations, quantized
from jaxbench.ops.grouped import xla
from jaxbench.ops.grouped.groups import BLOCK, NONE, Groups, Scales, equal_groups, group
from jaxbench.ops.implementations import HOPPER, Task, lazy
from jaxbench.recipe.settings import Execution

__all__ = [
    "BLOCK", "IMPLEMENTATIONS", "NONE", "Groups", "Implementation", "biased", "choose",
    "equal_groups", "from_permuted", "group", "to_permuted",
]  # fmt: skip


Weight = nnx.Variable | quantized.Operand
"""A weight at rest."""


@dataclass(frozen=True, kw_only=True)
class Implementation(implementations.Implementation):
    """The three matmuls of one device's rows and groups, with weights `[E, D, N]`.

    `to_permuted` multiplies arriving rows by the weights. `from_permuted` multiplies permuted rows
    by the transposed weights. The results of both are permuted rows, zero where operands are; those
    of `from_permuted` are undefined in blocks without rows. `weights` multiplies both kinds of rows
    and sums over each group; its result is the gradient of the weights.

    A matmul of FP8 operands multiplies its result by their `scales`. `block_matmuls` makes the
    `block_scaled.Matmuls` of groups.
    """

    to_permuted: Callable[..., Float[Array, "R N"]]
    from_permuted: Callable[..., Float[Array, "R D"]]
    weights: Callable[..., Float[Array, "E D N"]]
    block_matmuls: Callable[[Groups], Any]


IMPLEMENTATIONS = {
    "pallas": Implementation(
        to_permuted=lazy("grouped.pallas.to_permuted"),
        from_permuted=lazy("grouped.pallas.from_permuted"),
        weights=lazy("grouped.pallas.weights"),
        block_matmuls=lazy("grouped.scaled.Kernels"),
        least=HOPPER,
        refusal=lazy("grouped.pallas.refusal"),
        calls=(TRITON,),
    ),
    "xla": Implementation(
        to_permuted=xla.to_permuted,
        from_permuted=xla.from_permuted,
        weights=xla.weights,
        block_matmuls=lazy("grouped.scaled.Dequantized"),
        refusal=xla.refusal,
    ),
    "batched": Implementation(
        to_permuted=lazy("grouped.batched.to_permuted"),
        from_permuted=lazy("grouped.batched.from_permuted"),
        weights=lazy("grouped.batched.weights"),
        block_matmuls=lazy("grouped.batched.BlockMatmuls"),
    ),
}
"""The implementations by name; `auto` takes the first one that does not refuse."""


def choose(execution: Execution, task: Task) -> str:
    """The name of the implementation that multiplies by a model's dropless experts. Raises
    RecipeError if the requested implementation cannot do it, or with `auto` if none can."""
    experts = task.cfg.experts
    assert experts is not None

    def refusal(name: str) -> str | None:
        needed = "own" if name == "batched" else "shared"
        if experts.slots != needed:
            return f"needs model.experts.slots = {needed}"
        return IMPLEMENTATIONS[name].why_not(task)

    return implementations.choose(
        "grouped_matmul", execution.grouped_matmul, IMPLEMENTATIONS, refusal
    )


def to_permuted(implementation: str, x: Array, w: Weight, groups: Groups) -> Array:
    """Multiplies arriving rows by the weights of their groups, `[E, D, *N]`; the result is permuted
    by group. The weights are gathered, but E stays split over `mesh.EXPERTS`. If `w` is a
    `quantized.Operand`, the matmuls are quantized."""
    return _dot(_GroupedMatmul(implementation, into=True), x, w, groups)


def from_permuted(implementation: str, y: Array, w: Weight, groups: Groups) -> Array:
    """Multiplies permuted rows by the transposed weights of their groups, `[E, D, *N]`; the result
    is in the order of arrival. Everything else is as in `to_permuted`."""
    return _dot(_GroupedMatmul(implementation, into=False), y, w, groups)


def biased(
    y: Float[Array, "R *N"], bias: Float[Array, "E *N"], groups: Groups
) -> Float[Array, "R *N"]:
    """Adds the bias of its group to each permuted row, in fp32, and returns the dtype of `y`. Rows
    of padding get a bias too.

    We compute the biases of blocks as a matmul with a one-hot matrix of groups, not as a gather.
    Its gradient is a matmul too, which sums in the same order in every run.
    """

    def local(y, bias, of_block):
        bias = mesh.varying(bias, mesh.EXPERTS)
        of = (of_block[:, None] == jnp.arange(bias.shape[0])).astype(bias.dtype)
        of_blocks = jnp.tensordot(of, bias, 1, precision=jax.lax.Precision.HIGHEST)
        blocks = y.reshape(-1, BLOCK, *y.shape[1:]).astype(jnp.float32)
        return (blocks + of_blocks[:, None]).astype(y.dtype).reshape(y.shape)

    spec = mesh.spec_of(y)
    return mesh.on_each_device(local, spec)(y, bias, groups.group)


@dataclass(frozen=True)
class _GroupedMatmul:
    """A matmul of one device's rows, into the permuted order or out of it, and its gradients.
    `scales` are those of FP8 operands."""

    implementation: str
    into: bool

    def result(self, x: Array, w: Array, groups: Groups, scales: Scales | None = None) -> Array:
        implementation, matrices = IMPLEMENTATIONS[self.implementation], _flat(w, 2)
        if self.into:
            y = implementation.to_permuted(x, matrices, groups, scales)
            return y.reshape(-1, *w.shape[2:])
        return groups.arriving(implementation.from_permuted(_flat(x, 1), matrices, groups, scales))

    def of_input(self, dy: Array, w: Array, groups: Groups, scales: Scales | None = None) -> Array:
        return replace(self, into=not self.into).result(dy, w, groups, scales)

    def of_weight(self, x: Array, dy: Array, groups: Groups, scales: Scales | None = None) -> Array:
        arriving, permuted = (x, dy) if self.into else (dy, x)
        weights = IMPLEMENTATIONS[self.implementation].weights
        grad = weights(arriving, _flat(permuted, 1), groups, scales)
        return grad.reshape(*grad.shape[:2], *permuted.shape[1:])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Fp8Matmul(quantized.Matmul):
    """`_GroupedMatmul` in FP8."""

    grouped: _GroupedMatmul = field(metadata={"static": True})
    groups: Groups

    def result(self, x, scale_inv_x, w, scale_inv_w) -> Array:
        return self.grouped.result(x, w, self.groups, (scale_inv_x, scale_inv_w))

    def of_input(self, dy, scale_inv_dy, w, scale_inv_w) -> Array:
        return self.grouped.of_input(dy, w, self.groups, (scale_inv_dy, scale_inv_w))

    def of_weight(self, x, scale_inv_x, dy, scale_inv_dy) -> Array:
        return self.grouped.of_weight(x, dy, self.groups, (scale_inv_x, scale_inv_dy))


def _dot(grouped: _GroupedMatmul, x: Array, w: Weight, groups: Groups) -> Array:
    if not isinstance(w, quantized.Operand):
        weight = mesh.gather_weight(w[...], 0)
        return _multiply(grouped, x, weight, groups)
    # Rows have the dimension A (arriving) or R (permuted). The dimensions of the weight after D are
    # features of permuted rows.
    dims = "EDPF" if w.weight.ndim == 4 else "EDF"
    inputs, outputs = ("AD", f"R{dims[2:]}") if grouped.into else (f"R{dims[2:]}", "AD")
    equation, spec = f"{inputs},{dims}->{outputs}", _spec(grouped, x, w.weight)
    named = equation, spec, mesh.cotangent_spec(x), w.name
    if quantized.is_block_scaled(w):
        by = IMPLEMENTATIONS[grouped.implementation].block_matmuls(groups)
        return quantized.dot_blocks(quantized.Matmul(*named), x, w, by)
    return quantized.xla.dot(_Fp8Matmul(*named, grouped, groups), x, w)


def _spec(grouped: _GroupedMatmul, x: Array, w: Array) -> PartitionSpec:
    """The partition of a result: only its rows are split."""
    features = w.ndim - 2 if grouped.into else 1
    return PartitionSpec(mesh.partition(x)[0], *(None,) * features)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(grouped: _GroupedMatmul, x: Array, w: Array, groups: Groups) -> Array:
    return _on_each_device(grouped.result, _spec(grouped, x, w))(x, w, groups)


def _backward(grouped, operands, dy):
    x, w, groups = operands
    of_input = _on_each_device(grouped.of_input, mesh.cotangent_spec(x))
    of_weight = _on_each_device(grouped.of_weight, mesh.cotangent_spec(w))
    return of_input(dy, w, groups), of_weight(x, dy, groups), None


_multiply.defvjp(lambda grouped, *operands: (_multiply(grouped, *operands), operands), _backward)


def _on_each_device(local: Callable, spec: PartitionSpec) -> Callable:
    # Kernels do not know the types of Explicit axes.
    return mesh.on_each_device(local, spec, check_vma=False)


def _flat(x: Array, kept: int) -> Array:
    """Merges all dimensions of an array after the first `kept` into one."""
    return x.reshape(*x.shape[:kept], -1)
