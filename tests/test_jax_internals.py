"""What `jax_internals` assumes of JAX, on the version that is installed."""

import ast
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import jaxbench
from jaxbench import jax_internals
from jaxbench.ops.attention import cudnn


def test_no_other_module_uses_internals_of_jax():
    package = Path(jaxbench.__file__).parent
    for path in set(package.rglob("*.py")) - {Path(jax_internals.__file__)}:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.startswith(("jax._src", "unittest"))], path


def test_a_single_process_has_no_coordination_client():
    assert jax_internals.coordination_client() is None


@pytest.mark.parametrize("call", ["key_value_set", "blocking_key_value_get", "wait_at_barrier"])
def test_the_client_has_the_calls_that_are_used(call):
    from jax._src.lib import _jax

    assert hasattr(_jax.DistributedRuntimeClient, call)


def test_residuals_leave_out_arguments_and_restore_a_vjp():
    def function(x, w):
        return jnp.sin(x @ w)

    x, w = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 4)
    y, vjp = jax.vjp(function, x, w)
    saved = jax_internals.residuals(vjp)
    assert [r.shape for r in saved] == [y.shape]  # the cosine; neither x nor w
    like = jax.eval_shape(lambda x, w: jax.vjp(function, x, w)[1], x, w)
    restored = jax_internals.restore_vjp(like, saved, [x, w])
    for gradient, exact in zip(restored(y), vjp(y), strict=True):
        np.testing.assert_array_equal(gradient, exact)


def test_what_a_program_does_not_use_is_not_computed():
    """The forward pass and the recomputation of a layer use one result each."""

    def compute(parts, x):
        return tuple(f(x) for f, part in zip((jnp.sin, jnp.cos), parts, strict=True) if part)

    @jax.custom_vjp
    def sine(x):
        return forward(x)[0]

    def forward(x):
        return jax_internals.if_used(compute, 2, x)

    sine.defvjp(forward, lambda cosine, dy: (cosine * dy,))
    x = jnp.arange(3.0)
    value = jax.jit(jax.value_and_grad(lambda x: jnp.sum(jax.checkpoint(sine)(x))))
    for got, want in zip(value(x), (np.sin(x).sum(), np.cos(x)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    computed = re.findall(r"wanted=\((.*?)\)", str(value.trace(x).jaxpr))
    assert sorted(computed) == ["False, True", "True, False"]


def test_jax_asks_for_the_compute_capability_by_the_name_that_is_replaced():
    from jax._src.cudnn import fused_attention_stablehlo as attention

    assert list(inspect.signature(attention.check_compute_capability).parameters) == ["capability"]
    assert "check_compute_capability(" in inspect.getsource(attention)
    primitives = [p.name for p in vars(attention).values() if isinstance(p, Primitive)]
    assert cudnn.FORWARD_PRIMITIVE in primitives


def test_attention_calls_the_primitives_as_jax_does(monkeypatch):
    """The same operands and parameters as in the forward and backward pass of JAX's own."""
    from jax._src.cudnn import fused_attention_stablehlo as attention

    monkeypatch.setattr(attention, "check_cudnn_version", lambda: 91002)
    monkeypatch.setattr(attention, "check_compute_capability", lambda capability: True)
    shapes = [jax.ShapeDtypeStruct((2, 16, heads, 8), jnp.bfloat16) for heads in (4, 2, 2, 4)]

    def ours(query, key, value, d_out):
        operands = query, key, value
        results = jax_internals.cudnn_attention_forward(*operands, 0.5, 5)
        return jax_internals.cudnn_attention_backward(operands, results, d_out, 0.5, 5)

    def jax_own(query, key, value, d_out):
        def attend(*operands):
            return jax_internals.cudnn_attention(*operands, scale=0.5, window=5)

        return jax.vjp(attend, query, key, value)[1](d_out)

    def calls(function):
        jaxpr = jax.make_jaxpr(function)(*shapes)
        found = [e for e in jaxpr.eqns if e.primitive.name.startswith("dot_product_attention")]
        return [
            (e.primitive.name, e.params, [(v.aval.shape, v.aval.dtype) for v in e.invars])
            for e in found
        ]

    assert calls(ours) == calls(jax_own)
    assert len(calls(ours)) == 2
    assert calls(ours)[0][0] == cudnn.FORWARD_PRIMITIVE


def test_a_replaced_function_comes_back():
    empty = jnp.empty
    with jax_internals.empty_arrays_from(jnp.ones(2)):
        assert jnp.empty((0, 3), jnp.int8).shape == (0, 3)
        assert jnp.empty(2).shape == (2,)
    assert jnp.empty is empty
    with pytest.raises(TypeError), jax_internals.empty_arrays_from(jnp.ones(2)):
        jnp.empty("two")
    assert jnp.empty is empty


def test_compilations_are_timed():
    seconds = jax_internals.compilations()
    double = jax.jit(lambda x: 2 * x)
    double(1.0), double(2.0)
    assert len(seconds) == 1
    assert seconds[0] > 0


def test_a_profile_has_the_instructions_on_the_first_gpu(tmp_path):
    line = """lines { name: "%s" events {
        metadata_id: 1 duration_ps: 5000 stats { metadata_id: 1 str_value: "%s" } } }"""
    plane = """planes { name: "/device:GPU:%d" %s event_metadata { key: 1 value { name: "kernel" } }
        stat_metadata { key: 1 value { name: "hlo_op" } } }"""
    first = line % ("Steps", "step") + line % ("Stream #7", "dot.1")
    space = plane % (1, line % ("Stream #7", "other")) + plane % (0, first)
    profile = jax.profiler.ProfileData.text_proto_to_serialized_xspace(space)
    (tmp_path / "made.xplane.pb").write_bytes(profile)
    (event,) = jax_internals.profile_events(tmp_path)
    assert (event.name, event.duration_ns) == ("kernel", 5)
    assert jax_internals.profiled_instruction(event) == "dot.1"
