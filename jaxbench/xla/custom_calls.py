"""What the custom calls of a compiled program compute: a rule for each target, in one table.

An operator does not know these rules. It says only which calls a compiled step must contain
(`calls` in the registries of `ops.attention`, `ops.grouped` and `ops.ssd`), and
`tests/xla/test_custom_calls.py` checks that each of these calls has a rule.
"""

import json
import re
from collections import Counter
from math import isqrt, prod

from jaxbench.base.scopes import HADAMARD, QUANTIZED, TRITON
from jaxbench.xla.hlo import Program, Rules, Work
from jaxbench.xla.instruction import Instruction, Scope, ints

METADATA = r'serialized_metadata = "((?:[^"\\]|\\.)*)"'
"""The cost that `ops.pallas_call.call` stores in the compiled call of a kernel."""

WINDOW = r'"sliding_window_length":\s*"?(\d+)'
"""Pattern of the sliding window in a call of attention; 0 without one."""

MASK = r'"mask_type":\s*"(\w+)"'
"""Pattern of the mask in a call of attention."""

TILE = 128
"""Keys, and queries, of a tile of cuDNN's attention: it computes a window in whole tiles."""

ATTENTION = {
    f"__cudnn$fmha{bias}Softmax{dropout}{backward}": 2 if backward else 1
    for bias in ("", "ScaleBias")
    for dropout in ("", "Dropout")
    for backward in ("", "Backward")
}
"""cuDNN's calls, and how many matmuls each has over the head dim of keys, and again over the head
dim of values: forward QK^T and PV; backward dQ and dK, dP and dV. The scores that the backward
kernel computes again are not counted. Calls with a bias or dropout count alike."""

SCORES = r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]'
"""Pattern of the shape of attention's scores: batch, heads, queries and keys, whatever the layout
of the operands."""

TOKAMAX = r"/(ragged_dot|ragged_contracting_dim_dot)_sm\d+/"
"""Pattern of tokamax's name of a grouped matmul, in the scope of its call; the second is that of a
gradient of weights."""

GEMM, QUANTIZE, AMAX = "te_gemm_v2_ffi", "te_dbias_quantize_ffi", "te_rht_amax_ffi"
"""Calls of Transformer Engine."""

MODE = r"scaling_mode = (\d+)"
"""Pattern of Transformer Engine's scaling mode (`ops.quantized.te.SCALING`)."""

MXFP8, NVFP4 = "2", "4"
"""The modes of block-scaled formats."""


