"""Operators and the reader of compiled programs agree on names."""

import pytest

from jaxbench.ops import attention, grouped, ssd
from jaxbench.ops.quantized import hadamard, operand, te
from jaxbench.xla import custom_calls, timeline


@pytest.mark.parametrize(
    "registry", [attention.IMPLEMENTATIONS, grouped.IMPLEMENTATIONS, ssd.IMPLEMENTATIONS]
)
def test_every_call_of_an_operator_has_a_rule(registry):
    calls = {call for implementation in registry.values() for call in implementation.calls}
    assert calls
    assert calls <= custom_calls.RULES.keys()


def test_scopes_and_modes_have_one_name():
    assert operand.QUANTIZED == timeline.QUANTIZED
    assert hadamard.SCOPE == custom_calls.HADAMARD
    assert (te.SCALING["mxfp8"], te.SCALING["nvfp4"]) == (custom_calls.MXFP8, custom_calls.NVFP4)
