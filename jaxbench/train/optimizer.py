"""AdamW and the learning-rate schedules of the published recipes."""

import math

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxbench.models.layers import Vector
from jaxbench.recipe.settings import Optimizer

CLIP_NORM = 1.0


def make_optimizer(cfg: Optimizer, steps: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) with betas 0.9/0.95, decay 0.1, and clipping at global
    norm 1.

    Vectors (norm gains) are decayed only where the source does so.
    """

    def decayed(params):
        return jax.tree.map(
            lambda p: p.replace(cfg.decay_vectors or not isinstance(p, Vector)),
            params,
            is_leaf=lambda p: isinstance(p, nnx.Variable),
        )

    return optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.adamw(
            learning_rate(cfg, steps), b1=0.9, b2=0.95, eps=cfg.eps, weight_decay=0.1, mask=decayed
        ),
    )


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
