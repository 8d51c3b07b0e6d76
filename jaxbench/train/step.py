"""The train step: state, gradients, the optimizer's update, and synthetic tokens, which need no
tokenizer, no download and no account."""

import math
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxbench import mesh
from jaxbench.models.context import Sequences
from jaxbench.models.decoder import Decoder
from jaxbench.models.layers import DTYPES, Weight, sum_dtype, with_values
from jaxbench.ops import quantized
from jaxbench.ops.dense import is_variable
from jaxbench.ops.layer_stack import LayerLoop
from jaxbench.ops.moe.routing import RoutingSummary
from jaxbench.ops.stash import allocate, read
from jaxbench.recipe.settings import Run
from jaxbench.train.optimizer import (
    balance,
    learning_rate,
    make_optimizer,
    without_loads,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The state that a step changes.

    `step`, an int32 scalar, is the number of the next step. The tokens follow from it alone. AdamW
    keeps an equal count of its own, from which its learning rate follows. `fp8` are the amax
    histories of delayed scaling.
    """

    step: Any
    model: Decoder
    optimizer: optax.OptState
    fp8: Any


def init_state(run: Run) -> State:
    """The state before the first step, on the current mesh: fp32 weights, and AdamW moments in the
    dtype of `optimizer.moments`, sharded like the weights."""
    model = Decoder(run.model, key=root_key(run.seed, "model"))
    optimizer = make_optimizer(run.optimizer, run.steps).init(model)
    histories = quantized.init_histories(model.stacks, run.precision)
    return State(jnp.zeros((), jnp.int32), model, optimizer, histories)


def abstract_state(run: Run) -> State:
    """The shapes, dtypes and shardings of the state: the sharding plan."""
    return jax.eval_shape(partial(init_state, run))


def train_step(
    state: State, tokens: jax.Array, targets: jax.Array, run: Run
) -> tuple[State, dict[str, jax.Array]]:
    """One optimizer step over all microbatches (`"microbatch batch seq"`): (next state, figures of
    the step). `grad_norm` is the norm before clipping."""
    loss, routing_figures, all_grads, histories = gradients(state, tokens, targets, run)
    grads = without_loads(all_grads)
    updates, optimizer = make_optimizer(run.optimizer, run.steps).update(
        grads, state.optimizer, state.model
    )
    figures = {
        "loss": loss,
        "grad_norm": optax.tree.norm(grads),
        "learning_rate": learning_rate(run.optimizer, run.steps)(state.step),
        **routing_figures,
    }
    model = optax.apply_updates(state.model, updates)
    if (rate := run.model.bias_rate) is not None:
        model = balance(model, all_grads, rate)
    return State(state.step + 1, model, optimizer, histories), figures


class Gradients(NamedTuple):
    """The results of a step's forward and backward passes: mean loss, routing figures, gradients in
    fp32, sharded like the weights, and next histories of delayed scaling."""

    loss: jax.Array
    figures: RoutingSummary
    gradients: Decoder
    histories: quantized.Histories


class Sums(NamedTuple):
    """What is summed over microbatches: shares of the loss and of the routing figures, and
    gradients."""

    loss: jax.Array
    figures: RoutingSummary
    gradients: Decoder


def gradients(state: State, tokens: jax.Array, targets: jax.Array, run: Run) -> Gradients:
    """Loss and gradients of all microbatches.

    Weights are cast once for all microbatches. Within a replica of the model, the gradients of each
    microbatch are reduce-scattered as they arise; a pipeline does it once per step. Across replicas
    gradients are summed once, here, at the end of the step. With `execution.replica_sums: layer`
    each layer sums the gradients of its matrices across replicas itself.
    """
    precision = run.precision
    weights = compute_weights(state.model, DTYPES[precision.dtype])
    if run.execution.replica_sums == "layer":
        weights.stacks = unmark_matrices(weights.stacks)
    quantization = quantized.Quantization.of(weights.stacks, state.fp8, precision, run.seed)

    def loss_share(weights, probes, stashes, batch, after=None):
        """((loss, routing figures) over the number of microbatches, stashes). `stashes` and `after`
        are as in `LayerLoop`."""
        loop, scaled = LayerLoop(stashes, after), quantization.scaled(probes)
        values = weights.loss(batch, run.execution, precision, scaled, loop)
        loss, figures = jax.tree.map(lambda value: value / run.accumulation, values)
        return loss, (figures, loop.written)

    def one_microbatch(batch, stashes=(), after=None):
        """(the microbatch's part of the sums, observed amax, stashes)."""
        (loss, (figures, stashes)), (grads, observed) = jax.value_and_grad(
            loss_share, argnums=(0, 1), has_aux=True
        )(weights, quantization.probes, stashes, batch, after)
        return Sums(loss, figures, grads), observed, stashes

    def add_microbatch(carry, batch):
        total, largest, stashes = carry
        # The backward pass ends with the first layers.
        last = min(jax.tree.leaves(total.gradients.stacks[0]), key=lambda gradient: gradient.size)
        new, observed, stashes = one_microbatch(batch, stashes, after=last)
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, new)
        return (total, jax.tree.map(jnp.maximum, largest, observed), stashes), None

    def zero_gradient(variable):
        dtype = sum_dtype(variable, precision)
        return variable.replace(mesh.zero_gradient(variable[...], dtype))

    batches = Sequences(tokens, targets, first_sequences(state.step, tokens, run.seed))
    if run.parallelism.pipeline > 1:
        from jaxbench.train import pipeline  # only these runs need it

        scaled = quantization.scaled(quantization.probes)
        loss, figures, grads, observed = pipeline.accumulate(weights, scaled, batches, run)
        total = Sums(loss, figures, grads)
    elif run.accumulation == 1:
        total, observed, _ = one_microbatch(read(batches, 0))
    else:
        operands = weights, quantization.probes, (), read(batches, 0)
        loss, (figures, stashes) = jax.eval_shape(loss_share, *operands)
        loss, figures = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), (loss, figures))
        zeros = Sums(loss, figures, jax.tree.map(zero_gradient, weights, is_leaf=is_variable))
        start = zeros, quantization.probes, allocate(stashes)
        (total, observed, _), _ = jax.lax.scan(add_microbatch, start, batches)
    reduced = jax.tree.map(mesh.sum_replicas, total.gradients, state.model)
    grads = jax.tree.map(lambda g, w: g.astype(w.dtype), reduced, state.model)
    histories = quantization.next_histories(observed)
    return Gradients(total.loss, total.figures, grads, histories)


