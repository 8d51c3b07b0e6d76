"""Attention against a loop in float64, on every mesh, and who computes it."""

import typing
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import EPS32, MESHES, attention_reference, on, put
from tiny import tiny_run

from jaxbench import mesh
from jaxbench.base.errors import RecipeError
from jaxbench.ops.attention import IMPLEMENTATIONS, attend, choose, cudnn
from jaxbench.ops.implementations import Task
from jaxbench.recipe.settings import Execution

RNG = np.random.default_rng(0)


KINDS: dict[str, dict] = {
    "plain": {},
    "window": {"window": 5},
    "sinks": {"sinks": True},
    "window and sinks": {"window": 5, "sinks": True},
}


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_its_gradient(mesh_name, kind):
    window = KINDS[kind].get("window")
    inputs = [RNG.normal(size=(8, 16, heads, 8)) for heads in (8, 4, 4)]
    cotangent = RNG.normal(size=inputs[0].shape)
    if "sinks" in KINDS[kind]:
        inputs.append(RNG.normal(size=8))

    def attended(q, k, v, sinks=None):
        # As a weight is used: marked so that its gradient stays local.
        sinks = None if sinks is None else mesh.accumulating(sinks)
        return attend(q, k, v, "xla", 8**-0.5, window, sinks)

    def loss(cotangent, *inputs):
        return jnp.sum(attended(*inputs) * cotangent)

    def exact(q, k, v, sinks=None):
        return attention_reference(q, k, v, window, sinks)

    with on(mesh_name):
        dims = "batch seq heads head_dim"
        arrays = [put(x, dims) for x in inputs[:3]]
        arrays += [put(x, "heads", mesh.WEIGHT) for x in inputs[3:]]
        out = jax.jit(attended)(*arrays)
        argnums = range(1, 1 + len(arrays))
        grads = jax.jit(jax.grad(loss, argnums=argnums))(put(cotangent, dims), *arrays)
    # Sums of at most 16 products of numbers around 1, and a softmax: a few dozen roundings.
    np.testing.assert_allclose(out, exact(*inputs), atol=50 * EPS32, rtol=0)
    # The gradient along random directions against central differences of the float64 reference: of
    # all inputs together, and of the sinks alone, which are few.
    step = 1e-5
    moved = [RNG.normal(size=x.shape) for x in inputs]
    alone = [np.zeros(x.shape) for x in inputs[:3]] + [RNG.normal(size=x.shape) for x in inputs[3:]]
    for directions in (moved, alone) if "sinks" in KINDS[kind] else (moved,):
        ends = [
            np.sum(exact(*(x + s * d for x, d in zip(inputs, directions, strict=True))) * cotangent)
            for s in (step, -step)
        ]
        terms = [np.asarray(g, np.float64) * d for g, d in zip(grads, directions, strict=True)]
        along, size = (sum(f(t).sum() for t in terms) for f in (np.asarray, np.abs))
        # One rounding of each term; the differences themselves are exact to 1e-9. A sink's gradient
        # is a sum over 128 queries.
        roundings = 1 if directions is moved else 30
        difference = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(along, difference, atol=roundings * EPS32 * size, rtol=0)


