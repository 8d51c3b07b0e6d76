"""Buffers named from a toy program and the dump that XLA would leave next to it."""

from jaxbench.xla import hlo, memory

PROGRAM = """\
HloModule toy, is_scheduled=true

%stack (whole: bf16[4,2,8], row: bf16[2,8], i: s32[]) -> bf16[4,2,8] {
  %whole = bf16[4,2,8]{2,1,0} parameter(0)
  %row = bf16[2,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %new = bf16[4,2,8]{2,1,0} dynamic-update-slice(%whole, %row, %i, %i, %i)
}

%body (state: (s32[], bf16[4,2,8])) -> (s32[], bf16[4,2,8]) {
  %state = (s32[], bf16[4,2,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %kept = bf16[4,2,8]{2,1,0} get-tuple-element(%state), index=1
  %made = bf16[2,8]{1,0} custom-call(%i), custom_call_target="x", \
metadata={op_name="jit(step)/jvp()/while/body/checkpoint/BSD,DF->BSF/dot_general"}
  %begun = ((bf16[4,2,8]{2,1,0}, bf16[2,8]{1,0}, s32[]), bf16[4,2,8]{2,1,0}, u32[]) \
fusion-start(%kept, %made, %i), calls=%stack, \
metadata={op_name="jit(step)/jvp()/while/body/dynamic_update_slice"}
  %updated = bf16[4,2,8]{2,1,0} fusion-done(%begun)
  ROOT %out = (s32[], bf16[4,2,8]{2,1,0}) tuple(%i, %updated)
}

ENTRY %main (w: f32[8,8], g: bf16[8,8]) -> bf16[4,2,8] {
  %w = f32[8,8]{1,0} parameter(0), metadata={op_name="state.model.head.value"}
  %zero = s32[] constant(0)
  %empty = bf16[4,2,8]{2,1,0} broadcast(%zero)
  %gathered = bf16[8,8]{1,0} copy(%w), \
metadata={op_name="jit(step)/transpose(jvp())/shard_map/all_gather"}
  %carry = (s32[], bf16[4,2,8]{2,1,0}) tuple(%zero, %empty)
  %loop = (s32[], bf16[4,2,8]{2,1,0}) while(%carry), condition=%body, body=%body, \
backend_config={"known_trip_count":{"n":"4"}}
  ROOT %kept.2 = bf16[4,2,8]{2,1,0} get-tuple-element(%loop), index=1
}
"""
LIVE_RANGES = """\
HloLiveRange (max 9):
  Live ranges at 3:
    gathered{}: 999 bytes (cumulative: 999 bytes)
  Live ranges at 5 (peak):
    w{}: 256 bytes (cumulative: 256 bytes)
    gathered{}: 128 bytes (cumulative: 384 bytes)
    loop{1}: 128 bytes (cumulative: 512 bytes)
    stack_fusion.7{}: 128 bytes (cumulative: 640 bytes)
    unknown.1{}: 64 bytes (cumulative: 704 bytes)
"""


def test_buffers_at_the_peak_have_names():
    program = hlo.Program.parse(PROGRAM)
    found = memory.largest(program, LIVE_RANGES, 5)
    stacked = "forward BSD,DF->BSF/dot_general, 4 times"
    assert [(b.bytes, b.shape, b.name) for b in found] == [
        (256, "f32[8,8]", "state.model.head.value"),
        (128, "bf16[8,8]", "backward all_gather"),
        (128, "bf16[4,2,8]", stacked),
        (128, "bf16[4,2,8]", stacked),
        (64, "", "unknown.1"),
    ]


def test_an_empty_stack_is_named_after_what_the_loop_puts_into_it():
    text = LIVE_RANGES.replace("gathered{}: 128", "empty{}: 128")
    names = [b.name for b in memory.largest(hlo.Program.parse(PROGRAM), text, 2)]
    assert names == ["state.model.head.value", "forward BSD,DF->BSF/dot_general, 4 times"]
