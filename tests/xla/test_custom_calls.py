"""Operators and the reader of compiled programs agree on names."""

import pytest

from jaxbench.ops import attention, grouped, ssd
from jaxbench.ops.quantized import te
from jaxbench.xla import custom_calls, hlo


@pytest.mark.parametrize(
    "registry", [attention.IMPLEMENTATIONS, grouped.IMPLEMENTATIONS, ssd.IMPLEMENTATIONS]
)
def test_every_call_of_an_operator_has_a_rule(registry):
    calls = {call for implementation in registry.values() for call in implementation.calls}
    assert calls
    assert calls <= custom_calls.RULES.keys()


def test_modes_have_one_name():
    assert (te.SCALING["mxfp8"], te.SCALING["nvfp4"]) == (custom_calls.MXFP8, custom_calls.NVFP4)


TOKAMAX = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: bf16[8192,2048], w: bf16[16,2048,768], g: s32[16], t: bf16[2048,8192]) -> bf16[16,2048,768] {
  %x = bf16[8192,2048]{1,0} parameter(0)
  %w = bf16[16,2048,768]{2,1,0} parameter(1)
  %g = s32[16]{0} parameter(2)
  %t = bf16[2048,8192]{1,0} parameter(3)
  %y = bf16[8192,768]{1,0} custom-call(%x, %w, %g), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/jvp()/ragged_dot_sm90/mpmd_map"}
  %other = bf16[8192,768]{1,0} custom-call(%y), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/jvp()/norm/mpmd_map"}
  ROOT %dw = bf16[16,2048,768]{2,1,0} custom-call(%g, %g, %t, %other), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/transpose(jvp())/ragged_contracting_dim_dot_sm90/mpmd_map"}
}
"""  # noqa: E501
"""Calls of tokamax 0.0.17, as jax 0.11.2 compiles them for an absent H100."""


def test_tokamaxs_grouped_matmuls_are_known():
    program = hlo.Program.parse(TOKAMAX, custom_calls.RULES)
    forward, weights = [work for work, _, _ in program.works()]
    assert (forward.kind, weights.kind) == hlo.GROUPED
    for work in (forward, weights):
        assert work.sizes == (16, 512, 768, 2048)
        assert work.flops == 2 * 8192 * 768 * 2048
        assert work.format == "bf16"