def test_sinks_beside_a_kernel_without_them():
    """What `cudnn` computes from its kernels' output and softmax statistics, with kernels in
    float64: the backward kernel takes the results that the sinks have changed for its own."""
    q, k, v = (RNG.normal(size=(2, 16, 4, 8)) for _ in range(3))
    sinks, d_out = RNG.normal(size=4), RNG.normal(size=q.shape)
    visible = np.tril(np.ones((16, 16))) * (1 - np.tril(np.ones((16, 16)), -5))

    def weights(statistics):
        score = jnp.where(visible, jnp.einsum("BSNH,BTNH->BNST", q, k) * 8**-0.5, -jnp.inf)
        score = (
            score - (jax.nn.logsumexp(score, -1) if statistics is None else statistics)[..., None]
        )
        return jnp.exp(score)

    def gradients(out, statistics, d_out):
        p = weights(statistics)
        d_p = jnp.einsum("BSNH,BTNH->BNST", d_out, v)
        d_score = p * (d_p - jnp.sum(out * d_out, -1).swapaxes(1, 2)[..., None]) * 8**-0.5
        return (
            jnp.einsum("BNST,BTNH->BSNH", d_score, k),
            jnp.einsum("BNST,BSNH->BTNH", d_score, q),
            jnp.einsum("BNST,BSNH->BTNH", p, d_out),
        )

    def exact(q, k, v, sinks):
        score = jnp.where(visible, jnp.einsum("BSNH,BTNH->BNST", q, k) * 8**-0.5, -jnp.inf)
        sink = jnp.broadcast_to(sinks[:, None, None], (*score.shape[:3], 1))
        p = jax.nn.softmax(jnp.concatenate([score, sink], -1))[..., :-1]
        return jnp.einsum("BNST,BTNH->BSNH", p, v)

    with jax.enable_x64(True):
        q, k, v, sinks, d_out = map(jnp.asarray, (q, k, v, sinks, d_out))
        score = jnp.where(visible, jnp.einsum("BSNH,BTNH->BNST", q, k) * 8**-0.5, -jnp.inf)
        plain = jnp.einsum("BNST,BTNH->BSNH", weights(None), v)
        out, statistics = cudnn.add_sinks(plain, jax.nn.logsumexp(score, -1), sinks)
        expected, pull = jax.vjp(exact, q, k, v, sinks)
        d_sinks = cudnn.gradient_of_sinks(out, statistics, sinks, d_out)
        actual = *gradients(out, statistics, d_out), d_sinks
        # Some steps are in fp32: one rounding of numbers around 1, and of sums over 32 queries.
        np.testing.assert_allclose(out, expected, atol=4 * EPS32)
        for gradient, reference in zip(actual, pull(d_out), strict=True):
            np.testing.assert_allclose(gradient, reference, atol=100 * EPS32)


def test_bf16_attention_rounds_no_more_than_its_dtype():
    q, k, v = (
        np.asarray(jnp.asarray(RNG.normal(size=(2, 16, h, 8)), jnp.bfloat16)) for h in (4, 2, 2)
    )
    with on("one device"):
        operands = (jnp.asarray(x) for x in (q, k, v))
        out = attend(*operands, kernel="xla", scale=8**-0.5)
    exact = attention_reference(*(x.astype(np.float64) for x in (q, k, v)))
    # Weights and result are rounded to 8 bits each; scores and sums are fp32.
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=3 * 2**-8 * np.abs(v).max())


def test_every_kernel_has_a_name_that_a_recipe_can_ask_for():
    hints = typing.get_type_hints(Execution)
    assert set(IMPLEMENTATIONS) == set(typing.get_args(hints["attention"])) - {"auto"}


@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 192), (192, 128), (160, 136), (136, 64)])
def test_attention_by_parts_of_the_values(key_dim, value_dim):
    """By the plain kernel, against the same in one call. Values are exact; the other gradients are
    sums over parts, each of which the kernel's softmax rounds to fp32. With 60 seeds the largest
    error is 3.5 roundings of the largest gradient."""
    shapes = (2, 16, 4, key_dim), (2, 16, 2, key_dim), (2, 16, 2, value_dim)
    scale, widths = key_dim**-0.5, set()

    def in_one(q, k, v, sinks):
        widths.add((q.shape[-1], v.shape[-1]))
        return IMPLEMENTATIONS["xla"].call(q, k, v, scale, 5, sinks)

    def in_parts(q, k, v, sinks):
        return cudnn.by_parts(lambda q, k, v: in_one(q, k, v, sinks), q, k, v)

    with jax.enable_x64(True):
        operands = [jnp.asarray(RNG.normal(size=shape)) for shape in (*shapes, (4,))]
        d_out = jnp.asarray(RNG.normal(size=(2, 16, 4, value_dim)))
        (actual, pull), (expected, exact) = (jax.vjp(f, *operands) for f in (in_parts, in_one))
        np.testing.assert_allclose(actual, expected, atol=1e-13)
        for gradient, reference in zip(pull(d_out), exact(d_out), strict=True):
            rounding = EPS32 * np.abs(reference).max()
            np.testing.assert_allclose(gradient, reference, rtol=0, atol=8 * rounding)
    assert widths == {(192, 128), (key_dim, value_dim)}


