"""Transformer Engine without a GPU, where it is installed (README: Transformer Engine)."""

import pytest

from jaxbench.plan import driver

needs_te = [
    pytest.mark.skipif(driver.missing() is not None, reason=str(driver.missing())),
    # Its import reads what jax deprecates.
    pytest.mark.filterwarnings("ignore:jax.interpreters.pxla:DeprecationWarning"),
]
