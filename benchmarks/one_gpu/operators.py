"""Compares every operator at the recipes' shapes, forward and gradients, with float32 on the CPU.
Unit tests compare that with independent references in float64."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jaxbench import mesh
from jaxbench.jax_internals import attention_for_mesh
from jaxbench.models.context import Context as LayerContext
from jaxbench.models.context import Kernels
from jaxbench.models.experts import Experts
from jaxbench.models.layers import Weight, look_up
from jaxbench.ops import attention, dense, grouped, loss, quantized, ssd
from jaxbench.ops.grouped.groups import group
from jaxbench.ops.implementations import Task
from jaxbench.ops.pallas_call import ignoring_pallas_deprecation
from jaxbench.plan.absent import compile_only_devices
from jaxbench.plan.plan import Memory
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Precision, Run
from jaxbench.train.step import compute_weights
from jaxbench.xla import flags
from one_gpu.context import FAMILIES, MEASURED, OK, WRONG, Context, Finding, row

TOLERANCE = 2**-6
"""Largest error of a result, relative to the largest exact value. bf16 operands are exact on both
sides; kernels round results and intermediates to bf16 (2^-9), or both sides to FP8 alike."""

FP8_SUM = 2**-14 / 32
"""The part of a sum of FP8 products that each of its features may cost: Hopper's tensor cores add
32 products at a time, and keep about 14 bits (DeepSeek-V3, section 3.5.2)."""

TOKENS, LARGEST = 1024, 2**29
"""Tokens of a product, and the largest size of a weight: enough to fill the tiles of a kernel, few
enough for a CPU."""


@dataclass(frozen=True)
class Case:
    """An operator to check. `on(platform)` returns its function. Of the inputs `arrays`, those with
    indices `bf16` are in bf16 on a GPU and in `exact` on the CPU (emulated FP8 needs the same
    bf16). `reference` is the CPU's function if it is another. `gradients` are compared too, unless
    the function computes them itself."""

    name: str
    on: Callable[[str], Callable]
    arrays: tuple[np.ndarray, ...]
    bf16: tuple[int, ...]
    exact: Any = jnp.float32
    reference: Callable | None = None
    gradients: bool = True
    tolerance: float = TOLERANCE

    def inputs(self, dtype: Any) -> list[jax.Array]:
        """The inputs; those of `bf16` are rounded to bf16 and then cast to `dtype`."""
        return [
            jnp.asarray(x, jnp.bfloat16).astype(dtype) if i in self.bf16 else jnp.asarray(x)
            for i, x in enumerate(self.arrays)
        ]


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Normal fp32 numbers."""
    return scale * np.random.default_rng(seed).standard_normal(shape, np.float32)


def with_gradients(function: Callable) -> Callable:
    """A function that also returns the gradients of a fixed weighted sum of the results, for
    floating-point inputs."""

    def run(*arrays):
        floating = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of_floating(*values):
            replaced = dict(zip(floating, values, strict=True))
            return function(*(replaced.get(i, x) for i, x in enumerate(arrays)))

        out, vjp = jax.vjp(of_floating, *(arrays[i] for i in floating))
        weights = jax.tree.map(lambda y: jnp.cos(jnp.arange(y.size) + 1.0).reshape(y.shape), out)
        return out, vjp(jax.tree.map(lambda y, w: w.astype(y.dtype), out, weights))

    return run


def attentions(ctx: Context) -> Iterator[Case]:
    """Attention of one group of heads of each family, at its sequence length, in full and in the
    family's window, with its sinks."""
    for family in FAMILIES:
        run = row(f"{family}_bf16")
        model, length = run.model, 256 if ctx.rehearsal else run.batch.sequence_length
        mixer = model.attention_mixer
        heads = mixer.heads // getattr(mixer, "kv_heads", mixer.heads)
        key_width, value_width = mixer.score_widths
        sizes = (heads, key_width), (1, key_width), (1, value_width)
        arrays = [random(1, length, *size, seed=i) for i, size in enumerate(sizes)]
        has_sinks = getattr(mixer, "sinks", False)
        if has_sinks:
            arrays.append(random(heads, seed=3))
        for window in {None, mixer.window}:

            def on(platform, run=run, mixer=mixer, length=length, window=window):
                kernel = attention.choose(run.execution, Task(run.model, "bf16", length, platform))
                scale = mixer.score_scale

                def function(query, key, value, *sinks):
                    return attention.attend(query, key, value, kernel, scale, window, *sinks)

                return function

            name = f"attention of {family}, {length} x {heads} x {key_width}/{value_width}"
            name += f", window {window}" * bool(window) + ", sinks" * has_sinks
            yield Case(name, on, tuple(arrays), (0, 1, 2))