@pytest.mark.parametrize(
    ("capability", "widths", "message"),
    [
        ((8, 0), (128, 128), None),
        ((8, 0), (192, 192), "up to 128 on compute capability 8.0"),
        ((8, 0), (128, 64), "takes one width on compute capability 8.0"),
        ((9, 0), (256, 256), None),
        ((9, 0), (192, 128), None),
        ((10, 0), (192, 192), None),
        ((10, 3), (192, 128), None),
        ((10, 3), (200, 128), "up to 192 on compute capability 10.3"),
        ((10, 0), (256, 256), "up to 192 on compute capability 10.0"),
        ((12, 0), (192, 128), "up to 128 on compute capability 12.0"),
        (None, (256, 256), None),
    ],
)
def test_head_dims_are_refused_by_compute_capability(capability, widths, message):
    """What cuDNN 9.28 says, forward and backward (`benchmarks/cudnn_support.py`)."""
    key_dim, value_dim = widths
    rope = "rope: {base: 10000}"
    latent = f"head_dim: {key_dim - 64}, rope_dim: 64, value_dim: {value_dim}, {rope}"
    run = tiny_run(
        "model.attention=null",
        f"model.latent_attention={{heads: 4, query_latent: 32, kv_latent: 32, {latent}}}",
        "model.pattern=L-",
    )
    arguments = run.execution, Task(run.model, "bf16", 32, "gpu", capability)
    if message is None:
        assert choose(*arguments) == "cudnn"
    else:
        with pytest.raises(RecipeError, match=f"{message}; use execution.attention=xla"):
            choose(*arguments)


def test_the_mesh_knows_the_compute_capability_of_its_gpus(monkeypatch):
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA GB300 (null)")
    monkeypatch.setattr(
        jax.sharding, "get_abstract_mesh", lambda: SimpleNamespace(abstract_device=device)
    )
    assert mesh.capability() == (10, 3)
    device.device_kind = "NVIDIA L40S"
    assert mesh.capability() is None
    here = SimpleNamespace(device_kind="NVIDIA L40S", compute_capability="8.9")
    monkeypatch.setattr(jax, "local_devices", lambda: [here])
    assert mesh.capability() == (8, 9)
    device.platform = "cpu"
    assert mesh.capability() is None


def test_fp32_takes_the_plain_kernel():
    run = tiny_run("precision.dtype=fp32")
    assert choose(run.execution, Task(run.model, "fp32", 32, "gpu")) == "xla"
    assert choose(run.execution, Task(run.model, "bf16", 32, "gpu")) == "cudnn"


@pytest.mark.parametrize(
    ("changes", "platform", "message"),
    [
        ("execution.attention=cudnn", "cpu", "attention = cudnn does not run on a cpu"),
        (
            "execution.attention=cudnn precision.dtype=fp32",
            "gpu",
            "attention = cudnn computes no fp32 attention; expected auto$",
        ),
        (
            "model.attention.head_dim=100",
            "gpu",
            "heads of 100 features: cuDNN attention takes multiples of 8",
        ),
        ("model.attention.head_dim=264", "gpu", "up to 256; use execution.attention=xla"),
        ("batch.sequence_length=33", "gpu", "takes even lengths"),
    ],
)
def test_what_no_kernel_can_do_is_a_mistake(changes, platform, message):
    run = tiny_run("precision.dtype=bf16", *changes.split())
    task = Task(run.model, run.precision.dtype, run.batch.sequence_length, platform)
    with pytest.raises(RecipeError, match=message):
        choose(run.execution, task)
