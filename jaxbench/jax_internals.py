"""Everything that this package uses of JAX beyond its public API, each with its reason.

No other module imports `jax._src` or replaces a function of a library.
`tests/test_jax_internals.py` checks each use on every tested version of JAX.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax._src import distributed, xla_bridge
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.pallas.triton import lowering as triton_lowering
from jax.extend.core import JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import mlir, partial_eval
from jaxlib.triton import dialect as triton

READS_HOST = jaxlib.version.__version_info__ >= (0, 11, 2)
"""False for compilers for GPUs with a bug: in a loop that goes backwards they read a stack in host
memory at wrong places (openxla/xla issue 46231)."""

KEEPS_AUTOTUNING = jax.__version_info__ >= (0, 11, 2)
"""False for versions of JAX that hash the folder of XLA's autotuning results into the key of a
cached program (`jax._src.cache_key`); 0.10.2 does. Each process has its own path to that folder."""


def coordination_client() -> Any:
    """The client of JAX's coordination service; None in a job of one process.

    Processes exchange small values over it without a device. Public JAX only has barriers and
    gathers on devices (`jax.experimental.multihost_utils`), which wait for the queued steps.
    """
    return distributed.global_state.client


def coordinator() -> str:
    """The host of JAX's coordination service, as a name or an address that every process of the job
    has reached. In a job of one process it is this host. Public JAX does not tell us which host
    Slurm gave it."""
    address = distributed.global_state.coordinator_address or "localhost:0"
    return address.rpartition(":")[0].strip("[]")


def taken_gpus() -> str:
    """The numbers of the GPUs that JAX takes, among the GPUs that CUDA shows to this process; or
    `all`. `jax.distributed.initialize` sets them."""
    return xla_bridge.CUDA_VISIBLE_DEVICES.value


def kernel_names(program: jax.stages.Compiled) -> Iterator[tuple[str, ...]]:
    """The names of each custom call and asynchronous start in a compiled program: its own name, and
    for an `async-start` also the name of the instruction that it wraps.

    `as_text` prints a start and what it wraps as one `reduce-scatter-start`, without the name of
    the wrapped instruction.
    """
    executable: Any = program.runtime_executable()
    for module in executable.hlo_modules():
        for computation in module.computations():
            for i in computation.instructions():
                opcode = i.opcode.name
                if opcode == "kAsyncStart":
                    yield i.name, i.async_wrapped_root().name
                elif opcode.endswith("Start") or (
                    # An allocation runs no kernel.
                    opcode == "kCustomCall" and 'target="AllocateBuffer"' not in i.to_string()
                ):
                    yield (i.name,)


def profile_events(folder: Path, fallback: bool = True) -> Iterator[Any]:
    """The events on the streams of the first GPU in the last JAX profile in a folder. If the
    profile has no GPU, `fallback` yields all events instead.

    Public JAX reads a profile, but does not document the names in it. Raises OSError for a file
    that is cut off or is no profile.
    """
    for path in sorted(folder.glob("**/*.xplane.pb"))[-1:]:
        try:
            planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
        except RuntimeError as error:
            raise OSError(f"{path}: cut off, or no profile of JAX: {error}") from error
        gpus = sorted((p for p in planes if p.name.startswith("/device:GPU")), key=lambda p: p.name)
        for plane in gpus[:1] or (planes if fallback else ()):
            for line in plane.lines:
                if not gpus or line.name.startswith("Stream"):
                    yield from line.events


def profiled_instruction(event: Any) -> str:
    """The instruction of a compiled program that launched an event of a profile; empty if the
    profile does not name one."""
    with warnings.catch_warnings():
        # Python 3.12 warns about a type of jaxlib; if warnings are errors, that ends the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        return str(dict(event.stats).get("hlo_op", ""))


def residuals(vjp: Any) -> list:
    """The residuals of a `jax.vjp` without the arguments of its function: arrays or their types.

    JAX keeps the two apart (`VJP.args_res`), so a stash does not have to hold weights. Public JAX
    only has all of them together, as the leaves of the pytree that `jax.vjp` returns.
    """
    return jax.tree.leaves(replace(vjp, args_res=[]))


def restore_vjp(vjp: Any, saved: Sequence, arguments: list) -> Any:
    """A copy of a `jax.vjp` with other residuals and arguments. `saved` are `residuals`, and
    `arguments` are leaves."""
    structure = jax.tree.structure(replace(vjp, args_res=[]))
    return replace(jax.tree.unflatten(structure, saved), args_res=arguments)


def cudnn_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, scale: float, window: int | None
) -> jax.Array:
    """Causal attention by cuDNN, `B S N H`. With a `window` a query sees at most that many
    positions.

    `jax.nn.dot_product_attention` refuses values that are narrower than keys, although cuDNN has
    taken them since 9.10.
    """
    return fused_attention_stablehlo.dot_product_attention(
        query, key, value, scale=scale, mask_type=fused_attention_stablehlo.MaskType.CAUSAL,
        sliding_window_length=window,
    )  # fmt: skip


def cudnn_attention_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, scale: float, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """The results of cuDNN's forward kernel: the result of `cudnn_attention`, and the logarithm of
    each softmax's denominator, `B N S`.

    Public JAX returns these too, but it drops the gradient of the second. In a `jax.custom_vjp` it
    also hides the primitive whose results a remat policy saves.
    """
    operands = query, key, value
    jax.eval_shape(partial(cudnn_attention, scale=scale, window=window), *operands)  # its checks
    out, statistics = fused_attention_stablehlo._dot_product_attention_fwd_p_wrapper.bind(
        *operands, *_unused(query), **_attention_options(scale, window), is_training=True
    )
    return out, statistics


def cudnn_attention_backward(
    operands: tuple[jax.Array, jax.Array, jax.Array],
    results: tuple[jax.Array, jax.Array],
    d_out: jax.Array,
    scale: float,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value by cuDNN's backward kernel. `results` are the results
    of the forward kernel.

    The kernel recomputes softmax weights as exp(score - log denominator). If the denominators and
    the output come from a softmax with an additional term, such as an attention sink, the gradients
    are exactly the gradients of that softmax. Public JAX can only pass the forward kernel's own
    results.
    """
    out, statistics = results
    query, key, value = fused_attention_stablehlo._dot_product_attention_bwd_p_wrapper.bind(
        *operands, *_unused(d_out), statistics, out, d_out, **_attention_options(scale, window)
    )
    return query, key, value