class OneProduct(nnx.Module):
    """A block with a single weight."""

    def __init__(self, weight):
        self.w = Weight(weight, quantized=True)


def product(implementation: str | None, x: jax.Array, w: jax.Array) -> jax.Array:
    """A product of a layer, in bf16 (None) or in FP8 under delayed scaling."""
    dims = "batch seq ffn"
    if implementation is None:
        return dense.dot("BSD,DF->BSF", x, w, dims)
    precision = Precision(dtype="fp8", amax_history=4, implementation=implementation)
    histories = [jnp.full((1, 1, 3, 4), 6.0)]
    stack = OneProduct(w[None])
    step = quantized.Quantization.of([stack], histories, precision)
    (observing,) = step.scaled(step.probes)
    block = quantized.attach(*jax.tree.map(lambda leaf: leaf[0], (stack, observing)))
    return dense.dot("BSD,DF->BSF", x, block.w, dims)


def products(ctx: Context) -> Iterator[Case]:
    """FP8 products of two families, by every implementation that is installed."""
    tokens = 64 if ctx.rehearsal else TOKENS
    for k, n in sorted({(k, n) for _, k, n in product_shapes(ctx) if k * n < LARGEST}):
        for name in implementations():
            arrays = random(1, tokens, k), random(k, n, seed=1, scale=k**-0.5)
            yield Case(
                f"FP8 matmul by {name}, {tokens} x {k} x {n}",
                lambda platform, name=name: partial(product, name if platform == "gpu" else "xla"),
                arrays, (0, 1), jnp.bfloat16,
                tolerance=max(TOLERANCE, FP8_SUM * max(tokens, k, n)),
            )  # fmt: skip


def product_shapes(ctx: Context) -> set[tuple[int, int, int]]:
    """(tokens, inputs, outputs) of the products of a layer of Llama 3.1 8B and Nemotron-4."""
    shapes = set()
    for family in ("llama31_8b",) if ctx.rehearsal else ("llama31_8b", "nemotron4_340b"):
        run = row(f"{family}_fp8", recipes.SMOKE if ctx.rehearsal else 1)
        m, tokens = run.model, run.microbatch * run.batch.sequence_length
        a = m.attention
        shapes |= {
            (tokens, m.embed, (a.heads + 2 * a.kv_heads) * a.head_dim),
            (tokens, m.embed, (m.mlp.matrices - 1) * m.mlp.ffn),
            (tokens, m.mlp.ffn, m.embed),
        }
    return shapes


def implementations() -> list[str]:
    """FP8 implementations that can run here."""
    platform = jax.default_backend()
    return [n for n, i in quantized.IMPLEMENTATIONS.items() if not i.refusal(platform)]


def mixers(ctx: Context) -> Iterator[Case]:
    """A Nemotron-H mixer between its projections, by every implementation; Pallas's kernels are
    interpreted in a rehearsal."""
    name, arrays = mixer_inputs(ctx, groups=1)
    for by, mix in implementations_of_mixer().items():
        reference = partial(mixed, ssd.xla.mixer, ctx)
        function = partial(mixed, mix, ctx)
        yield Case(f"{name} by {by}", lambda _, function=function: function, arrays, (0,),
                   reference=reference)  # fmt: skip


def mixer_inputs(ctx: Context, groups: int) -> tuple[str, tuple[np.ndarray, ...]]:
    """(description, input projection and parameters) of some groups of a mixer, initialized as in a
    model."""
    mamba = mixer_row(ctx).model.mamba
    length = mixer_row(ctx).batch.sequence_length
    dims, heads = mixer_dims(ctx), mamba.heads // mamba.groups
    draw = np.random.default_rng(1)
    dt = np.exp(draw.uniform(np.log(1e-3), np.log(1e-1), (groups, heads)))
    parameters = ssd.Parameters(
        taps=draw.uniform(-0.5, 0.5, (groups, 4, dims.channels)),
        bias=draw.uniform(-0.5, 0.5, (groups, dims.channels)),
        dt_bias=dt + np.log(-np.expm1(-dt)),
        a_log=np.log(draw.uniform(1, 16, (groups, heads))),
        d=np.ones((groups, heads)),
        gain=np.ones((groups, dims.inner)),
    )
    name = f"mixer, {length} x {groups} x {heads} x {mamba.head_dim}, state {mamba.state}"
    projected = random(1, length, groups, dims.columns)
    return name, (projected, *(x.astype(np.float32) for x in parameters))