def attention(i: Instruction, scope: Scope) -> Work:
    """Attention by cuDNN: 2 B N S^2 H FLOPs per matmul, without subtracting the causal mask.

    A sliding window counts as more, but shorter sequences with as many tokens in all. They are so
    short that under a causal mask a query sees on average as many keys as the tiles of its window
    have. Tables are causal, so attention without such a mask counts as twice as many sequences, and
    attention to fewer or more keys than queries as sequences with as many scores.
    """
    dtype, (batch, length, heads, head_dim) = scope[i.operands[0]].arrays[0]
    _, (_, key_length, _, value_dim) = scope[i.operands[2]].arrays[0]
    if scores := ints(i.attribute(SCORES)):
        batch, heads, length, key_length = scores
    tokens = batch * length
    if window := int(i.attribute(WINDOW) or 0):
        # Under the causal mask a query sees half of a sequence's keys on average.
        length = key_length = min(length, 2 * TILE * (-(-window // TILE) + 1))
    flops = ATTENTION[i.target] * 2 * tokens * heads * key_length * (head_dim + value_dim)
    backward = i.target.endswith("Backward")
    causal, shorter = "CAUSAL" in (i.attribute(MASK) or "CAUSAL"), min(length, key_length)
    # A causal sequence of the table has half of the scores. The mask begins at the first key, so it
    # leaves nothing of the keys after the last query, and all keys to queries after the last key.
    halves = (2 * length - shorter) * shorter if causal else 2 * length * key_length
    sequences = -(-tokens * halves // (length * shorter**2))
    sizes = (sequences, heads, shorter, head_dim, value_dim)
    return Work("attention", dtype, flops, sizes, backward)


def block_scaled(i: Instruction, scope: Scope) -> Work:
    """A block-scaled matmul by cuDNN, `[batch, m, k]` times `[batch, n, k]`."""
    dtype, (batch, m, k) = scope[i.operands[0]].arrays[0]
    n = scope[i.operands[1]].arrays[0][1][1]
    return Work("product", dtype, 2 * batch * m * n * k, (batch, m, n, k), blocks=True)


def pallas(i: Instruction, scope: Scope) -> Work | None:
    """A Pallas kernel of this package, by the cost that its call carries; None for others."""
    cost = json.loads((i.attribute(METADATA) or "{}").replace(r"\22", '"').replace(r"\"", '"'))
    if "moved" not in cost:
        return None
    return Work(
        cost["kind"],
        cost["dtype"],
        int(cost["flops"]),
        sizes=tuple(json.loads(cost["sizes"])),
        bytes=int(cost["moved"]),
        blocks=bool(cost["blocks"]),
    )


def mosaic(i: Instruction, scope: Scope) -> Work | None:
    """A grouped matmul of tokamax (0.0.17); None for other Mosaic kernels.

    We count all rows, in groups of equal size. The operands are `[rows, k]` and `[groups, k, n]`.
    Those of gradients of weights are `[k, rows]` and `[rows, n]`, and the result is
    `[groups, k, n]`.
    """
    name = i.attribute(TOKAMAX)
    if name is None:
        return None
    if name == "ragged_dot":
        kind, (dtype, (rows, k)) = "grouped", scope[i.operands[0]].arrays[0]
        _, (groups, _, n) = scope[i.operands[1]].arrays[0]
    else:
        kind, (dtype, (k, rows)) = "grouped_weights", scope[i.operands[-2]].arrays[0]
        _, (groups, _, n) = i.arrays[0]
    return Work(kind, dtype, 2 * rows * n * k, (groups, -(-rows // groups), n, k))


def engine_matmul(i: Instruction, scope: Scope) -> Work:
    """A matmul by Transformer Engine of [m, k] and [n, k], or of their transposes: the sizes of the
    three arrays multiply to (m n k)^2. In NVFP4 two kernels before it swizzle the scales."""
    dtype = scope[i.operands[0]].arrays[0][0]
    x, w = (prod(scope[i.operands[n]].arrays[0][1]) for n in (0, 2))
    y = prod(i.arrays[0][1])
    mnk, mode = isqrt(x * w * y), i.attribute(MODE)
    moved = _moved(i, scope) - prod(i.arrays[-1][1])  # without its workspace
    return Work(
        "product", dtype, 2 * mnk, (1, mnk // w, mnk // x, mnk // y), bytes=moved,
        blocks=mode in (MXFP8, NVFP4), launches=3 if mode == NVFP4 else 1,
    )  # fmt: skip


def engine_quantization(i: Instruction, scope: Scope) -> Work:
    """A quantization by Transformer Engine, or the amax before and after a Hadamard transform: the
    bytes of its operands and results. If the transposed copy is transformed, a second kernel reads
    the input for it. A kernel before the one of the amax writes zeros."""
    x, twice = scope[i.operands[0]], "use_rht = true" in i.attributes
    moved, launches = _moved(i, scope) + twice * x.bytes, 1 + (twice or i.target == AMAX)
    return Work("quantization", x.arrays[0][0], 0, bytes=moved, launches=launches)


def _moved(i: Instruction, scope: Scope) -> int:
    return i.bytes + sum(scope[name].bytes for name in i.operands)


RULES: Rules = {
    **dict.fromkeys(ATTENTION, attention),
    "__cudnn$blockScaledDot": block_scaled,
    TRITON: pallas,
    "mosaic_gpu_v2": mosaic,
    GEMM: engine_matmul,
    QUANTIZE: engine_quantization,
    AMAX: engine_quantization,
}
"""The rules for custom calls, by target: all that a step of this package can contain, and tokamax's
grouped matmuls, which MaxText calls."""


def scaling_modes(program: Program) -> set[str | None]:
    """The scaling modes with which a program calls Transformer Engine."""
    calls = (i for i, _, _ in program.walk() if i.target in (GEMM, QUANTIZE))
    return {i.attribute(MODE) for i in calls}


def quantized_matmuls(program: Program, dtype: str) -> Counter[tuple[str, bool]]:
    """Runs per step of quantized matmuls, by the name in their scope (`Matmul.scope` in
    `ops.quantized.operand`) and whether their operands are in the format `dtype`."""
    runs_of: Counter[tuple[str, bool]] = Counter()
    for work, runs, source in program.works():
        named = re.search(rf"{re.escape(QUANTIZED)}([\w.]+)", source)
        if work.matmul and named and HADAMARD not in source:
            runs_of[named.group(1), work.format == dtype] += runs
    return runs_of
