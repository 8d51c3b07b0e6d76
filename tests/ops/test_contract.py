"""Products whose operands are not transposed in memory."""

import jax
import jax.numpy as jnp
import pytest

from jaxbench.ops.contract import contract

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
