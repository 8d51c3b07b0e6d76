"""Transformer Engine without a GPU, where it is installed (README: Transformer Engine)."""

import pytest

from jaxbench.base.versions import installed
from jaxbench.plan import stubs

LACKING = (
    "gcc and nm: apt-get install gcc" if installed("transformer_engine")
    else "Transformer Engine: README, under its name"
)  # fmt: skip
needs_te = [
    pytest.mark.skipif(stubs.engine_missing() is not None, reason=f"needs {LACKING}"),
    # Its import reads what jax deprecates.
    pytest.mark.filterwarnings("ignore:jax.interpreters.pxla:DeprecationWarning"),
]
