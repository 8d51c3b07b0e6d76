"""From gradients to new weights: AdamW, the learning-rate schedules of the published recipes, and
the biases that balance experts."""

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxbench.models.layers import LoadBias, Vector, with_values
from jaxbench.ops.dense import is_variable
from jaxbench.recipe.settings import Optimizer

CLIP_NORM = 1.0

Tree = TypeVar("Tree")
"""A model, or another pytree of variables."""


def make_optimizer(cfg: Optimizer, steps: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) with betas 0.9 and 0.95, and clipping at global norm 1.

    `Vector`s are decayed only if the recipe says so; a `LoadBias` never is.
    """

    def decay_mask(params):
        undecayed = (LoadBias,) if cfg.decay_vectors else (LoadBias, Vector)
        return jax.tree.map(
            lambda p: p.replace(not isinstance(p, undecayed)), params, is_leaf=is_variable
        )

    adamw = optax.adamw(
        learning_rate(cfg, steps), b1=0.9, b2=0.95, eps=cfg.eps, weight_decay=cfg.weight_decay,
        mask=decay_mask,
    )  # fmt: skip
    if cfg.moments == "bf16":
        adamw = moments_in_bf16(adamw)
    return optax.chain(optax.clip_by_global_norm(CLIP_NORM), adamw)


def moments_in_bf16(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transformation whose state is rounded to bf16 between updates. Public Optax can do that
    only for the first moment."""

    def cast(state: optax.OptState, dtype: Any) -> optax.OptState:
        def to(a: jax.Array) -> jax.Array:
            return a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a

        return jax.tree.map(to, state)

    def init(params: optax.Params) -> optax.OptState:
        return cast(inner.init(params), jnp.bfloat16)

    def update(updates, state, params=None):
        updates, state = inner.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, jnp.bfloat16)

    return optax.GradientTransformation(init, update)


def without_loads(grads: Tree) -> Tree:
    """The gradients, with zeros for each `LoadBias`, so that AdamW leaves these biases alone."""
    return with_values(LoadBias, jnp.zeros_like, grads)


def balance(model: Tree, grads: Tree, rate: float) -> Tree:
    """The model with its `LoadBias`es moved by `rate` towards equal loads: up if the load (the
    gradient) is below the mean of the layer's experts, and down if it is above (Megatron's
    `get_updated_expert_bias`, megatron/core/transformer/moe/moe_utils.py)."""

    def moved(bias, grad):
        if not isinstance(bias, LoadBias):
            return bias
        load = grad[...]
        up = jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
        return bias.replace(bias[...] + rate * up)

    return jax.tree.map(moved, model, grads, is_leaf=is_variable)


def learning_rate(cfg: Optimizer, steps: int):
    """Learning rate as a function of the 0-based step t, with warm-up W, run length T, and a peak
    and a final rate.

    - `cosine` is MaxText's (max_utils.py at 02a8f5c) and also Megatron Core's
      (optimizer_param_scheduler.py at d98e8a6). It warms up from 0 as peak t/W, and decays as final
      + (peak - final)(1 + cos(pi (t - W)/(T - W)))/2.
    - `megatron`, in spite of its name, is NeMo's (lr_scheduler.py at d2b2155). It warms up from its
      first step as peak (t + 1)/(W + 1), up to and including t = W, and decays like `cosine`. With
      a constant tail of C steps it warms up as peak t/W, and its decay ends at T - C.
    - `wsd` is Nemotron 3 Super's. It leaves the length of its decay at T, so nothing is constant.
      After the warm-up it is final + (peak - final)(1 - sqrt(t/T)) (Megatron Core's `minus_sqrt`).
    """
    peak, final, warmup = cfg.learning_rate, cfg.final_learning_rate, cfg.warmup_steps(steps)

    def rate(t):
        t = jnp.asarray(t, jnp.float32)
        if cfg.schedule == "wsd":
            part = 1 - jnp.sqrt(jnp.minimum(t / steps, 1.0))
        else:
            progress = jnp.clip((t - warmup) / max(steps - cfg.constant - warmup, 1), 0.0, 1.0)
            part = 0.5 * (1 + jnp.cos(math.pi * progress))
        after_warmup = final + (peak - final) * part
        if cfg.schedule == "megatron" and not cfg.constant:
            return jnp.where(t <= warmup, peak * (t + 1) / (warmup + 1), after_warmup)
        return jnp.where((t <= warmup) & (warmup > 0), peak * t / max(warmup, 1), after_warmup)

    return rate
