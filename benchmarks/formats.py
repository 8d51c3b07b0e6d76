"""Compares training in each format with bf16: losses of a small Llama on a task that it can learn.

    python benchmarks/formats.py [--steps 200]

A token follows from the one before by a fixed permutation, except that one in eight is random. The
least possible loss is therefore known, and no sequence occurs twice. Prints the mean loss of the
last tenth of the steps in each format, and its difference from bf16. NVFP4 is also trained
without stochastic rounding and without the Hadamard transform.
"""

import argparse
from functools import partial

import jax
import numpy as np

from jaxbench import mesh
from jaxbench.recipe import recipes
from jaxbench.train.step import init_state, train_step

VOCABULARY, NOISE = 64, 1 / 8

SETTINGS = (
    "model.embed=128", "model.layers=2", "model.attention={heads: 4, kv_heads: 2, head_dim: 32}",
    "model.mlp.ffn=256", f"model.vocabulary={VOCABULARY}", "model.init_std=0.02",
    "batch.sequence_length=64", "batch.global_batch=8", "execution.remat=full",
    "optimizer.learning_rate=3e-3", "optimizer.final_learning_rate=3e-4", "optimizer.warmup=10",
)  # fmt: skip

FORMATS = {
    "bf16": ("dtype=bf16",),
    "fp8, current scaling": ("dtype=fp8", "scaling=current"),
    "mxfp8": ("dtype=mxfp8",),
    "nvfp4": ("dtype=nvfp4",),
    "nvfp4, rounding to nearest": ("dtype=nvfp4", "stochastic_rounding=false"),
    "nvfp4, no Hadamard transform": ("dtype=nvfp4", "hadamard=false"),
    "nvfp4, last layer in bf16": ("dtype=nvfp4", "last_bf16_layers=1"),
}


def sequences(step: int, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, targets) of a step, `[1, count, length]`."""
    rng = np.random.default_rng(step + 1)
    tokens = rng.integers(0, VOCABULARY, size=(count, length + 1), dtype=np.int32)
    random = rng.random(tokens.shape) < NOISE
    follows = np.random.default_rng(0).permutation(VOCABULARY)
    for place in range(1, length + 1):
        known = follows[tokens[:, place - 1]]
        tokens[:, place] = np.where(random[:, place], tokens[:, place], known)
    return tokens[None, :, :-1], tokens[None, :, 1:]


def losses(changes: tuple[str, ...], steps: int, seed: int) -> np.ndarray:
    """Losses of a run in a format."""
    overrides = recipes.parse_overrides([*SETTINGS, *(f"precision.{c}" for c in changes)])
    recipe = recipes.load("llama31_8b_bf16")
    run = recipes.resolve(recipe, "smoke", devices=1, overrides=overrides, steps=steps, seed=seed)
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape, jax.devices()[:1])):
        state = jax.jit(partial(init_state, run))()
        step = jax.jit(partial(train_step, run=run), donate_argnums=0)
        found = []
        for index in range(steps):
            batch = sequences(index, run.batch.global_batch, run.batch.sequence_length)
            state, figures = step(state, *batch)
            found.append(float(figures["loss"]))
    return np.array(found)


def least() -> float:
    """The loss of a model that knows the task, in nats."""
    known = 1 - NOISE + NOISE / VOCABULARY
    other = NOISE / VOCABULARY
    return -known * np.log(known) - (VOCABULARY - 1) * other * np.log(other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    print(f"least loss {least():.4f}, ln vocabulary {np.log(VOCABULARY):.4f}; last tenth of steps")
    tail, base = -max(args.steps // 10, 1), None
    for name, changes in FORMATS.items():
        ends = [losses(changes, args.steps, seed)[tail:].mean() for seed in range(args.seeds)]
        base = np.array(ends) if base is None else base
        more = np.array(ends) - base
        print(f"{name:36} {np.mean(ends):.4f}  {more.mean():+.4f}", flush=True)


if __name__ == "__main__":
    main()
