"""Routing of tokens to experts: the choice, the load-balance loss, and the figures of a step.

An *assignment* is one of the k experts that a token is sent to; `ops.moe.dispatch` sends it.
Dimension letters are as in `ops`.
"""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from jaxbench import mesh
from jaxbench.ops import dense
from jaxbench.ops.draws import Counters
from jaxbench.recipe.mixers import ExpertsConfig

SMALLEST_SUM = 1e-18
"""We add this to a sum of sigmoids before we divide by it. DeepSeek-V3 adds 1e-20, but the gradient
of a quotient has the square of the sum, which must not overflow in fp32."""

SAMPLED = (16, 16384)
"""Layers and tokens from which we estimate what skewed routing does."""


def choose(
    logits: Float[Array, "B S E"], cfg: ExpertsConfig, bias: Float[Array, " E"] | None = None
) -> tuple[Float[Array, "B S k"], Int[Array, "B S k"]]:
    """(gates, experts) of each token's assignments. The gates are fp32 and carry the gradient.

    `topk_softmax` takes the softmax over the largest logits (Megatron). `sigmoid` takes the
    sigmoids of the chosen logits divided by their sum (DeepSeek-V3); it chooses the largest after
    it has added `bias`, if routing is `learned`. Other routing has a distribution of its own, which
    biases would change. The gradient of the bias is the number of assignments (`count_loads`). All
    gates are multiplied by `gate_scale`. Of equal scores the first expert wins.
    """
    scores = jax.nn.sigmoid(logits) if cfg.router == "sigmoid" else logits
    biased = scores
    if bias is not None and cfg.routing == "learned":
        biased = scores + dense.broadcast_vector(bias, scores)
    experts = jax.lax.top_k(_in_best_groups(jax.lax.stop_gradient(biased), cfg), cfg.top_k)[1]
    chosen = experts[..., None] == jnp.arange(cfg.count)
    gates = jnp.sum(jnp.where(chosen, scores[..., None, :], 0.0), axis=-1)
    if cfg.router == "topk_softmax":
        gates = jax.nn.softmax(gates)
    else:
        gates /= jnp.sum(gates, axis=-1, keepdims=True) + SMALLEST_SUM
    if bias is not None:
        of_chosen = jnp.where(chosen, dense.broadcast_vector(bias, scores)[..., None, :], 0.0)
        gates = count_loads(gates, jnp.sum(of_chosen, axis=-1))
    return gates * cfg.gate_scale, experts


