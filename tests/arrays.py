"""Arrays on small meshes, for tests of operators."""

import jax
import jax.numpy as jnp
import numpy as np
from tiny import mesh_of, tiny_run

from jaxbench import mesh

EPS32 = np.finfo(np.float32).eps
MESHES = {
    "one device": (),
    "data": ("batch.microbatch=1",),
    "fsdp": ("parallelism.fsdp=8",),
    "tensor": ("parallelism.tensor=4",),
    "context": ("parallelism.context=4",),
    "context and tensor": ("parallelism.context=4", "parallelism.tensor=2"),
    "all": ("parallelism.fsdp=2", "parallelism.context=2", "parallelism.tensor=2"),
}


def on(mesh_name: str):
    """One of `MESHES`, as the current one."""
    return mesh_of(tiny_run(*MESHES[mesh_name], devices=1 if mesh_name == "one device" else 8))


def put(x, dims: str, rules=mesh.ACTIVATION, dtype=jnp.float32):
    """An array partitioned by its logical dimensions."""
    return jax.device_put(jnp.asarray(x, dtype), mesh.spec(dims, rules))


def attention_reference(q, k, v, window=None, sinks=None):
    """Causal grouped-query attention in float64, one query position at a time."""
    batch, length, heads, dim = q.shape
    out = np.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            group = h // (heads // k.shape[2])
            for t in range(length):
                seen = slice(max(0, t + 1 - (window or length)), t + 1)
                scores = k[b, seen, group] @ q[b, t, h] / np.sqrt(dim)
                weights = np.exp(scores)
                sink = 0 if sinks is None else np.exp(sinks[h])
                out[b, t, h] = weights / (weights.sum() + sink) @ v[b, seen, group]
    return out