def first_sequences(step: jax.Array, tokens: jax.Array, seed: int) -> jax.Array:
    """The number of each microbatch's first sequence, counted from the first step. Each seed starts
    to count at another number, so that it draws other numbers."""
    count, sequences, _ = tokens.shape
    numbers = (step * count + jnp.arange(count)) * sequences
    start = seed * 0x9E3779B1 % 2**32  # 2^32 over the golden ratio spreads seeds over all numbers
    return numbers + np.uint32(start).astype(np.int32)


def compute_weights(model: Decoder, dtype) -> Decoder:
    """The model with its `Weight`s cast to the compute dtype, and with all variables marked
    `mesh.accumulating`."""

    def cast_and_mark(variable):
        w = variable[...].astype(dtype) if isinstance(variable, Weight) else variable[...]
        return variable.replace(mesh.accumulating(w))

    return jax.tree.map(cast_and_mark, model, is_leaf=is_variable)


def unmark_matrices(stacks: Any) -> Any:
    """Stacks of blocks whose matrices are not marked. A layer marks a matrix when it uses it, so
    its backward pass sums the gradient over replicas, and the matmuls of other layers hide that
    sum. Vectors stay marked, because each would cost the latency of a collective in every layer."""
    return with_values(Weight, mesh.unmarked, stacks)


def make_program(run: Run) -> Any:
    """The jitted step with its synthetic batch: state to (state, figures). The state is donated."""
    shape = (run.accumulation, run.microbatch * run.batch_ranks, run.batch.sequence_length)

    make_batch = zipf_batch if run.batch.tokens == "zipf" else synthetic_batch

    def step(state: State):
        batch = make_batch(run.seed, state.step, shape, run.model.vocabulary)
        return train_step(state, *batch, run)

    return jax.jit(step, donate_argnums=0)


def root_key(seed: int, purpose: str) -> jax.Array:
    """The key from which all keys of one purpose, such as `model`, are derived.

    JAX derives the same key from `split(key, n)[i]` as from `fold_in(key, i)`. With one root for
    everything, the tokens of step 1 would share a key with the layers.
    """
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(purpose.encode()))


def synthetic_batch(
    seed: int, step: jax.Array, shape: tuple[int, int, int], vocabulary: int
) -> tuple[jax.Array, jax.Array]:
    """(tokens, targets) of a step, int32 `"microbatch batch seq"`, made on the devices that use
    them.

    They are independent uniform integers, as in NeMo's mock data, and differ at every step. So the
    loss stays near ln(vocabulary), instead of falling to zero on a memorised batch. They depend
    only on seed and step, not on the mesh.
    """
    k_tokens, k_targets = jax.random.split(jax.random.fold_in(root_key(seed, "tokens"), step))
    sharding = mesh.spec("microbatch batch seq", mesh.ACTIVATION)
    tokens = jax.random.randint(k_tokens, shape, 0, vocabulary, out_sharding=sharding)
    return tokens, jax.random.randint(k_targets, shape, 0, vocabulary, out_sharding=sharding)


SUCCESSOR = 4099
"""A prime that divides no vocabulary in use: each token has another usual target."""


def zipf_batch(
    seed: int, step: jax.Array, shape: tuple[int, int, int], vocabulary: int
) -> tuple[jax.Array, jax.Array]:
    """(tokens, targets) like `synthetic_batch`, with structure: the probability of token i is in
    proportion to ln((i + 2) / (i + 1)), nearly 1 / (i + 1) as in Zipf's law, and half of the
    targets are the same for all occurrences of a token.
    """
    keys = jax.random.split(jax.random.fold_in(root_key(seed, "tokens"), step), 3)
    sharding = mesh.spec("microbatch batch seq", mesh.ACTIVATION)
    u_tokens, u_targets, coin = (
        jax.random.uniform(key, shape, out_sharding=sharding) for key in keys
    )

    def by_rank(u):  # of density 1 / x between 1 and vocabulary + 1
        return jnp.minimum(jnp.exp(u * math.log(vocabulary + 1)).astype(int) - 1, vocabulary - 1)

    tokens = by_rank(u_tokens)
    targets = jnp.where(coin < 0.5, (tokens + 1) * SUCCESSOR % vocabulary, by_rank(u_targets))
    return tokens, targets
