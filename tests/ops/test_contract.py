"""Products whose operands are not transposed in memory."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxbench import mesh
from jaxbench.ops.dense import contract
from jaxbench.recipe.settings import AXES

SIZES = dict(zip("BSDNHKGPFER", (2, 3, 4, 5, 6, 7, 2, 2, 3, 4, 5), strict=True))


@pytest.mark.parametrize(
    "equation",
    [
        "BSD,DKGH->BSKGH", "BSKGH,DKGH->BSD", "BSD,BSKGH->DKGH", "BSNH,BSD->DNH",
        "ERD,EDPF->ERPF", "ERPF,EDPF->ERD", "ERD,ERPF->EDPF", "ERF,ERD->EDF",
    ],
)  # fmt: skip
def test_is_the_einsum(equation):
    dims = equation.split("->")[0].split(",")
    keys = jax.random.split(jax.random.key(0))
    a, b = (
        jax.random.normal(key, [SIZES[d] for d in letters])
        for key, letters in zip(keys, dims, strict=True)
    )
    exact = jnp.einsum(equation, a, b, precision="highest")
    # The same sums, of at most 84 terms, in another order.
    assert jnp.allclose(contract(equation, a, b, precision="highest"), exact, atol=1e-5)


def test_another_order_is_refused():
    with pytest.raises(ValueError, match="expected BSF or FBS"):
        contract("BSD,DF->BFS", jnp.ones((2, 3, 4)), jnp.ones((4, 5)))


def test_batches_in_bf16_are_added_up_in_fp32():
    k_a, k_b = jax.random.split(jax.random.key(0))
    a = jax.random.normal(k_a, (8, 256, 64), jnp.bfloat16)
    b = jax.random.normal(k_b, (8, 256, 2, 64), jnp.bfloat16)
    equation = "ERD,ERPF->EDPF"
    exact = jnp.einsum(equation, *(x.astype(jnp.float32) for x in (a, b)), precision="highest")
    with jax.set_mesh(mesh.make_mesh((1,) * len(AXES), jax.devices()[:1])):
        result = jax.jit(partial(contract, equation))(a, b)
    error = jnp.linalg.norm(result - exact) / jnp.linalg.norm(exact)
    assert error < 2**-8  # that of the result alone; sums in bf16 have ten times as much
