"""Multi-token prediction against its definition, written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import tiered
from steps import last_hidden, new_state, sequences
from tiny import mesh_of, tiny_run

from jaxbench.models.context import Sequences, make_context
from jaxbench.recipe.settings import Precision


def written_out(model, tokens, targets, run):
    """(mean cross entropy of next tokens, mean over depths of those of further tokens)."""
    cfg = run.model
    hidden = last_hidden(model, tokens, run.execution, Precision(dtype="fp32"))
    last, head = model.norm(hidden), model.head[...]
    ctx = make_context(cfg, tokens.shape[1], run.execution, Precision(dtype="fp32"))

    def cross_entropy(hidden, targets):
        logits = jax.nn.log_softmax(hidden @ head)
        return -jnp.mean(jnp.take_along_axis(logits, targets[..., None], axis=-1))

    block = jax.tree.map(lambda w: w[0], model.stacks[-1])
    further, length, hidden = [], tokens.shape[1], last
    for k in range(1, cfg.prediction.depth + 1):
        # Positions without a next token hold anything: causal layers show it to none before.
        next_tokens = jnp.pad(tokens[:, k:], ((0, 0), (0, k)))
        embedded = model.prediction.embedding_norm(model.embedding.table[...][next_tokens])
        both = jnp.concatenate([embedded, model.prediction.hidden_norm(hidden)], axis=-1)
        hidden, _ = block(both @ model.prediction.project[...], ctx)
        hidden = model.prediction.norm(hidden)
        further.append(cross_entropy(hidden[:, : length - k], targets[:, k:]))
    return cross_entropy(last, targets), sum(further) / cfg.prediction.depth


@pytest.mark.parametrize("depth", tiered([], [1, 2], [2]))
def test_further_tokens_add_their_gradient_but_not_their_value(depth):
    prediction = f"model.prediction={{pattern: '*-', depth: {depth}, loss: 0.3}}"
    run = tiny_run("model.layers=2", prediction)
    with mesh_of(run):
        model = new_state(run).model
        tokens, targets = (batch[0] for batch in sequences(run))

        def loss(model):
            value, _ = model.loss(
                Sequences(tokens, targets), run.execution, Precision(dtype="fp32")
            )
            return value

        def expected(model):
            main, further = written_out(model, tokens, targets, run)
            return main + 0.3 * further, main

        value, grads = jax.jit(jax.value_and_grad(loss))(model)
        (_, main), exact = jax.jit(jax.value_and_grad(expected, has_aux=True))(model)
    assert float(value) == pytest.approx(float(main), rel=1e-6)
    for g, e in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        # Two orders of the same fp32 sums over 256 tokens.
        np.testing.assert_allclose(g, e, atol=2e-5 * np.abs(np.asarray(e)).max(), rtol=0)
