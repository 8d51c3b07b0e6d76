"""The program compiled for an absent GPU, executed on a CPU.

XLA's CPU backend gets the optimized HLO again as text, with its fusions, loops and dtypes. What a
CPU lacks is replaced by its meaning: calls of cuBLASLt and cuDNN by functions in JAX, fusions by
calls, asynchronous operations by synchronous ones, and bitcasts, which reinterpret memory, by
transposes.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Public JAX executes no HLO: it takes StableHLO, which has no layouts and no fusions.
from jaxlib import _hlo, _jax, xla_client  # type: ignore[attr-defined]

from jaxbench.xla.custom_calls import WINDOW
from jaxbench.xla.hlo import Program
from jaxbench.xla.instruction import Instruction, Scope, arrays, ints

DTYPES = {
    "pred": "bool", "s8": "int8", "u8": "uint8", "s32": "int32", "u32": "uint32",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "bf16": "bfloat16", "f32": "float32",
}  # fmt: skip
"""JAX's names of HLO's dtypes."""

LAYOUT = r"(\w+\[[\d,]*\])\{([\d,]*)[^}]*\}"
DROPPED = re.compile(
    r", backend_config=.*|, control-predecessors=\{[^}]*\}|, output_to_operand_aliasing=\{.*?\)\}"
    r'|, frontend_attributes=\{([^{}"]|"(\\.|[^"\\])*")*\}'
)
"""Attributes that say how a GPU executes an instruction, not what it computes."""


def execute(compiled: Any, arguments: list[jax.Array]) -> list[jax.Array]:
    """The results of a compiled step for one absent GPU, whose arguments are on the CPU."""
    (module,) = compiled.runtime_executable().hlo_modules()
    module = _hlo.hlo_module_from_text(translate(_text(module)))
    computation = _hlo.XlaComputation(module.as_serialized_hlo_module_proto())
    device = jax.devices("cpu")[0]
    executable = device.client.compile_and_load(
        _jax.mlir.xla_computation_to_mlir_module(computation),
        xla_client.DeviceList((device,)),
        xla_client.CompileOptions(),
    )
    return executable.execute(arguments)


def _text(module: Any) -> str:
    options = _hlo.HloPrintOptions()
    options.print_large_constants, options.print_metadata = True, False
    return re.sub(r"/\*.*?\*/", "", module.to_string(options))


def translate(text: str) -> str:
    """A program for GPUs as one for CPUs; an AssertionError names a call of unknown meaning."""
    scopes = Program.parse(text).computations
    scope: Scope = {}
    functions: dict[tuple, str] = {}
    lines = []
    for line in text.splitlines()[1:]:
        if header := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            scope = scopes[header[1]]
        if found := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = ", line):
            line = _translated(line, scope[found[1]], scope, functions)
        lines.append(re.sub(LAYOUT, r"\1", line))
    return "\n".join(["HloModule step", *functions.values(), *lines])


def _translated(line: str, i: Instruction, scope: Scope, functions: dict[tuple, str]) -> str:
    """The lines for one instruction; a new function that they call is added to `functions`."""
    if i.opcode == "bitcast":
        return _bitcast(i, scope[i.operands[0]])
    if i.opcode == "custom-call":
        assert i.target in MEANINGS, f"a CPU has no {i.target}"
        shapes = [scope[name].shape for name in i.operands]
        key = i.target, i.shape, *shapes, i.attributes
        name = f"meaning.{list(functions).index(key) if key in functions else len(functions)}"
        if key not in functions:
            functions[key] = _lowered(name, MEANINGS[i.target](i), shapes)
        return _line(i, "call", i.operands, f"to_apply=%{name}")
    if i.opcode.endswith("-start"):
        return ""
    if i.opcode.endswith("-done"):
        start = scope[i.operands[0]]
        line = _line(i, i.opcode.removesuffix("-done"), start.operands, start.attributes[2:])
    line = DROPPED.sub("", line)
    return re.sub(r" fusion\((.*)\), kind=k\w+, calls=", r" call(\1), to_apply=", line)


def _line(i: Instruction, opcode: str, operands: Any, attributes: str) -> str:
    """The instruction with the same name and shape, but another operation."""
    inputs = ", ".join(f"%{name}" for name in operands)
    return f"  {'ROOT ' * i.is_root}%{i.name} = {i.shape} {opcode}({inputs}), {attributes}"


def _bitcast(i: Instruction, source: Instruction) -> str:
    """The operand's elements in the order of its memory, then as the result's memory has them."""
    ((dtype, dims),), ((result_dtype, result),) = source.arrays, i.arrays
    if dtype != result_dtype:
        assert dims == result
        return _line(i, "bitcast-convert", i.operands, "")[:-2]
    order, result_order = _major_to_minor(source.shape), _major_to_minor(i.shape)
    back = [result_order.index(d) for d in range(len(result))]
    flat, shaped = ([sizes[d] for d in by] for sizes, by in ((dims, order), (result, result_order)))
    by = _commas(order)
    return f"""\
  %{i.name}.flat = {dtype}[{_commas(flat)}] transpose(%{source.name}), dimensions={{{by}}}
  %{i.name}.shaped = {dtype}[{_commas(shaped)}] reshape(%{i.name}.flat)
{_line(i, "transpose", (f"{i.name}.shaped",), f"dimensions={{{_commas(back)}}}")}"""


def _commas(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def _major_to_minor(shape: str) -> list[int]:
    layout = re.match(LAYOUT, shape)
    return ints(layout[2])[::-1] if layout else []


def _lowered(name: str, function: Callable, shapes: list[str]) -> str:
    """The HLO of a JAX function, with this name, for operands of these shapes."""
    types = [jax.ShapeDtypeStruct(d, DTYPES[t]) for shape in shapes for t, d in arrays(shape)]
    computation = jax.jit(function, keep_unused=True).lower(*types).compiler_ir("hlo")
    proto = computation.as_serialized_hlo_module_proto()
    text = _text(_hlo.HloModule.from_serialized_hlo_module_proto(proto)).partition("\n")[2]
    entry = re.search(r"ENTRY %([\w.\-]+)", text)[1]
    text = text.replace("ENTRY ", "").replace("%", f"%{name}.")
    return re.sub(LAYOUT, r"\1", text.replace(f"%{name}.{entry} (", f"%{name} ("))


def _results(i: Instruction, *values: jax.Array) -> tuple[jax.Array, ...]:
    """The values in the call's dtypes, and zeros for its workspace."""
    types = [(DTYPES[dtype], dims) for dtype, dims in i.arrays]
    used = [v.astype(t) for v, (t, _) in zip(values, types, strict=False)]
    return (*used, *(jnp.zeros(dims, t) for t, dims in types[len(values) :]))


