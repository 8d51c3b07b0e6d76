"""The program reader on programs whose answers are known by hand."""

import jax
import jax.numpy as jnp
import pytest
from compiled import collectives_of
from jaxlib.xla_client import PrimitiveType

from jaxbench.base.errors import RunFailed
from jaxbench.xla import collectives, hlo
from jaxbench.xla.custom_calls import RULES, quantized_matmuls
from jaxbench.xla.instruction import DTYPE_BITS, Instruction
from jaxbench.xla.schedule import Walk

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%products (p0: bf16[8,16], p1: bf16[16,4]) -> bf16[8,4] {
  %p0 = bf16[8,16]{1,0} parameter(0)
  %p1 = bf16[16,4]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,4]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (loop: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %loop = (s32[], bf16[8,16]{1,0}) parameter(0)
  %x = bf16[8,16]{1,0} get-tuple-element(%loop), index=1
  %shard = bf16[2,4]{1,0} constant({...})
  %start = ((bf16[2,4]{1,0}), bf16[16,4]{1,0}) all-gather-start(%shard), channel_id=1, \
replica_groups=mesh['data'=2,'fsdp'=8,'tensor'=1] {'fsdp'}, dimensions={0}, \
metadata={op_name="jit(step)/while/body/gather"}
  %fusion = bf16[8,4]{1,0} fusion(%x, %shard), kind=kCustom, calls=%products
  %done = bf16[16,4]{1,0} all-gather-done(%start)
  ROOT %out = (s32[], bf16[8,16]{1,0}) tuple(%i, %x)
}