def block_scaled_product(emulated: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Makes a matmul of block-scaled operands for kernels of Pallas's Triton backend. It adds `[m,
    k]` times the transpose of `[n, k]` to an fp32 `[m, n]`; each operand comes with the scales of
    its rows.

    Values are e4m3, or bytes that hold pairs of e2m1. Scales are the bytes of e8m0, or e4m3.
    `emulated` computes the same elsewhere, such as in Pallas's interpreter.

    Triton has the operation (`tt.dot_scaled`; Blackwell's `tcgen05.mma` with scales of blocks), but
    Pallas has no function for it.
    """
    primitive = Primitive("block_scaled_product")
    primitive.def_abstract_eval(lambda total, *operands: total)
    mlir.register_lowering(primitive, mlir.lower_fun(emulated, multiple_results=False))

    @triton_lowering.register_lowering(primitive)
    def lower(context, total, a, b, scales_a, scales_b):
        pairs = context.avals_in[1].dtype == jnp.uint8
        kind = triton.ScaleDotElemType.E2M1 if pairs else triton.ScaleDotElemType.E4M3
        return triton.dot_scaled(
            total.type, a, triton.trans(b, (1, 0)), total, kind, kind, False,
            a_scale=scales_a, b_scale=scales_b, lhs_k_pack=True, rhs_k_pack=True,
        )  # fmt: skip

    return primitive.bind


def fp8_product(emulated: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Makes an FP8 matmul for kernels of Pallas's Triton backend. It adds `[m, k]` times `[k, n]`,
    each in an FP8 type, to an fp32 `[m, n]`. `emulated` computes the same elsewhere, such as in
    Pallas's interpreter.

    Hopper's tensor cores sum FP8 matmuls in about 14 bits. Pallas asks Triton for more precision.
    Triton then multiplies in fp16 on the tensor cores of Ampere, at a quarter of the rate. Here we
    take the sums of the hardware, as cuBLASLt's matmuls do.
    """
    primitive = Primitive("fp8_product")
    primitive.def_abstract_eval(lambda total, *operands: total)
    mlir.register_lowering(primitive, mlir.lower_fun(emulated, multiple_results=False))

    @triton_lowering.register_lowering(primitive)
    def lower(context, total, a, b):
        return triton.dot(a, b, total, max_num_imprecise_acc=2**30)

    return primitive.bind


def if_used(compute: Callable[..., tuple], count: int, *operands: Any) -> tuple:
    """The results of `compute`, of which only those are computed that the program uses.

    `compute(wanted, *operands)` has a bool in `wanted` for each of the `count` results. It returns
    those that are wanted, each a pytree of arrays. All arrays that it reads are `operands`. Where
    JAX removes dead code, which `jax.checkpoint` does in the forward pass and in the recomputation,
    `compute` is traced again for the results that are left. It cannot be differentiated or batched,
    so it belongs into a rule of a `jax.custom_vjp`.

    Public JAX has no such function since `jax.experimental.custom_dce` was removed.
    """
    leaves, structure = jax.tree.flatten(operands)
    types = [jax.typeof(leaf) for leaf in leaves]

    def trace(wanted: tuple[bool, ...]) -> Any:
        def run(*leaves):
            return compute(wanted, *jax.tree.unflatten(structure, leaves))

        jaxpr, results = jax.make_jaxpr(run, return_shape=True)(*types)
        assert not any(isinstance(array, jax.core.Tracer) for array in jaxpr.consts)
        return jaxpr, results

    wanted = (True,) * count
    jaxpr, results = trace(wanted)
    parts = tuple(len(jax.tree.leaves(result)) for result in results)
    arrays = _if_used.bind(*leaves, jaxpr=jaxpr, wanted=wanted, parts=parts, trace=trace)
    return jax.tree.unflatten(jax.tree.structure(results), arrays)


def _run(*leaves, jaxpr, **_):
    return jaxpr_as_fun(jaxpr)(*leaves)


def _without_unused(used: list[bool], *rest: Any) -> tuple[list[bool], JaxprEqn | None]:
    """JAX's rule for dead code: (which operands are read, the call without unused results).

    The call comes last. From jax 0.12 on it comes after a list of references that are read later.
    """
    call: JaxprEqn = rest[-1]
    leaves = iter(zip(call.outvars, used, strict=True))
    results = [[next(leaves) for _ in range(part)] for part in call.params["parts"]]
    kept = [any(use for _, use in result) for result in results]
    if not any(kept):
        return [False] * len(call.invars), None
    every = [True] * len(call.invars)
    if all(kept):
        return every, call
    still = iter(kept)
    wanted = tuple(before and next(still) for before in call.params["wanted"])
    results = [result for result, keep in zip(results, kept, strict=True) if keep]
    jaxpr, _ = call.params["trace"](wanted)
    parts = tuple(map(len, results))
    params = call.params | {"jaxpr": jaxpr, "wanted": wanted, "parts": parts}
    return every, call.replace(outvars=[v for r in results for v, _ in r], params=params)


_if_used = Primitive("if_used")
_if_used.multiple_results = True
_if_used.def_impl(_run)
_if_used.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
mlir.register_lowering(_if_used, mlir.lower_fun(_run, multiple_results=True))
partial_eval.dce_rules[_if_used] = _without_unused


def _unused(x: jax.Array) -> list[jax.Array]:
    """The bias, lengths, offsets and pages in the form that JAX passes when they are absent."""
    return 7 * [jnp.zeros(0, x.dtype)]


def _attention_options(scale: float, window: int | None) -> dict[str, Any]:
    """Parameters of both primitives. `score_mod` is a parameter from jax 0.12 on."""
    module = fused_attention_stablehlo
    options = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": module.MaskType.CAUSAL,
        "layout": module.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
    }
    known = inspect.signature(module._dot_product_attention).parameters
    return options | ({"score_mod": None} if "score_mod" in known else {})


def _offsets(block_info: Any, indexer: Any) -> Any:
    """Offsets of elements in an array, inside a kernel of Pallas's Triton backend.

    JAX computes them as signed 32-bit numbers, unless the array has more than 2^32 bytes. They
    count elements. If an array has one byte per element, its offsets beyond 2^31 would therefore
    lie before the array. We tell JAX that such an array has 4 bytes per element; nothing else in
    the function reads that.
    """
    of = block_info.full_shape_dtype
    if math.prod(of.shape) > 2**31:
        of = jax.ShapeDtypeStruct(of.shape, jnp.int32)
    return _jax_offsets(replace(block_info, full_shape_dtype=of), indexer)


_lowering: Any = triton_lowering
_jax_offsets = _lowering._compute_offsets_from_indices
_lowering._compute_offsets_from_indices = _offsets


@contextmanager
def attention_for_mesh() -> Iterator[None]:
    """Makes JAX check cuDNN attention for the GPUs of the current mesh while a program is traced.

    JAX allows head dims above 128 only from Hopper on, and it asks this machine's own GPU for its
    compute capability. A machine that compiles for absent GPUs has none. The check itself stays.
    This function is superfluous once JAX asks the mesh.
    """
    devices = jax.sharding.get_mesh().devices

    def numbers(capability: str) -> tuple[int, ...]:
        return tuple(map(int, capability.split(".")))

    def check(least: str) -> bool:
        return numbers(devices.flat[0].compute_capability) >= numbers(least)

    with replaced(fused_attention_stablehlo, "check_compute_capability", check):
        yield


@contextmanager
def empty_arrays_from(x: jax.Array) -> Iterator[None]:
    """While Transformer Engine is traced, makes `jnp.empty` of no elements a slice of `x`.

    Transformer Engine passes such arrays to its kernels. As constants they are moved out of a
    `shard_map` when a scan around it is differentiated, and the partitioner of jax 0.11 crashes on
    them.
    """
    empty = jnp.empty

    def sliced(shape: Any, dtype: Any = None, **options: Any) -> jax.Array:
        if 0 in np.atleast_1d(shape):
            return x.ravel()[:0].astype(dtype).reshape(shape)
        return empty(shape, dtype, **options)

    with replaced(jnp, "empty", sliced):
        yield


@contextmanager
def replaced(module: Any, name: str, function: Callable) -> Iterator[None]:
    """Replaces a function of a module inside the `with` block."""
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


def compilations() -> list[float]:
    """A list that collects the seconds of each later compilation of this process. JAX does not
    document the name of the event."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds
