"""AdamW and the learning-rate schedules of the published recipes."""

import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxbench.models.layers import LoadBias, Vector
from jaxbench.recipe.settings import Optimizer

CLIP_NORM = 1.0

Tree = TypeVar("Tree")
"""A model, or another pytree of variables."""


def make_optimizer(cfg: Optimizer, steps: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) with betas 0.9/0.95, decay 0.1, and clipping at global
    norm 1.

    Vectors (norm gains) are decayed only where the source does so.
    """

    def decayed(params):
        kept = (LoadBias,) if cfg.decay_vectors else (LoadBias, Vector)
        return jax.tree.map(
            lambda p: p.replace(not isinstance(p, kept)), params, is_leaf=is_variable
        )

    return optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.adamw(
            learning_rate(cfg, steps), b1=0.9, b2=0.95, eps=cfg.eps, weight_decay=0.1, mask=decayed
        ),
    )


def is_variable(node: object) -> bool:
    """Whether a node of a model's pytree is a variable."""
    return isinstance(node, nnx.Variable)


def without_loads(grads: Tree) -> Tree:
    """Gradients with zeros for those of `LoadBias`es, which AdamW then leaves alone."""
    return jax.tree.map(
        lambda g: g.replace(jnp.zeros_like(g[...])) if isinstance(g, LoadBias) else g,
        grads,
        is_leaf=is_variable,
    )


def balance(model: Tree, grads: Tree, rate: float) -> Tree:
    """The model with its `LoadBias`es moved by `rate` towards equal loads: up where the load, the
    gradient, is below the mean of the layer's experts, down where it is above (Megatron's
    `get_updated_expert_bias`, megatron/core/transformer/moe/moe_utils.py)."""

    def moved(bias, grad):
        if not isinstance(bias, LoadBias):
            return bias
        load = grad[...]
        up = jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
        return bias.replace(bias[...] + rate * up)

    return jax.tree.map(moved, model, grads, is_leaf=is_variable)


def learning_rate(cfg: Optimizer, steps: int):
    """Learning rate as a function of the 0-based step t, warm-up W, run length T, peak and final
    rate.

    MaxText and Megatron decay as final + (peak - final)(1 + cos(pi (t - W)/(T - W)))/2. MaxText
    warms up from 0 as peak t/W (max_utils.py at 02a8f5c), Megatron from its first step as
    peak (t + 1)/(W + 1), up to and including t = W. A schedule with a constant tail of C steps
    warms up from 0 as peak t/W, and its decay ends at T - C (NeMo's lr_scheduler.py at d2b2155).
    """
    peak, final, warmup = cfg.learning_rate, cfg.final_learning_rate, cfg.warmup_steps(steps)

    def rate(t):
        t = jnp.asarray(t, jnp.float32)
        progress = jnp.clip((t - warmup) / max(steps - cfg.constant - warmup, 1), 0.0, 1.0)
        cosine = final + (peak - final) * 0.5 * (1 + jnp.cos(math.pi * progress))
        if cfg.schedule == "megatron" and not cfg.constant:
            return jnp.where(t <= warmup, peak * (t + 1) / (warmup + 1), cosine)
        return jnp.where(t < warmup, peak * t / max(warmup, 1), cosine)

    return rate
