"""A mixture of experts token by token, in float64."""

from functools import partial

import numpy as np
from tiny import tiny_run

tiny_grok = partial(tiny_run, family="grok1_314b_bf16")


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(0.79788456 * x * (1 + 0.044715 * x**2)))


def reference(x, router, gate_up, down, cfg):
    """(output, balance losses, loads, dropped) token by token, in float64."""
    out, dropped = np.zeros_like(x), np.zeros(len(x))
    losses, loads = np.zeros(len(x)), np.zeros((len(x), cfg.count))
    for b, sequence in enumerate(x):
        logits = sequence @ router
        probabilities = softmax(logits)
        best = np.argsort(-logits, axis=-1, kind="stable")[:, : cfg.top_k]
        gates = np.zeros_like(logits)
        for t, chosen in enumerate(best):
            gates[t, chosen] = softmax(logits[t, chosen])
            loads[b, chosen] += 1
        share = loads[b] / loads[b].sum()
        losses[b] = cfg.count * np.sum(share * probabilities.mean(0))
        if cfg.capacity_factor is not None:
            slots = int(np.ceil(cfg.top_k * cfg.capacity_tokens / cfg.count
                                * cfg.capacity_factor))  # fmt: skip
            for start in range(0, len(sequence), cfg.capacity_tokens):
                for e in range(cfg.count):
                    group = range(start, start + cfg.capacity_tokens)
                    ranked = sorted((t for t in group if e in best[t]), key=lambda t: -gates[t, e])
                    gates[ranked[slots:], e] = 0
                    dropped[b] += len(ranked[slots:])
        for t, token in enumerate(sequence):
            for e in np.flatnonzero(gates[t]):
                gate, up = np.einsum("d,dpf->pf", token, gate_up[e])
                out[b, t] += gates[t, e] * (down[e] @ (gelu_tanh(gate) * up))
    return out, losses, loads, dropped