def mixer_row(ctx: Context) -> Run:
    """The row with the mixers."""
    return row("nemotronh_56b_bf16", recipes.SMOKE if ctx.rehearsal else 1)


def mixer_dims(ctx: Context) -> ssd.Dims:
    """Dimensions of a group of heads."""
    model = mixer_row(ctx).model
    mamba = model.mamba
    return ssd.Dims(mamba.heads // mamba.groups, mamba.head_dim, mamba.state, model.norm_eps)


def implementations_of_mixer() -> dict[str, Callable]:
    """Mixers that run here, by name."""
    return {name: entry.mixer for name, entry in ssd.IMPLEMENTATIONS.items()}


def mixed(mix: Callable, ctx: Context, projected: jax.Array, *parameters: jax.Array) -> jax.Array:
    """A mixer's output on the one device of the mesh."""
    local = partial(mix, mixer_dims(ctx))
    return mesh.on_each_device(local, PartitionSpec())(projected, ssd.Parameters(*parameters))


def embedding_and_loss(ctx: Context) -> Iterator[Case]:
    """Embedding and loss of Llama 3.1 8B."""
    model = row("llama31_8b_bf16").model
    tokens, vocabulary = (64, 2048) if ctx.rehearsal else (TOKENS, model.vocabulary)
    ids = np.random.default_rng(0).integers(0, vocabulary, (1, tokens), np.int32)

    def looked_up(table, ids):
        return look_up(table, ids, jnp.bfloat16)

    def mean_loss(hidden, head, ids):
        hidden, head = mesh.gather_seq(hidden), mesh.accumulating(head)
        # Gradients of a mean over tokens would be close to the smallest bf16 numbers.
        return tokens * loss.cross_entropy(hidden, head, ids)

    name = f"embedding, {vocabulary} x {model.embed}"
    yield Case(name, lambda _: looked_up, (random(vocabulary, model.embed), ids), ())
    arrays = random(1, tokens, model.embed), random(model.embed, vocabulary, seed=1, scale=0.02)
    name = f"loss, {tokens} x {model.embed} x {vocabulary}"
    yield Case(name, lambda _: mean_loss, (*arrays, ids), (0, 1))


WIDE_EXPERTS = {
    "grok1_314b_bf16": (
        "model.embed=6144", "model.experts.ffn=2048", f"model.experts.capacity_tokens={TOKENS}",
    ),
    "qwen3_30b_a3b_bf16": ("model.embed=2048", "model.experts.ffn=768"),
}  # fmt: skip
"""Recipes whose experts have a capacity or are dropless, with dimensions for a GPU: Grok-1's are
smaller than published, for the CPU's sake."""


def experts(ctx: Context) -> Iterator[Case]:
    """Routing and experts, with a capacity and dropless."""
    for recipe, wide in WIDE_EXPERTS.items():
        changes = () if ctx.rehearsal else (*wide, f"batch.sequence_length={TOKENS}")
        # A router in bf16 may choose other experts than the reference does.
        run = row(recipe, recipes.SMOKE, "model.experts.router_dtype=fp32", *changes)
        model, tokens = run.model, run.batch.sequence_length

        def mixture(platform, run=run, model=model, tokens=tokens):
            kernel = grouped.choose(run.execution, Task(model, "bf16", tokens, platform))
            ctx = LayerContext(kernels=Kernels(grouped_matmul=kernel))

            def function(x, router, gate_up, down):
                layer = Experts(model, model.experts, key=jax.random.key(0))
                layer.router = nnx.Param(router)
                layer.gate_up, layer.down = Weight(gate_up), Weight(down)
                return compute_weights(layer, x.dtype)(x, ctx)[0]

            return function

        count, embed, ffn = model.experts.count, model.embed, model.experts.ffn
        arrays = (
            random(1, tokens, embed),
            random(embed, count, seed=1, scale=embed**-0.5),
            random(count, embed, 2, ffn, seed=2, scale=embed**-0.5),
            random(count, embed, ffn, seed=3, scale=ffn**-0.5),
        )
        kind = "dropless experts" if model.dropless else "experts"
        name = f"{kind}, {tokens} tokens, {count} of {embed} x {ffn}"
        yield Case(name, mixture, arrays, (0, 2, 3))


GROUPED = {
    "bf16": (jnp.bfloat16, jnp.bfloat16),
    "e4m3": (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
    "e4m3 and e5m2": (jnp.float8_e4m3fn, jnp.float8_e5m2),
}
"""The types of values and of gradients."""


def grouped_matmuls(ctx: Context) -> Iterator[Case]:
    """The three grouped matmuls of each type, with uneven groups, an empty one among them."""
    rows, width, out = (512, 128, 256) if ctx.rehearsal else (2048, 1024, 768)
    counts = np.array([[rows // 2 - 7, 0, rows // 4, rows // 4 + 7]], np.int32)
    arrays = (
        random(rows, width), random(4, width, out, seed=1), random(rows, out, seed=2), counts,
    )  # fmt: skip
    for types, (values, gradients) in GROUPED.items():

        def on(platform, values=values, gradients=gradients):
            by = grouped.IMPLEMENTATIONS["pallas" if platform == "gpu" else "xla"]

            def function(x, w, dy, counts):
                groups = group(counts, rows, rows)
                x, w, dy = x.astype(values), w.astype(values), dy.astype(gradients)
                scales = (jnp.ones(()), jnp.ones(())) if x.itemsize == 1 else None
                dy = jnp.take(dy, groups.row, axis=0, mode="fill", fill_value=0)
                y = by.to_permuted(x, w, groups, scales)
                return y, by.from_permuted(dy, w, groups, scales), by.weights(x, dy, groups, scales)

            return function

        name = f"grouped matmuls, {types}, {rows} rows, 4 of {width} x {out}"
        yield Case(name, on, arrays, (0, 1, 2), jnp.bfloat16, gradients=False)


def cases(ctx: Context) -> Iterator[Case]:
    """All cases, least known kernels first."""
    kinds = (grouped_matmuls, attentions, products, mixers, experts, embedding_and_loss)
    for kind in kinds:
        yield from kind(ctx)


LANES = 4
"""Cases at a time: the references of the CPU take most of the time."""


def check(ctx: Context) -> Iterator[Finding]:
    """Compares every case with the CPU."""
    with ctx.lanes(LANES) as pool:
        yield from pool.map(partial(compared, ctx), cases(ctx))


def compared(ctx: Context, case: Case) -> Finding:
    """A case next to the CPU's."""
    try:
        actual = computed(case, case.on(ctx.mode), ctx.mode, jnp.bfloat16)
        expected = computed(case, case.reference or case.on("cpu"), "cpu", case.exact)
    except Exception as failure:
        reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
        return Finding(case.name, WRONG, reason[:300])
    errors = [error(a, e) for a, e in zip(actual, expected, strict=True)]
    shown = ", ".join(f"{e:.0e}" for e in errors)
    # Not max(errors): it may ignore a NaN.
    verdict = OK if all(e <= case.tolerance for e in errors) else WRONG
    return Finding(case.name, verdict, f"error {np.max(errors):.1e}", f"each: {shown}",
                   {"errors": errors})  # fmt: skip


def complete(case: Case, function: Callable) -> Callable:
    """The function of a case with what it is compared by."""
    return with_gradients(function) if case.gradients else function


def computed(case: Case, function: Callable, platform: str, dtype: Any) -> list[np.ndarray]:
    """Results and gradients of a case on a platform's first device."""
    devices = jax.devices(platform)[:1]
    with jax.set_mesh(mesh.make_mesh((1,) * 6, devices)), jax.default_device(devices[0]):
        compiler_options = dict(flags.TUNED) if platform == "gpu" else {}
        compute = jax.jit(complete(case, function), compiler_options=compiler_options)
        results = compute(*case.inputs(dtype))
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(results)]


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest error, relative to the largest expected value."""
    return float(np.max(np.abs(actual - expected)) / max(np.max(np.abs(expected)), 1e-30))


def compiles(ctx: Context) -> Iterator[Finding]:
    """Compiles every case for an absent GPU."""
    on = mesh.make_mesh((1,) * 6, compile_only_devices(ctx.gpu, 1))
    for case in cases(ctx):
        inputs = jax.eval_shape(partial(case.inputs, jnp.bfloat16))
        with jax.set_mesh(on), attention_for_mesh(), ignoring_pallas_deprecation():
            lowered = jax.jit(complete(case, case.on("gpu"))).lower(*inputs)
            compiled = lowered.compile(flags.TUNED)
        peak = Memory.of(compiled, ctx.gpu).peak / 2**30
        yield Finding(case.name, MEASURED, f"compiled, {peak:.1f} GiB")