def _product(i: Instruction) -> Callable:
    """cuBLASLt: a product with fp32 sums, of scaled operands in FP8, with another matrix added."""
    contracting, batch = (
        [ints(i.attribute(rf'"{side}_{kind}_dimensions":\[([^\]]*)\]')) for side in ("lhs", "rhs")]
        for kind in ("contracting", "batch")
    )
    epilogue, beta = i.attribute(r'"epilogue":"(\w+)"'), i.attribute(r'"beta":(\d+)')
    assert epilogue in ("DEFAULT", "RELU", "BIAS"), f"a CPU has no epilogue {epilogue}"
    assert (i.attribute(r'"alpha_real":(\d+)'), beta in ("0", "1")) == ("1", True)

    def function(a, b, *more):
        others = [x.astype(jnp.float32) for x in more]
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        out = jax.lax.dot_general(a, b, (tuple(contracting), tuple(batch)))
        added = others.pop(0) if beta == "1" else 0
        if i.target.endswith("$f8"):
            out *= others.pop(0) * others.pop(0)
        out += added
        if epilogue == "BIAS":
            out += others.pop(0)
        assert not others
        return _results(i, jax.nn.relu(out) if epilogue == "RELU" else out)

    return function


def _attended(
    i: Instruction, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(scores `B N S T` of causal attention, values with as many heads), from `B S N H` in fp32."""
    heads, length = query.shape[2], query.shape[1]
    key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
    scores = float(i.attribute(r'"fmha_scale":\s*([\d.e\-]+)')) * jnp.einsum(
        "bsnh,btnh->bnst", query, key
    )
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    seen = (distance >= 0) & (distance < (int(i.attribute(WINDOW)) or length))
    return jnp.where(seen, scores, -jnp.inf), value


def _attention_forward(i: Instruction) -> Callable:
    """cuDNN's fused attention: output `B N S H`, logarithms of the softmax's denominators."""

    def function(*operands):
        scores, value = _attended(i, *(x.astype(jnp.float32) for x in operands))
        out = jnp.einsum("bnst,btnh->bnsh", jax.nn.softmax(scores), value)
        return _results(i, out, *[jax.nn.logsumexp(scores, axis=-1)][: len(i.arrays) - 2])

    return function


def _attention_backward(i: Instruction) -> Callable:
    """Gradients of query, key and value, `B N S H`. As in the kernel, the weights are made again
    from the logarithms, and a softmax's gradient is weights times (d_weights - d_out . out)."""

    def function(*operands):
        query, key, value, statistics, d_out, out = (x.astype(jnp.float32) for x in operands)
        dots = jnp.einsum("bsnh,bsnh->bns", d_out, out)[..., None]

        def objective(*operands):
            scores, value = _attended(i, *operands)
            d_weights = jnp.einsum("bsnh,btnh->bnst", d_out, value) - dots
            return jnp.sum(jnp.exp(scores - statistics[..., None]) * d_weights)

        grads = jax.grad(objective, (0, 1, 2))(query, key, value)
        return _results(i, *(grad.swapaxes(1, 2) for grad in grads))

    return function


def _buffer(i: Instruction) -> Callable:
    """Memory that nothing has written: what reads it shows, floating point as NaN."""
    ((dtype, dims),) = i.arrays
    return lambda: jnp.full(dims, jnp.nan if dtype.startswith(("f", "bf")) else 0, DTYPES[dtype])


MEANINGS: dict[str, Callable[[Instruction], Callable]] = {
    "__cublas$lt$matmul": _product,
    "__cublas$lt$matmul$f8": _product,
    "__cudnn$fmhaSoftmax": _attention_forward,
    "__cudnn$fmhaSoftmaxBackward": _attention_backward,
    "AllocateBuffer": _buffer,
}
"""Functions in JAX for custom calls, by target."""
