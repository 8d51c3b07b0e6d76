"""What a product in FP8 is given, and its name in the compiled program."""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.ops.contract import letters
from jaxbench.ops.fp8.per_tensor import VALUES, quantize
from jaxbench.recipe.settings import Precision
from jaxbench.xla.hlo import Program


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Operand:
    """A weight whose product runs in FP8, in the place of the weight in a layer.

    `kernel` is the bf16 weight at rest, which receives the gradient. `stored` is what a pass
    gathers: its FP8 form, or the kernel itself. `inverse` are the inverse scales of input, weight
    and gradient; under current scaling the first and the last are unused. `observed` is zeros
    `[2, devices]`, whose cotangent is the largest magnitude of input and gradient on each device;
    None under current scaling.
    """

    kernel: jax.Array
    stored: jax.Array
    inverse: jax.Array
    observed: jax.Array | None
    name: str = field(metadata={"static": True})
    precision: Precision = field(metadata={"static": True})


@dataclass(frozen=True)
class Product:
    """What forward and backward pass of a product know when they are traced: its einsum, the
    partitions of its result and of its input's gradient, its name, and the margin of its scales."""

    equation: str
    y_spec: PartitionSpec
    dx_spec: PartitionSpec
    name: str
    margin: int

    @property
    def letters(self) -> tuple[str, str, str]:
        """Dimensions of input, weight and result."""
        return letters(self.equation)

    @property
    def experts(self) -> int | None:
        """Which dimension of the weight counts experts, of which each rank uses its own."""
        _, w, _ = self.letters
        return w.index("E") if "E" in w else None

    def scope(self) -> Any:
        """Names the operations, for `compiled_products`."""
        return jax.named_scope(f"fp8.{self.name}")


def gathered(stored: jax.Array, dims: mesh.Gathered, inverse: jax.Array) -> jax.Array:
    """The whole FP8 weight from its stored parts, inside a `shard_map`: quantized before it was
    gathered, or now."""
    weight = mesh.gather(stored, dims)
    return weight if weight.dtype == VALUES else quantize(weight, inverse, VALUES)


def compiled_products(program: Program) -> Counter[tuple[str, bool]]:
    """Runs per step of the products in a compiled program, by the name in their `Product.scope` and
    whether their operands are FP8."""
    found: Counter[tuple[str, bool]] = Counter()
    for work, runs, source in program.works():
        named = re.search(r"fp8\.([\w.]+)", source)
        if work.kind == "product" and named:
            found[named.group(1), work.dtype.startswith("f8")] += runs
    return found