def _in_best_groups(scores: Float[Array, "B S E"], cfg: ExpertsConfig) -> Float[Array, "B S E"]:
    """Keeps the scores of experts in a token's best groups and sets all other scores to the
    smallest possible one."""
    if cfg.groups == cfg.top_groups:
        return scores
    groups = scores.reshape(*scores.shape[:2], cfg.groups, -1)
    best = jax.lax.top_k(groups, cfg.top_k // cfg.top_groups)[0]
    kept = jax.lax.top_k(jnp.sum(best, axis=-1), cfg.top_groups)[1]
    among = jnp.any(kept[..., None] == jnp.arange(cfg.groups), axis=-2)
    return jnp.where(among[..., None], groups, -jnp.inf).reshape(scores.shape)


@jax.custom_vjp
def count_loads(
    gates: Float[Array, "B S k"], biases: Float[Array, "B S k"]
) -> Float[Array, "B S k"]:
    """Returns the gates. The gradient of each assignment's bias is 1. It is summed over
    microbatches and devices like any gradient, so the sum that reaches a bias is the number of its
    expert's assignments."""
    return gates


count_loads.defvjp(
    lambda gates, biases: (gates, biases), lambda biases, dy: (dy, jnp.ones_like(biases))
)


def balance_shares(
    logits: Float[Array, "B S E"], experts: Int[Array, "B S k"], cfg: ExpertsConfig
) -> tuple[Float[Array, "B S E"], Int[Array, "B S k"]]:
    """(probability of each expert, assignments) as the load-balance loss uses them. They are the
    softmax and the choice. With router `sigmoid` they are the shares of the sigmoids, and the
    choice that the sigmoids alone would make, without bias and groups."""
    if cfg.router != "sigmoid":
        return jax.nn.softmax(logits), experts
    scores = jax.nn.sigmoid(logits)
    shares = scores / (jnp.sum(scores, axis=-1, keepdims=True) + SMALLEST_SUM)
    return shares, jax.lax.top_k(jax.lax.stop_gradient(shares), cfg.top_k)[1]


def random_logits(
    logits: Float[Array, "B S E"], counters: Counters, cfg: ExpertsConfig
) -> Float[Array, "B S E"]:
    """Replaces the logits by random numbers but keeps the gradient of the logits.

    With routing `random` they are standard normal. Megatron calls this forced load balancing
    (`RandomSTE`, megatron/core/transformer/moe/moe_utils.py). The loads of experts are then
    multinomial. With `skewed` they are Gumbel numbers plus the logarithm of each expert's share,
    which is in proportion to rank^-skew. The largest are then a draw of experts by their shares,
    without replacement (Kool et al. 2019, "Gumbel-top-k"). The order of the experts is random, and
    each layer has its own for the whole run.

    The numbers depend only on counters: the token's position, the number of its sequence, and the
    layer and its `depth`. A step therefore draws the same numbers on any mesh, with any division
    into microbatches. They do not depend on weights, because after an update the last bits of
    weights differ between meshes.
    """
    skewed = cfg.routing == "skewed"
    sample = jax.random.gumbel if skewed else jax.random.normal

    def local(logits, first, layer):
        of_layer = jax.random.fold_in(jax.random.key(0), layer)
        key = jax.random.fold_in(of_layer, counters.depth)
        sequences = mesh.indices("batch", logits.shape[0])
        tokens = mesh.indices("shard_seq", logits.shape[1])
        sequences += first

        def draw(sequence, token):
            of_token = jax.random.fold_in(jax.random.fold_in(key, sequence), token)
            return sample(of_token, logits.shape[2:])

        drawn = jax.vmap(lambda s: jax.vmap(lambda t: draw(s, t))(tokens))(sequences)
        return drawn + log_shares(of_layer, cfg) if skewed else drawn

    spec = mesh.spec_of(logits)
    draw = mesh.on_each_device(local, spec, check_vma=False)
    drawn = draw(logits, jnp.asarray(counters.sequence), jnp.asarray(counters.layer))
    return drawn + (logits - jax.lax.stop_gradient(logits))


def log_shares(key: Array, cfg: ExpertsConfig) -> Float[Array, " E"]:
    """Logarithms of the experts' shares with routing `skewed`, in the order of a key."""
    rank = 1 + jax.random.permutation(key, cfg.count)
    return jax.nn.log_softmax(-cfg.skew * jnp.log(rank.astype(jnp.float32)))


def busiest_share(cfg: ExpertsConfig, ranks: int) -> float:
    """The load of the busiest of some ranks in a layer over that of an average rank, averaged over
    layers. Chance makes it up to 1 % too large."""
    return float(loads_of_ranks(cfg, ranks).max(axis=1).mean())


@cache
def loads_of_ranks(cfg: ExpertsConfig, ranks: int) -> np.ndarray:
    """`"layer rank"`: the loads of ranks over that of an average rank, in layers whose loads follow
    `cfg`, for many tokens. They are 1 unless routing is `skewed`.

    They come from `SAMPLED` draws, since no formula gives the loads of draws without replacement.
    """
    layers, tokens = SAMPLED
    if cfg.routing != "skewed" or ranks == 1:
        return np.ones((layers, ranks))
    draws, loads = np.random.default_rng(0), []
    log_share = -cfg.skew * np.log(1 + np.arange(cfg.count))
    for _ in range(layers):
        scores = draws.gumbel(size=(tokens, cfg.count)) + draws.permutation(log_share)
        if cfg.router == "sigmoid":
            scores = 1 / (1 + np.exp(-scores))
        groups = scores.reshape(tokens, cfg.groups, -1)
        best = np.sort(groups, axis=-1)[..., -(cfg.top_k // cfg.top_groups) :].sum(axis=-1)
        left_out = best < np.sort(best, axis=-1)[:, -cfg.top_groups, None]
        groups[left_out] = -np.inf
        chosen = np.argpartition(scores, -cfg.top_k, axis=-1)[:, -cfg.top_k :]
        load = np.bincount(chosen.ravel() // (cfg.count // ranks), minlength=ranks)
        loads.append(load / load.mean())
    return np.stack(loads)


def balance_loss(
    logits: Float[Array, "B S E"], experts: Int[Array, "B S k"], cfg: ExpertsConfig
) -> tuple[Float[Array, " B"], Int[Array, "B E"]]:
    """(load-balance loss, assignments of each expert) of each sequence, before any are dropped.

    The loss is E sum_e F_e P_e. F_e is expert e's share of the assignments, and P_e is the mean of
    its probability (`balance_shares`; Fedus et al. 2021). Both are taken over the sequence or, with
    `balance: microbatch`, over the sequences of its data-parallel rank. The loss is 1 if both are
    uniform. Only P carries a gradient.
    """
    length = mesh.whole_seq(experts.shape[1])

    def loads(experts):
        chosen = experts[..., None] == jnp.arange(cfg.count)
        return mesh.sum_seq(chosen.astype(jnp.int32), axis=(1, 2))

    probability, counted = balance_shares(logits, experts, cfg)
    load = loads(experts)
    share = (load if counted is experts else loads(counted)) / (length * cfg.top_k)
    mean = mesh.sum_seq(probability) / length
    if cfg.balance == "microbatch":
        share, mean = _mean_of_rank(share), _mean_of_rank(mean)
    return cfg.count * jnp.sum(share * mean, axis=-1), load


def _mean_of_rank(x: Float[Array, "B E"]) -> Float[Array, "B E"]:
    """Replaces the value of each sequence by the mean over the sequences of its device."""

    def local(x):
        return jnp.broadcast_to(jnp.mean(x, axis=0), x.shape)

    return mesh.on_each_device(local, mesh.spec_of(x))(x)


class RoutingFigures(NamedTuple):
    """Of a layer with experts, for each sequence: its load-balance loss, the assignments of each
    expert, and the number of dropped assignments."""

    balance_loss: Float[Array, "*L B"]
    load: Num[Array, "*L B E"]
    dropped: Num[Array, "*L B"]


RoutingSummary = dict[str, Array]
"""Routing figures of a step: the mean balance loss; the load of each expert, and that of the
busiest expert of each layer and of any layer, all relative to a fair share; and the share of
dropped assignments. Empty without experts."""


def with_balance_loss(
    loss: Array, segments: list[tuple[RoutingFigures, ...]], coefficient: float
) -> tuple[Float[Array, ""], RoutingSummary]:
    """Adds the gradient, but not the value, of all layers' load-balance losses to the loss. Returns
    (loss, summary)."""
    if not any(segments):
        return loss, {}
    layers = [_layers_in_order(segment) for segment in segments if segment]
    figures = RoutingFigures(*(jnp.concatenate(parts) for parts in zip(*layers, strict=True)))
    total = coefficient * jnp.sum(jnp.mean(figures.balance_loss, axis=1))
    step_figures = jax.lax.stop_gradient(summary(figures))
    return loss + (total - jax.lax.stop_gradient(total)), step_figures


def _layers_in_order(segment: tuple[RoutingFigures, ...]) -> RoutingFigures:
    """The figures of a segment's layers, from those of each layer of a block in all repeats."""

    def ordered(*parts: Array) -> Array:
        return jnp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])

    return jax.tree.map(ordered, *segment)


def summary(figures: RoutingFigures) -> RoutingSummary:
    """The summary of one forward pass, from the figures of all layers."""
    load = jnp.sum(figures.load, axis=1)
    share = load / jnp.mean(load, axis=1, keepdims=True)
    return {
        "balance_loss": jnp.mean(figures.balance_loss),
        "expert_load": jnp.mean(share, axis=0),
        "expert_load_max": jnp.max(share),
        "layer_load_max": jnp.max(share, axis=1),
        "tokens_dropped": jnp.sum(figures.dropped) / jnp.sum(load),
    }