%condition (c: (s32[], bf16[8,16])) -> pred[] {
  %c = (s32[], bf16[8,16]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%outer (o: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %o = (s32[], bf16[8,16]{1,0}) parameter(0)
  ROOT %inner = (s32[], bf16[8,16]{1,0}) while(%o), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
}

ENTRY %main (x: bf16[8,16], w: bf16[32,16]) -> bf16[8,16] {
  %x = bf16[8,16]{1,0} parameter(0)
  %w = bf16[32,16]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %tuple = (s32[], bf16[8,16]{1,0}) tuple(%zero, %x)
  %loops = (s32[], bf16[8,16]{1,0}) while(%tuple), condition=%condition, body=%outer, \
backend_config={"known_trip_count":{"n":"3"}}
  %gemm = (bf16[8,32]{1,0}, s8[64]{0}) custom-call(%x, %w), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  %q = bf16[2,64,4,16]{3,2,1,0} constant({...})
  %k = bf16[2,64,2,16]{3,2,1,0} constant({...})
  %fwd = (bf16[2,4,64,16]{3,1,2,0}, f32[2,4,64]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), \
custom_call_target="__cudnn$fmhaSoftmax"
  %bwd = (bf16[2,4,64,16]{3,1,2,0}, bf16[2,2,64,16]{3,1,2,0}, bf16[2,2,64,16]{3,1,2,0}) \
custom-call(%q, %k, %k, /*index=3*/%q), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %rs = f32[4,4]{1,0} reduce-scatter(%x), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%sum
  %ar = f32[4,4]{1,0} all-reduce(%rs), replica_groups={{0,1},{2,3}}, to_apply=%sum
  %alone = f32[4,4]{1,0} all-reduce(%rs), replica_groups={{0},{1}}, to_apply=%sum
  ROOT %copy = bf16[8,16]{1,0} copy(%x)
}
"""


@pytest.fixture(scope="module")
def program():
    return hlo.Program.parse(PROGRAM, RULES)


def test_products_are_counted_as_often_as_they_run(program):
    nested = 2 * 8 * 4 * 16 * (3 * 5)
    assert program.flops()["product", "bf16"] == nested + 2 * 8 * 32 * 16


def test_attention(program):
    forward = 4 * 2 * 4 * 64 * 64 * 16
    assert program.flops()["attention", "bf16"] == forward + 2 * forward
    assert program.custom_calls()["__cudnn$fmhaSoftmax"] == 1


def forward_attention(text):
    """The work of the forward attention of a program."""
    works = [work for work, *_ in hlo.Program.parse(text, RULES).works() if not work.backward]
    (forward,) = [work for work in works if work.kind == "attention"]
    return forward


def test_attention_has_the_head_dims_of_keys_and_of_values():
    narrow = PROGRAM.replace("custom-call(%q, %k, %k)", "custom-call(%q, %k, %v)").replace(
        "  %k = ", "  %v = bf16[2,64,2,8]{3,2,1,0} constant({...})\n  %k = "
    )
    forward = forward_attention(narrow)
    assert forward.sizes == (2, 4, 64, 16, 8)
    assert forward.flops == 2 * 2 * 4 * 64 * 64 * (16 + 8)


@pytest.mark.parametrize(("mask", "sequences"), [("CAUSAL", 2), ("NO_MASK", 4)])
def test_attention_without_a_causal_mask_takes_twice_as_long(mask, sequences):
    target = 'custom_call_target="__cudnn$fmhaSoftmax"'
    text = PROGRAM.replace(target, f'{target}, backend_config={{"mask_type": "{mask}"}}')
    forward = forward_attention(text)
    assert forward.sizes[:3] == (sequences, 4, 64)
    assert forward.flops == 4 * 2 * 4 * 64 * 64 * 16


def configured(scores, target="__cudnn$fmhaSoftmax"):
    """The program with cuDNN's shape of the scores."""
    dimensions = ", ".join(f'"{size}"' for size in scores)
    config = f'{{"intermediate_tensor_shape": {{"dimensions": [{dimensions}]}}}}'
    return PROGRAM.replace(
        'custom_call_target="__cudnn$fmhaSoftmax"',
        f'custom_call_target="{target}", backend_config={config}',
    )


@pytest.mark.parametrize("bias", ["", "ScaleBias"])
@pytest.mark.parametrize("dropout", ["", "Dropout"])
def test_attention_may_have_a_bias_and_dropout(bias, dropout):
    forward = forward_attention(configured((2, 4, 64, 64), f"__cudnn$fmha{bias}Softmax{dropout}"))
    assert forward == forward_attention(PROGRAM)


def test_attention_may_have_its_heads_before_its_tokens():
    turned = configured((2, 4, 64, 64)).replace("[2,64,4,16]", "[2,4,64,16]")
    assert forward_attention(turned) == forward_attention(PROGRAM)


def test_attention_to_more_keys_takes_longer():
    """To queries after the first 64 keys the mask shows all keys, so in causal sequences of 64 keys
    the work is that of 7 halves of 2 sequences."""
    forward = forward_attention(configured((2, 4, 64, 512)).replace("[2,64,2,16]", "[2,512,2,16]"))
    assert forward.flops == 4 * 2 * 4 * 64 * 512 * 16
    assert forward.sizes[:3] == (2, 4, 64)
    masked = '"mask_type": "NO_MASK", "intermediate_tensor_shape"'
    whole = configured((2, 4, 64, 512)).replace('"intermediate_tensor_shape"', masked)
    assert forward_attention(whole.replace("[2,64,2,16]", "[2,512,2,16]")).sizes[0] == 2 * 2 * 8


def test_a_window_counts_the_keys_of_its_tiles():
    """Of 4096 tokens a query sees two tiles of 128, as on average in sequences of 512."""
    options = '"sliding_window_length": 128, "max_seg_per_batch": 1'
    text = (
        PROGRAM.replace("[2,64,4,16]", "[2,4096,4,16]")
        .replace("[2,64,2,16]", "[2,4096,2,16]")
        .replace(
            'custom_call_target="__cudnn$fmhaSoftmax"',
            f'custom_call_target="__cudnn$fmhaSoftmax", backend_config={{{options}}}',
        )
    )
    forward = forward_attention(text)
    assert forward.sizes == (16, 4, 512, 16, 16)
    assert forward.flops == 4 * 2 * 4 * 4096 * 512 * 16


def test_collectives(program):
    found = {c.kind: c for c in collectives_of(program)}
    assert sorted(found) == ["all-gather", "all-reduce", "reduce-scatter"]
    gather = found["all-gather"]
    assert (gather.bytes, gather.group, gather.count) == (16 * 4 * 2, 8, 15)
    assert gather.source == "jit(step)/while/body/gather"
    assert gather.wire_bytes == 15 * 16 * 4 * 2 * 7 // 8
    assert found["reduce-scatter"].wire_bytes == 64 * 3
    assert (found["all-reduce"].group, found["all-reduce"].wire_bytes) == (2, 64)


@pytest.mark.parametrize(
    ("attributes", "devices"),
    [
        ("replica_groups={{0,1,2,3}}, dimensions={0}", (0, 1, 2, 3)),
        ("replica_groups={{0,2},{1,3}}", (0, 2)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", (0, 4)),
        ("replica_groups=[4,4]<=[2,2,4]T(1,0,2), dimensions={0}", (0, 1, 2, 3)),
        ("replica_groups=[4,4]<=[2,2,4]T(2,0,1), dimensions={0}", (0, 4, 8, 12)),
        ("replica_groups=mesh['a'=2,'b'=3,'c'=2] {'a','c'}, channel_id=1", (0, 1, 6, 7)),
        ("replica_groups=mesh['f'=8] {'f':(2)4}, channel_id=1", (0, 1, 2, 3)),
        ("replica_groups=mesh['d'=64] {'d':(1)2}", (0, 32)),
        ("replica_groups=mesh['a'=2,'f'=8] {'a','f':(2)2}", (0, 2, 8, 10)),
        (
            "replica_groups=mesh['x'=1,'y'=8,'z'=2], device_ids=([2,8]T(1,0)) {'y'}, channel_id=1",
            (0, 1, 2, 3, 4, 5, 6, 7),
        ),
        ("replica_groups=mesh['dp-out'=2,'tp.in'=4] {'tp.in'}", (0, 1, 2, 3)),
        ("replica_groups=mesh[dp=2,tp=4] {dp}", (0, 4)),
        ("source_target_pairs={{0,8},{8,0}}", (0, 8)),
        ("dimensions={0}", (0,)),
    ],
)
def test_groups(attributes, devices):
    assert collectives.groups(attributes)[0] == devices
    found = [device for group in collectives.groups(attributes) for device in group]
    if "source_target_pairs" not in attributes:  # there a device sends and receives
        assert sorted(found) == list(range(len(found)))


def test_a_real_program():
    """Matrix products in a scan of a scan, compiled by XLA for this CPU."""

    def step(x, w):
        def inner(x, _):
            return jnp.tanh(x @ w), None

        def outer(x, _):
            return jax.lax.scan(inner, x, length=7)[0], None

        return jax.lax.scan(outer, x, length=3)[0]

    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    program = hlo.Program.parse(jax.jit(step).lower(x, w).compile().as_text())
    assert program.flops() == {("product", "tf32"): 2 * 8 * 16 * 16 * 21}


def test_products_by_name():
    """In FP8 and not, by XLA and by Transformer Engine, in a loop of three."""
    text = """
body (p: (f8e4m3fn[4,8], bf16[8,2])) -> (f8e4m3fn[4,8], bf16[8,2]) {
  %p = (f8e4m3fn[4,8], bf16[8,2]) parameter(0)
  %a = f8e4m3fn[4,8] get-tuple-element(%p), index=0
  %b = bf16[8,2] get-tuple-element(%p), index=1
  %one = f32[1] constant({1})
  %w = f8e4m3fn[2,8] constant({...})
  %te = (bf16[4,2], u8[32]) custom-call(%a, %one, %w, %one), custom_call_target="te_gemm_v2_ffi", metadata={op_name="jit(f)/quantized.stacks.0.qkv/x"}
  %dot = bf16[4,2] dot(%b, %b), lhs_contracting_dims={0}, metadata={op_name="jit(f)/quantized.stacks.0.out/dot_general"}
  ROOT %t = (f8e4m3fn[4,8], bf16[8,2]) tuple(%a, %b)
}

ENTRY main (x: (f8e4m3fn[4,8], bf16[8,2])) -> (f8e4m3fn[4,8], bf16[8,2]) {
  %x = (f8e4m3fn[4,8], bf16[8,2]) parameter(0)
  ROOT %w = (f8e4m3fn[4,8], bf16[8,2]) while(%x), body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""  # noqa: E501
    program = hlo.Program.parse(text, RULES)
    assert quantized_matmuls(program, "fp8") == {
        ("stacks.0.qkv", True): 3,
        ("stacks.0.out", False): 3,
    }
    # [4, 8] x [8, 2], three times.
    assert program.flops()["product", "f8e4m3fn"] == 3 * 2 * 4 * 8 * 2


def test_transformer_engine_in_blocks():
    """A product of transposed operands, and a quantization that reads its input twice."""
    text = """
ENTRY main (x: bf16[64,128]) -> bf16[64,32] {
  %x = bf16[64,128] parameter(0)
  %h = bf16[16,16] constant({...})
  %q = (f4e2m1fn[64,128], f4e2m1fn[128,64], f8e4m3fn[64,8], f8e4m3fn[128,4]) custom-call(%x, %h), custom_call_target="te_dbias_quantize_ffi", backend_config={scaling_mode = 4 : i64, use_rht = true}
  %a = f8e4m3fn[128,64] constant({...})
  %as = f8e8m0fnu[4,64] constant({...})
  %b = f8e4m3fn[128,32] constant({...})
  %bs = f8e8m0fnu[4,32] constant({...})
  %y = (bf16[64,32], u8[4096]) custom-call(%a, %as, %b, %bs), custom_call_target="te_gemm_v2_ffi", backend_config={config = {scaling_mode = 2 : i64}}
  ROOT %r = bf16[64,32] get-tuple-element(%y), index=0
}
"""  # noqa: E501
    program = hlo.Program.parse(text, RULES)
    quantization, product = (work for work, _, _ in program.works())
    size = 64 * 128
    assert quantization.bytes == 2 * 2 * size + 2 * 16 * 16 + 2 * (size // 2 + size // 16)
    assert (product.format, product.sizes) == ("mxfp8", (1, 64, 32, 128))
    assert product.bytes == (64 + 32) * (128 + 4) + 2 * 64 * 32
    assert (quantization.launches, product.launches) == (2, 1)


def test_elements_of_tuples_that_are_written_as_operands():
    """`%both#1` is [4, 8] in FP8, not what the tuple holds first; tuples may hold tuples."""
    text = """
%split (p: f32[4,8]) -> ((f32[2,2], s32[]), f8e4m3fn[4,8]) {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %t = ((f32[2,2]{1,0}, s32[]), f8e4m3fn[4,8]{1,0}) custom-call(%p), custom_call_target="split"
}

ENTRY main (x: f32[4,8], w: f8e4m3fn[8,2]) -> bf16[4,2] {
  %x = f32[4,8]{1,0} parameter(0)
  %w = f8e4m3fn[8,2]{1,0} parameter(1)
  %both = ((f32[2,2]{1,0}, s32[]), f8e4m3fn[4,8]{1,0}) fusion(%x), kind=kLoop, calls=%split
  %copied = (f32[2,2]{1,0}, s32[]) copy(%both#0)
  %inner = f32[2,2]{1,0} copy(%both#0#0)
  ROOT %dot = bf16[4,2]{1,0} dot(%both#1, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    short = hlo.Program.parse(text)
    element = "%both.1 = f8e4m3fn[4,8]{1,0} get-tuple-element(%both), index=1\n  ROOT %dot"
    long = hlo.Program.parse(text.replace("ROOT %dot", element).replace("%both#1", "%both.1"))
    for program in (short, long):
        assert program.flops() == {("product", "f8e4m3fn"): 2 * 4 * 8 * 2}
    read = {name: kernel.bytes for name, kernel, _ in Walk(short).kernels()}
    assert read["copied"] == 2 * (2 * 2 * 4 + 4)
    assert read["inner"] == 2 * 2 * 2 * 4
    assert read["dot"] == 4 * 8 + 8 * 2 + 2 * 4 * 2


LOST_COUNT = """
%less (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %limit = s32[] constant(16)
  ROOT %lt = pred[] compare(%p, %limit), direction=LT
}

%next (q: s32[]) -> s32[] {
  %q = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %add = s32[] add(%q, %two)
}

%condition (c: (f32[], s32[])) -> pred[] {
  %c = (f32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=1
  ROOT %fused = pred[] fusion(%i), kind=kLoop, calls=%less
}

%body (b: (f32[], s32[])) -> (f32[], s32[]) {
  %b = (f32[], s32[]) parameter(0)
  %x = f32[] get-tuple-element(%b), index=0
  %i = s32[] get-tuple-element(%b), index=1
  %copied = s32[] copy(%i)
  %added = s32[] fusion(%copied), kind=kLoop, calls=%next
  ROOT %state = (f32[], s32[]) tuple(%x, %added)
}

ENTRY %main (x: f32[]) -> (f32[], s32[]) {
  %x = f32[] parameter(0)
  %one = s32[] constant(1)
  %start = (f32[], s32[]) tuple(%x, %one)
  ROOT %loop = (f32[], s32[]) while(%start), condition=%condition, body=%body, \
backend_config={"known_induction_variable":{"tuple_index":"1"}}
}
"""


def test_a_lost_trip_count_is_found_by_counting():
    """1, 3, .. 15: eight times."""
    element = "  %i = s32[] get-tuple-element(%c), index=1\n"
    short = LOST_COUNT.replace(element, "").replace("fusion(%i)", "fusion(%c#1)")
    assert short != LOST_COUNT
    for text in (LOST_COUNT, short):
        assert hlo.Program.parse(text).computations["main"]["loop"].trips == 8


def test_a_condition_runs_where_the_compiler_has_no_trip_count():
    """There once more than the body; a loop of known length is counted on the host."""
    runs = {i.name: runs for i, _, runs in hlo.Program.parse(LOST_COUNT).walk()}
    assert (runs["added"], runs["fused"]) == (8, 9)
    known = LOST_COUNT.replace('"known_induction', '"known_trip_count":{"n":"8"},"known_induction')
    runs = {i.name: runs for i, _, runs in hlo.Program.parse(known).walk()}
    assert runs["added"] == 8
    assert "fused" not in runs


def test_a_loop_that_cannot_be_counted_is_an_error():
    text = LOST_COUNT.replace("add(%q, %two)", "remainder(%q, %two)")
    with pytest.raises(RunFailed, match="its loop loop has no trip count"):
        list(hlo.Program.parse(text).walk())


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f8e8m0fnu[7,5]{1,0}", 35),
        ("f8e4m3b11fnuz[7,5]{1,0}", 35),
        ("f4e2m1fn[7,5]{1,0:E(4)}", 18),
        ("s2[7,5]{1,0:E(2)}", 9),
        ("u1[9]{0}", 2),
        ("pred[7,5]{1,0}", 35),
        ("c128[7,5]{1,0}", 560),
        ("token[]", 0),
        ("(s4[3]{0:E(4)}, (u8[0]{0}, bf16[]))", 4),
        ("f32[<=8,3]{1,0}", 96),
    ],
)
def test_bytes_of_a_shape(shape, size):
    """As the compiler's own argument sizes for these dtypes, on a CPU and for an absent B200."""
    instruction = Instruction("x", shape, "parameter", ("0",), "")
    assert instruction.bytes == size


def test_every_dtype_of_the_installed_compiler_has_a_size():
    names = {name.lower().removesuffix("_type") for name in PrimitiveType.__members__}
    assert names - {"primitive_type_invalid"} <= DTYPE_BITS.keys()


def test_an_unknown_dtype_is_an_error():
    instruction = Instruction("x", "(f32[2], f5e2m2[8,4]{1,0})", "parameter", ("0",), "")
    with pytest.raises(RunFailed, match=r"unknown dtype f5e2m2 in f5e2m2\[8,4\]"):
        print(instruction.bytes)


INDIRECT = """\
HloModule jit_step, is_scheduled=true, replica_count=2, num_partitions=4

%product (a: bf16[64,64]) -> bf16[64,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  ROOT %dot = bf16[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%twice (b: bf16[64,64]) -> bf16[64,64] {
  %b = bf16[64,64]{1,0} parameter(0)
  %once = bf16[64,64]{1,0} call(%b), to_apply=%product
  ROOT %again = bf16[64,64]{1,0} call(%once), to_apply=%product
}

%same (c: bf16[64,64]) -> bf16[64,64] {
  %c = bf16[64,64]{1,0} parameter(0)
  ROOT %copy = bf16[64,64]{1,0} copy(%c)
}

%scatter (d: f32[64,64]) -> f32[8,64] {
  %d = f32[64,64]{1,0} parameter(0)
  ROOT %inner = f32[8,64]{1,0} reduce-scatter(%d), replica_groups=[1,8]<=[8], dimensions={0}
}

%stack (g: f32[64,64], h: f32[9,8,64], n: s32[]) -> f32[9,8,64] {
  %g = f32[64,64]{1,0} parameter(0)
  %h = f32[9,8,64]{2,1,0} parameter(1)
  %n = s32[] parameter(2)
  %zero = s32[] constant(0)
  %part = f32[8,64]{1,0} reduce-scatter(%g), replica_groups=[1,8]<=[8], dimensions={0}
  %layer = f32[1,8,64]{2,1,0} bitcast(%part)
  ROOT %in = f32[9,8,64]{2,1,0} dynamic-update-slice(%h, %layer, %n, %zero, %zero)
}

%reduce (e: f32[64,64]) -> f32[64,64] {
  %e = f32[64,64]{1,0} parameter(0)
  %sum = f32[64,64]{1,0} all-reduce(%e), replica_groups={{0,1,2,3},{4,5,6,7}}
  ROOT %scaled = f32[64,64]{1,0} add(%sum, %sum)
}

ENTRY %main (x: bf16[64,64], flag: pred[], i: s32[], y: f32[64,64]) -> bf16[64,64] {
  %x = bf16[64,64]{1,0} parameter(0)
  %flag = pred[] parameter(1)
  %i = s32[] parameter(2)
  %y = f32[64,64]{1,0} parameter(3)
  %two = bf16[64,64]{1,0} conditional(%flag, %x, %x), true_computation=%same, \
false_computation=%twice
  %many = bf16[64,64]{1,0} conditional(%i, %two, %two, %two), \
branch_computations={%same, %product, %same}
  %start = ((f32[64,64]{1,0}), f32[8,64]{1,0}) async-start(%y), calls=%scatter
  %update = ((f32[64,64]{1,0}), f32[8,64]{1,0}) async-update(%start)
  %done = f32[8,64]{1,0} async-done(%update)
  %fused = f32[64,64]{1,0} fusion(%y), kind=kCustom, calls=%reduce, \
metadata={op_name="jit(step)/loss"}
  %fused-start = ((f32[64,64]{1,0}), f32[64,64]{1,0}) fusion-start(%y), kind=kCustom, calls=%reduce
  %fused-done = f32[64,64]{1,0} fusion-done(%fused-start)
  %layers = f32[9,8,64]{2,1,0} broadcast(%i), dimensions={}
  %stacked = f32[9,8,64]{2,1,0} fusion(%y, %layers, %i), kind=kCustom, calls=%stack
  %ragged = bf16[64,64]{1,0} ragged-all-to-all(%x, %x), replica_groups=[2,4]<=[8]
  %sent = bf16[64,64]{1,0} collective-broadcast(%x), replica_groups=[2,4]<=[8]
  %theirs = bf16[64,64]{1,0} custom-call(%x), custom_call_target="their_attention"
  ROOT %sorted = bf16[64,64]{1,0} custom-call(%theirs), custom_call_target="__cub$DeviceRadixSort"
}
"""


def test_conditionals_count_their_largest_branch_once():
    program = hlo.Program.parse(INDIRECT, RULES)
    assert program.flops() == {("product", "bf16"): 3 * 2 * 64**3}
    assert program.assumed == [
        "two: the largest of its 2 branches, twice", "many: the largest of its 3 branches, product",
    ]  # fmt: skip
    assert program.devices == 8


def test_collectives_in_wrappers_and_fusions_are_counted():
    found = collectives_of(hlo.Program.parse(INDIRECT, RULES))
    assert [(c.kind, c.group, c.wire_bytes, c.source) for c in found] == [
        ("reduce-scatter", 8, 7 * 8 * 64 * 4, ""),
        ("all-reduce", 4, 2 * 3 * 64 * 16 * 4, "jit(step)/loss"),
        ("all-reduce", 4, 2 * 3 * 64 * 16 * 4, ""),
        ("reduce-scatter", 8, 7 * 8 * 64 * 4, ""),  # not of the stack into which it writes a layer
        ("ragged-all-to-all", 4, 3 * 64 * 16 * 2, ""),
        ("collective-broadcast", 4, 3 * 64 * 16 * 2, ""),
    ]


def test_custom_calls_without_a_rule_are_known_by_name():
    program = hlo.Program.parse(INDIRECT, RULES)
    unknown = [name for i, s, _ in program.walk() if (name := program.unknown(i, s))]
    assert unknown == ["their_attention"]


CUBLAS = (
    'custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={{"gemm_backend_'
    'config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}},'
    '"precision_config":{{"operand_precision":["{0}","{0}"],"algorithm":"ALG_{1}"}}}}}}'
)
TRITON = "dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{}"
EXACT = ", operand_precision={highest,highest}"


@pytest.mark.parametrize(
    ("dtype", "call", "multiplied", "matmuls"),
    [
        ("f32", TRITON.format(""), "tf32", 1),
        ("f32", TRITON.format(", operand_precision={high,high}"), "f32", 1),
        ("f32", TRITON.format(EXACT), "f32", 1),
        ("f32", TRITON.format(", algorithm=dot_f32_f32_f32"), "f32", 1),
        ("f32", TRITON.format(", algorithm=dot_tf32_tf32_f32"), "tf32", 1),
        ("f32", TRITON.format(", algorithm=dot_tf32_tf32_f32_x3"), "tf32", 3),
        ("f32", TRITON.format(", algorithm=dot_bf16_bf16_f32"), "bf16", 1),
        ("f32", TRITON.format(", algorithm=dot_bf16_bf16_f32_x3"), "bf16", 3),
        ("f32", TRITON.format(", algorithm=dot_bf16_bf16_f32_x6"), "bf16", 6),
        ("f32", TRITON.format(", algorithm=dot_bf16_bf16_f32_x9"), "bf16", 9),
        ("f8e5m2", TRITON.format(", algorithm=dot_any_f8_any_f8_f32"), "f8e5m2", 1),
        ("bf16", TRITON.format(EXACT), "bf16", 1),
        ("f64", TRITON.format(""), "f64", 1),
        ("s8", TRITON.format(""), "s8", 1),
        ("f32", CUBLAS.format("DEFAULT", "UNSET"), "tf32", 1),
        ("f32", CUBLAS.format("HIGH", "UNSET"), "tf32", 1),
        ("f32", CUBLAS.format("HIGHEST", "UNSET"), "f32", 1),
        ("f32", CUBLAS.format("DEFAULT", "DOT_F32_F32_F32"), "f32", 1),
        ("f32", CUBLAS.format("DEFAULT", "DOT_TF32_TF32_F32"), "tf32", 1),
        ("c64", CUBLAS.format("DEFAULT", "UNSET"), "tf32", 4),
        ("c64", CUBLAS.format("HIGHEST", "UNSET"), "f32", 4),
        ("c128", CUBLAS.format("DEFAULT", "UNSET"), "f64", 4),
    ],
)
def test_a_matmul_multiplies_in_the_dtype_that_xla_chooses(dtype, call, multiplied, matmuls):
    """As jax 0.11 compiles them for an H100, with Triton and with cuBLAS."""
    program = hlo.Program.parse(f"""\
HloModule toy, is_scheduled=true

ENTRY %main (a: {dtype}[8,16], b: {dtype}[16,4]) -> {dtype}[8,4] {{
  %a = {dtype}[8,16]{{1,0}} parameter(0)
  %b = {dtype}[16,4]{{1,0}} parameter(1)
  ROOT %p = {dtype}[8,4]{{1,0}} {call}
}}
""")
    ((work, _, _),) = program.works()
    assert (work.dtype, work.flops) == (multiplied, 2 * 8 * 4 * 16 * matmuls)
    assert work.sizes == (1, 8, 4, 16 * matmuls)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("c64[8,4]{1,0} fft(%x), fft_type=FFT, fft_length={4}", "fft"),
        ("f32[8,4]{1,0} fusion(%x), kind=kCustom, calls=%convolved", "convolution"),
        ('f32[8,4]{1,0} custom-call(%x), custom_call_target="cusolver_syevd_ffi"',
         "cusolver_syevd_ffi"),
        ('f32[8,4]{1,0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", '
         'backend_config={name = "their_kernel"}', "__gpu$xla.gpu.triton"),
        ('f32[8,4]{1,0} custom-call(%x), custom_call_target="__cub$DeviceRadixSort"', ""),
        ("(f32[8,4]{1,0}, u32[], token[]) send(%x, %x), channel_id=1", "send"),
        ("f32[8,4]{1,0} ragged-dot(%x, %x, %x)", "ragged-dot"),
        ("((f32[8,4]{1,0}), (f32[8,4]{1,0}, f32[8,4]{1,0})) async-start(%x), calls=%gathers",
         "async-group"),
        ("f32[8,4]{1,0} tanh(%x)", ""),
    ],
)  # fmt: skip
def test_what_computes_without_a_rule_is_named(line, name):
    program = hlo.Program.parse(
        f"""\
HloModule toy, is_scheduled=true

%convolved (p: f32[8,4]) -> f32[8,4] {{
  %p = f32[8,4]{{1,0}} parameter(0)
  ROOT %c = f32[8,4]{{1,0}} convolution(%p, %p), window={{}}, dim_labels=bf_io->bf
}}

%gathers (q: f32[8,4]) -> (f32[8,4], f32[8,4]) {{
  %q = f32[8,4]{{1,0}} parameter(0)
  %one = f32[8,4]{{1,0}} all-gather(%q), replica_groups={{}}
  %two = f32[8,4]{{1,0}} all-gather(%q), replica_groups={{}}
  ROOT %both = (f32[8,4]{{1,0}}, f32[8,4]{{1,0}}) tuple(%one, %two)
}}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {{
  %x = f32[8,4]{{1,0}} parameter(0)
  ROOT %y = {line}
}}
""",
        RULES,
    )
    ((_, kernel, _),) = Walk(program).kernels()
    assert kernel.unknown == name


MODES = {
    # XLA's modes by channel_id and use_global_device_ids, on 2 replicas of 4 partitions.
    ("all-reduce", ""): ((0, 4), 4),
    ("all-reduce", "channel_id=1"): ((0, 1, 2, 3, 4, 5, 6, 7), 1),
    ("all-reduce", "channel_id=1, use_global_device_ids=true"): ((0, 1, 2, 3, 4, 5, 6, 7), 1),
    ("all-gather", "channel_id=1, use_global_device_ids=false"): ((0, 1, 2, 3, 4, 5, 6, 7), 1),
    ("all-to-all", "channel_id=1"): ((0, 1, 2, 3), 2),
    ("all-to-all", ""): ((0, 4), 4),
    ("collective-broadcast", "channel_id=1"): ((0, 1, 2, 3), 2),
}


def groups_of(kind, attributes, header="replica_count=2, num_partitions=4"):
    """The groups of one collective in a program."""
    program = hlo.Program.parse(
        f"HloModule m, is_scheduled=true, {header}\n\nENTRY %main (x: f32[8]) -> f32[8] {{\n"
        f"  %x = f32[8]{{0}} parameter(0)\n"
        f"  ROOT %done = f32[8]{{0}} {kind}(%x), {attributes}, metadata={{}}\n}}\n"
    )
    (i,) = (i for i, _, _ in program.walk() if i.opcode == kind)
    return collectives.groups(i.attributes, i.numbering)


@pytest.mark.parametrize(("kind", "attributes"), MODES)
def test_empty_groups_are_all_of_what_the_mode_numbers(kind, attributes):
    first, count = MODES[kind, attributes]
    found = groups_of(kind, ", ".join(filter(None, [attributes, "replica_groups={}"])))
    assert (found[0], len(found)) == (first, count)
    assert sorted(device for group in found for device in group) == list(range(8))


@pytest.mark.parametrize(
    ("kind", "attributes", "header", "expected"),
    [
        # Replicas with all of their partitions: the JAX-Toolbox program of one replica.
        ("all-gather", "channel_id=1, replica_groups={{0}}", "num_partitions=8", (range(8),)),
        ("all-reduce", "replica_groups={}", "replica_count=8", (range(8),)),
        ("all-reduce", "channel_id=1, replica_groups={}", "num_partitions=8", (range(8),)),
        ("all-reduce", "replica_groups={}", "num_partitions=8", [(d,) for d in range(8)]),
        (
            "all-reduce", "channel_id=1, replica_groups={{0},{1}}",
            "replica_count=2, num_partitions=4", (range(4), range(4, 8)),
        ),
        (
            "all-reduce", "channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true",
            "replica_count=2, num_partitions=4", (range(4), range(4, 8)),
        ),
        (
            "all-to-all", "channel_id=1, replica_groups={{0,2},{1,3}}",
            "replica_count=2, num_partitions=4", ((0, 2), (1, 3), (4, 6), (5, 7)),
        ),
        (
            "all-reduce", "replica_groups=[1,2]<=[2]", "replica_count=2, num_partitions=4",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
        (
            "collective-permute", "channel_id=1, source_target_pairs={{0,1},{1,0}}",
            "replica_count=2, num_partitions=4", ((0, 1), (1, 0), (4, 5), (5, 4)),
        ),
        ("collective-permute", "source_target_pairs={}", "num_partitions=4", ((0,),)),
        # Ids that only devices can have, as in programs that are written by hand.
        ("all-gather", "replica_groups=[2,4]<=[8]", "num_partitions=8", (range(4), range(4, 8))),
    ],
)  # fmt: skip
def test_ids_number_what_the_mode_says(kind, attributes, header, expected):
    assert groups_of(kind, attributes, header) == tuple(map(tuple, expected))


def test_the_largest_of_unequal_groups_counts():
    text = COLLECTIVE.replace("GROUPS", "replica_groups={{0},{1,2,3}}")
    (found,) = collectives_of(hlo.Program.parse(text))
    assert found.groups == ((1, 2, 3),)


COLLECTIVE = """\
HloModule m, is_scheduled=true, replica_count=4

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %start = f32[8]{0} all-reduce-start(%x), GROUPS, to_apply=%sum
  ROOT %done = f32[8]{0} all-reduce-done(%start)
}
"""


def test_names_may_have_no_percent_sign(program):
    assert "%" in PROGRAM
    other = hlo.Program.parse(PROGRAM.replace("%", ""), RULES)
    assert list(other.works()) == list(program.works())
    assert list(collectives_of(other)) == list(collectives_of(program))
    assert {n: [i.operands for i in s.values()] for n, s in other.computations.items()} == {
        n: [i.operands for i in s.values()] for n, s in program.computations.items()
    }
