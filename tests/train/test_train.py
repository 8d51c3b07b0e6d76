"""The train step: accumulation, rounding, AdamW in numpy, schedules, tokens, and all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import tiered
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from steps import MESHES, assert_same, new_state, same_sequences
from tiny import FAMILIES, mesh_of, tiny_run, to_numpy

from jaxbench.models.layers import Vector
from jaxbench.ops.dense import is_variable
from jaxbench.recipe import flops, recipes
from jaxbench.recipe.settings import AXES
from jaxbench.train.optimizer import learning_rate
from jaxbench.train.program_checks import describe_kernels
from jaxbench.train.step import (
    abstract_state,
    gradients,
    init_state,
    make_program,
    synthetic_batch,
    train_step,
    zipf_batch,
)


@pytest.mark.parametrize(
    "case",
    tiered(
        [("one device", "query")],
        [("one device", "query"), *(("data 2 x fsdp 2 x tensor 2", r) for r in ("query", "none"))],
    ),
    ids=", ".join,
)
def test_accumulation_changes_neither_loss_nor_gradients(case):
    mesh, remat = case
    devices = 8 if mesh in MESHES else 1
    overrides = *MESHES.get(mesh, ()), f"execution.remat={remat}"
    whole = tiny_run(*overrides, "batch.global_batch=16", devices=devices)
    parts = tiny_run(*overrides, "batch.global_batch=16", "batch.microbatch=1", devices=devices)
    assert (whole.accumulation, parts.accumulation) == (1, 16 // parts.batch_ranks)
    # The same sequences in both, though in another order: tokens are drawn for the whole step.
    (loss, grads), (parts_loss, parts_grads) = (same_sequences(run) for run in (whole, parts))
    assert_same((parts_loss, parts_grads), (loss, grads), roundings=200)


@pytest.mark.parametrize(
    "mesh", tiered([], ["one device", "data 2", "pipeline 2"], slow=["data 2"])
)
def test_sums_and_reductions_in_bf16_stay_near_fp32(mesh):
    plain = tiny_run("batch.microbatch=2", "execution.remat=attention")
    changed = tiny_run(
        "batch.microbatch=2", "execution.remat=attention", "precision.accumulate=bf16",
        f"parallelism.pipeline={2 if 'pipeline' in mesh else 1}",
        devices=1 if mesh == "one device" else 2,
    )  # fmt: skip
    assert (changed.mesh_text(), changed.accumulation > 1) == (mesh, True)
    fp32, bf16 = map(same_sequences, (plain, changed))
    for name, exact in fp32[1].items():
        # Four additions, each rounded to 8 bits; or two sums and theirs.
        np.testing.assert_allclose(
            bf16[1][name], exact, atol=4 * 2**-8 * np.abs(exact).max(), rtol=0, err_msg=name
        )
    assert any(np.any(bf16[1][name] != exact) for name, exact in fp32[1].items())


def numpy_adamw(run, all_grads, parameters, decayed):
    """AdamW with clipping by the textbook (Loshchilov and Hutter 2019), in float64."""
    m = {k: np.zeros_like(p) for k, p in parameters.items()}
    v = {k: np.zeros_like(p) for k, p in parameters.items()}
    cfg = run.optimizer
    for t, grads in enumerate(all_grads):
        norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
        lr = float(learning_rate(cfg, run.steps)(t))
        for k, g in grads.items():
            g = g * min(1.0, 1.0 / norm)
            m[k] = 0.9 * m[k] + 0.1 * g
            v[k] = 0.95 * v[k] + 0.05 * g**2
            m_hat, v_hat = m[k] / (1 - 0.9 ** (t + 1)), v[k] / (1 - 0.95 ** (t + 1))
            decay = cfg.weight_decay * parameters[k] if decayed[k] else 0.0
            parameters[k] = parameters[k] - lr * (m_hat / (np.sqrt(v_hat) + cfg.eps) + decay)
    return parameters


@pytest.mark.parametrize(
    ("decay_vectors", "moments"),
    [
        (False, "fp32"),
        pytest.param(True, "fp32", marks=pytest.mark.nightly),
        pytest.param(False, "bf16", marks=pytest.mark.slow),
    ],
)
def test_three_steps_of_adamw(decay_vectors, moments):
    run = tiny_run(
        f"optimizer.decay_vectors={decay_vectors}",
        "optimizer.weight_decay=0.2",
        f"optimizer.moments={moments}",
        "optimizer.learning_rate=0.01",
        "optimizer.warmup=0",
    )
    with mesh_of(run):
        program = make_program(run)
        state = new_state(run)
        start, all_grads = to_numpy(state.model), []
        decayed = {
            jax.tree_util.keystr(path): decay_vectors or not isinstance(v, Vector)
            for path, v in jax.tree_util.tree_flatten_with_path(
                state.model, is_leaf=lambda x: isinstance(x, nnx.Variable)
            )[0]
        }
        shape = (1, run.batch.global_batch, run.batch.sequence_length)
        gradients_of = jax.jit(gradients, static_argnums=3)
        for step in range(3):
            batch = synthetic_batch(run.seed, jnp.int32(step), shape, run.model.vocabulary)
            all_grads.append(to_numpy(gradients_of(state, *batch, run).gradients))
            state, figures = program(state)
            norm = np.sqrt(sum(np.sum(g**2) for g in all_grads[-1].values()))
            assert float(figures["grad_norm"]) == pytest.approx(norm, rel=1e-5)
        assert int(state.step) == 3
        end = to_numpy(state.model)
    keys = {name: name.rsplit(".value", 1)[0] for name in start}
    decayed = {name: decayed[keys[name]] for name in start}
    expected = numpy_adamw(run, all_grads, dict(start), decayed)
    for name, exact in expected.items():
        # Adam divides a gradient by its own size: what is rounded off one that is much smaller than
        # the largest, by some eps of that, moves the weight by as much of the learning rate.
        rounding = 10 * np.finfo(np.float32).eps * max(np.abs(g[name]).max() for g in all_grads)
        relative = rounding / (np.min([np.abs(g[name]) for g in all_grads], axis=0) + rounding)
        error = np.abs(end[name] - exact)
        if moments == "bf16":  # three ratios of a moment and the root of one, each off by 2^-9
            relative += 1.5 * 2**-9
        assert np.all(error <= 1e-6 + 3 * run.optimizer.learning_rate * relative), name
        assert np.abs(end[name] - start[name]).max() > 1e-3


def losses_on_one_batch(run, steps):
    """Losses of some steps on random targets, which no model without gradients could guess."""
    shape = 2, run.accumulation, run.batch.global_batch, run.batch.sequence_length
    batch = np.random.default_rng(0).integers(0, run.model.vocabulary, size=shape, dtype=np.int32)
    with mesh_of(run):
        state, step = new_state(run), jax.jit(train_step, static_argnums=3)
        losses = []
        for _ in range(steps):
            state, figures = step(state, *map(jnp.asarray, batch), run)
            losses.append(float(figures["loss"]))
        return losses


def tiny_losses(family, dtype, *overrides):
    """Losses of 25 steps of a tiny model."""
    few = ("model.layers=3", "model.pattern=M*-") if family.startswith("nemotronh") else ()
    run = tiny_run(
        *few, *overrides, f"precision.dtype={dtype}", "precision.amax_history=4",
        "execution.remat=full",
        "batch.global_batch=2", "optimizer.learning_rate=1e-2", "optimizer.warmup=0",
        "optimizer.final_learning_rate=1e-2", "model.init_std=0.05", family=family,
    )  # fmt: skip
    with mesh_of(run):
        emulated = "bf16" if dtype == "fp8" else "fp32"
        expected = dtype if dtype == "bf16" else f"{dtype}, emulated in {emulated}"
        assert describe_kernels(run)["products"] == expected
    return losses_on_one_batch(run, steps=25)


@pytest.mark.parametrize(
    "family",
    tiered(["llama31_8b_bf16"], FAMILIES, ["qwen3_30b_a3b_bf16"]),
)
def test_every_family_learns_one_batch_by_heart_in_bf16_and_fp8(family):
    curves = {dtype: tiny_losses(family, dtype) for dtype in ("bf16", "fp8")}
    for losses in curves.values():
        assert losses[0] == pytest.approx(np.log(64), abs=0.3)
        assert losses[-1] < 0.1 * np.log(64)
    # Rounding errors of 2^-4 are independent, and average out over 64 tokens and 64 columns.
    assert curves["fp8"][0] == pytest.approx(curves["bf16"][0], abs=0.05)
    assert curves["fp8"] != curves["bf16"]


BLOCKS = {
    "llama31_8b_bf16": ("model.mlp.ffn=128",),
    "grok1_314b_bf16": ("model.experts.ffn=64", "model.experts.capacity_tokens=16"),
    "nemotron4_340b_bf16": ("model.mlp.ffn=128",),
    "nemotronh_56b_bf16": ("model.mlp.ffn=128", "model.mamba={heads: 32, head_dim: 4, state: 8}"),
    "qwen3_30b_a3b_bf16": ("model.experts.ffn=64",),
}
"""Families in sizes that blocks of 32 divide."""


@pytest.mark.parametrize(
    ("family", "dtype"),
    # An expert has 16 tokens here, half a block of MXFP8.
    [
        pytest.param("llama31_8b_bf16", "nvfp4", marks=pytest.mark.slow),
        *(
            pytest.param(family, dtype, marks=pytest.mark.nightly)
            for family, dtype in zip(
                BLOCKS, ("mxfp8", "nvfp4", "mxfp8", "nvfp4", "mxfp8"), strict=True
            )
        ),
    ],
)
def test_families_learn_one_batch_by_heart_in_blocks(family, dtype):
    losses = tiny_losses(family, dtype, *BLOCKS[family])
    assert losses[0] == pytest.approx(np.log(64), abs=0.3)
    # NVFP4 has 8 sizes of a number: its noise leaves more of a loss after 25 steps.
    assert losses[-1] < {"mxfp8": 0.1, "nvfp4": 0.3}[dtype] * np.log(64)


@pytest.mark.parametrize(
    "name",
    tiered(
        [],
        [r.name for r in recipes.load_all() if r.name.endswith(("_mxfp8", "_nvfp4"))],
        slow=["nemotronh_56b_mxfp8"],
    ),
)
def test_blocks_divide_the_weights_of_every_smoke_row(name):
    """Shapes alone are computed: a block that does not divide a weight is an error there."""
    run = recipes.resolve(recipes.load(name), "smoke")
    with mesh_of(run):
        jax.eval_shape(make_program(run), abstract_state(run))


@pytest.mark.parametrize(
    ("name", "step", "rate"),
    [
        # 7.496e-06 stands in the log of the Llama 3.1 document, for iteration 49.
        ("llama31_8b_bf16", 49, 3e-4 * 50 / 2001),
        ("llama31_8b_bf16", 0, 3e-4 / 2001),
        ("grok1_314b_bf16", 0, 0.0),
        ("grok1_314b_bf16", 49, 1.2e-4 * 49 / 636),
        ("llama2_70b_bf16", 0, 0.0),
        ("llama2_70b_bf16", 5, 3e-5),
        ("llama2_70b_bf16", 49, 3e-6 + 2.7e-5 * 0.5 * (1 + np.cos(np.pi * 44 / 45))),
        ("deepseek_v3_bf16", 0, 0.0),
        ("deepseek_v3_bf16", 10, 3e-4),
        ("deepseek_v3_bf16", 30, 1.65e-4),
        ("nemotron3_super_120b_a12b_bf16", 4, 4.5e-4 * 0.4),
        ("nemotron3_super_120b_a12b_bf16", 10, 4.5e-4),
        ("nemotron3_super_120b_a12b_bf16", 11, 4.5e-6 + 4.455e-4 * (1 - np.sqrt(0.22))),
        ("nemotron3_super_120b_a12b_bf16", 50, 4.5e-6),
    ],
)
def test_schedule(name, step, rate):
    run = recipes.resolve(recipes.load(name), "smoke")
    assert float(learning_rate(run.optimizer, 50)(step)) == pytest.approx(rate, rel=1e-5, abs=1e-12)


def test_schedule_with_a_constant_tail():
    run = tiny_run("optimizer.warmup=10", "optimizer.constant=20")
    peak, final = run.optimizer.learning_rate, run.optimizer.final_learning_rate
    cosine = final + (peak - final) * 0.5 * (1 + np.cos(np.pi * 5 / 20))
    expected = {0: 0.0, 5: peak / 2, 10: peak, 15: cosine, 30: final, 49: final}
    for step, rate in expected.items():
        assert float(learning_rate(run.optimizer, 50)(step)) == pytest.approx(
            rate, rel=1e-5, abs=1e-12
        )


@pytest.mark.parametrize(
    "make_batch", [synthetic_batch, pytest.param(zipf_batch, marks=pytest.mark.slow)]
)
def test_tokens_depend_on_seed_and_step_alone(make_batch):
    draws = {}
    for key, seed, step, overrides in (
        ("first", 0, 0, ()), ("again", 0, 0, ("parallelism.fsdp=2", "parallelism.context=4")),
        ("next step", 0, 1, ()), ("other seed", 1, 0, ()),
    ):  # fmt: skip
        with mesh_of(tiny_run(*overrides, devices=8)):
            draws[key] = np.stack(jax.jit(
                lambda s, seed=seed: make_batch(seed, s, (2, 8, 32), 64)
            )(jnp.int32(step)))  # fmt: skip
    np.testing.assert_array_equal(draws["first"], draws["again"])
    assert np.mean(draws["first"] == draws["next step"]) < 0.1
    assert np.mean(draws["first"] == draws["other seed"]) < 0.1
    assert np.mean(draws["first"][0] == draws["first"][1]) < 0.1
    assert draws["first"].min() == 0
    assert draws["first"].max() == 63


def test_zipf_tokens_are_frequent_by_rank_and_half_of_their_targets_follow():
    run = tiny_run()
    with mesh_of(run):
        tokens, targets = zipf_batch(0, jnp.int32(0), (16, 16, 1024), 512)
    tokens, targets = np.asarray(tokens), np.asarray(targets)
    shares = np.bincount(tokens.ravel(), minlength=512) / tokens.size
    law = np.log1p(1 / np.arange(1, 513)) / np.log(513)
    assert law.sum() == pytest.approx(1)
    deviations = np.sqrt(law * (1 - law) / tokens.size)
    assert np.abs((shares - law) / deviations).max() < 5  # chance of 3e-4 with 512 normal ones
    usual = [np.bincount(targets[tokens == i], minlength=512).max() for i in range(4)]
    occurrences = np.bincount(tokens.ravel())[:4]
    np.testing.assert_allclose(usual / occurrences, 0.5, atol=0.06)


@pytest.mark.parametrize(
    "family", tiered(["nemotronh_56b_bf16"], ["nemotronh_56b_bf16", "deepseek_v3_bf16"])
)
def test_no_two_uses_share_a_key(monkeypatch, family):
    """Weights of every layer and tokens of several steps: a key is drawn from or split, once, or
    other keys are folded from it."""
    uses, folded = [], set()

    def recorded(use, record):
        def using(key, *args, **options):
            data = jax.random.key_data(key)
            jax.debug.callback(lambda data: record(tuple(data.tolist())), data)
            return use(key, *args, **options)

        return using

    for name in ("normal", "truncated_normal", "uniform", "randint", "split"):
        monkeypatch.setattr(jax.random, name, recorded(getattr(jax.random, name), uses.append))
    monkeypatch.setattr(jax.random, "fold_in", recorded(jax.random.fold_in, folded.add))
    run = tiny_run(family=family)
    assert (run.model.prediction is not None) == family.startswith("deepseek_v3")
    with mesh_of(run):
        init_state(run)
        jax.effects_barrier()
        weights = len(uses)
        for step in range(5):
            synthetic_batch(run.seed, jnp.int32(step), (1, 8, 32), 64)
        jax.effects_barrier()
    assert weights > 2 * run.model.layers
    assert len(uses) == weights + 3 * 5
    assert len(set(uses)) == len(uses)
    assert not folded & set(uses)
    assert len(folded) == 2  # the root of all, and that of tokens


LONG_TRACES = ("nemotronh", "nemotron3", "deepseek", "kimi", "gpt_oss")
"""Families whose rows take 10 s and more to trace: all of their rows are nightly."""


def rows_to_trace():
    """One row of those of a model that differ only in the sizes of the axes in use, in the number
    of microbatches, in remat and in dtype; nightly but for that with the most axes of each family.
    Smoke rows train on null GPUs instead."""
    alike, quick = {}, {}
    for recipe in recipes.load_all():
        for row in (row for row in recipe.rows if row != recipes.SMOKE):
            run = recipes.resolve(recipe, row)
            axes = tuple(a for a, size in zip(AXES, run.mesh_shape, strict=True) if size > 1)
            alike[recipe.model, axes] = run, recipe, row
    for (_, axes), (run, recipe, row) in alike.items():
        family = run.model.family
        quick[family] = max(quick.get(family, (0, "")), (len(axes), f"{recipe.name}-{row}"))
    for run, recipe, row in alike.values():
        name = f"{recipe.name}-{row}"
        family = run.model.family
        now = quick[family][1] == name and family not in LONG_TRACES
        yield pytest.param(recipe, row, id=name, marks=() if now else pytest.mark.nightly)


@pytest.mark.parametrize(("recipe", "row"), list(rows_to_trace()))
def test_rows_trace_at_their_full_size(recipe, row):
    run = recipes.resolve(recipe, row)
    mesh = AbstractMesh(run.mesh_shape, AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    with jax.sharding.use_abstract_mesh(mesh):
        state = abstract_state(run)
        after, figures = jax.eval_shape(make_program(run), state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        assert new.sharding == old.sharding or new.shape == ()
    assert figures["loss"].shape == ()
    parameters = sum(x.size for x in jax.tree.leaves(state.model))
    assert parameters == flops.parameters(run.model)["total"]
    shards, latent = run.parallelism.ranks, run.model.latent_attention
    # Weights from a latent are narrow, and not split over the ranks of experts.
    narrow = (latent.query_latent, latent.kv_latent) if latent else ()
    for variable in jax.tree.leaves(state.model, is_leaf=is_variable):
        if isinstance(variable, Vector):  # a bias of all heads is larger than the bound below
            continue
        (x,) = jax.tree.leaves(variable)
        if x.size > run.model.layers * run.model.embed * (
            run.model.experts.count if run.model.experts else 1
        ):
            parts = shards // run.parallelism.expert if x.shape[1] in narrow else shards
            assert np.prod(x.sharding.shard_shape(x.shape)) == x.size // parts
