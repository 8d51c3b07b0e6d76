"""Grouped matmul for dropless routing: permuted tokens times the weights of their experts, one
block of slots at a time.

The number of an expert's tokens is known only at run time; work and memory follow it.
(`jax.lax.ragged_dot` lowers on GPUs to dense masked products: experts x the work.)
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxbench import mesh
from jaxbench.ops.gating import gate


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def mlp(
    permuted: Float[Array, "R D"],
    weights: Float[Array, " R"],
    expert: Int[Array, " blocks"],
    gate_up: Float[Array, "E D P F"],
    down: Float[Array, "E D F"],
    activation: Callable,
) -> Float[Array, "R D"]:
    """down_e(gate(gate_up_e x)) for `permuted` tokens in equal blocks, each of one `expert`.

    Tokens stay on their device; the weights, sharded at rest, are gathered for all experts.
    Gradients of weights are summed in fp32 over blocks, and reduce-scattered.
    """
    return _sharded(_forward, permuted, weights, expert, gate_up, down, activation=activation)[0]


def _transpose(activation, operands, cotangent):
    d_permuted, d_weights, *d_matrices = _sharded(
        _backward, *operands, cotangent, activation=activation
    )
    return d_permuted, d_weights, None, *d_matrices


mlp.defvjp(lambda *arguments: (mlp(*arguments), arguments[:-1]), _transpose)


def _sharded(local, permuted, weights, expert, gate_up, down, *cotangent, activation):
    specs = [PartitionSpec(*mesh.partition(permuted))]
    if cotangent:
        specs.append(PartitionSpec(*mesh.partition(weights)))
        for w in (gate_up, down):
            assert jax.typeof(w).sharding.spec.reduced == set(mesh.used(*mesh.REPLICAS))
            specs.append(mesh.cotangent_spec(w))
    run = jax.shard_map(
        partial(local, activation=activation), out_specs=tuple(specs), check_vma=False
    )
    return run(permuted, weights, expert, gate_up, down, *cotangent)


def _gather(w: Array) -> Array:
    w = jax.lax.all_gather(w, mesh.EXPERT_AT_REST, axis=1, tiled=True)
    return jax.lax.all_gather(w, mesh.EXPERTS, axis=0, tiled=True)


def _scatter(grad: Array) -> Array:
    grad = jax.lax.psum_scatter(grad, mesh.EXPERTS, scatter_dimension=0, tiled=True)
    return jax.lax.psum_scatter(grad, mesh.EXPERT_AT_REST, scatter_dimension=1, tiled=True)


def _blocks(expert, *arrays):
    return expert, *(x.reshape(expert.size, -1, *x.shape[1:]) for x in arrays)


def _forward(permuted, weights, expert, gate_up, down, *, activation):
    gate_up, down = _gather(gate_up), _gather(down)

    def step(_, block):
        e, x, weight = block
        y = jnp.einsum("RD,DPF->RPF", x, gate_up[e])
        hidden = gate(activation, y[:, 0], y[:, 1], weight)
        return None, jnp.einsum("RF,DF->RD", hidden, down[e])

    _, out = jax.lax.scan(step, None, _blocks(expert, permuted, weights))
    return (out.reshape(permuted.shape),)


def _backward(permuted, weights, expert, gate_up, down, cotangent, *, activation):
    gate_up, down = _gather(gate_up), _gather(down)

    def step(totals, block):
        e, x, weight, d_out = block
        y = jnp.einsum("RD,DPF->RPF", x, gate_up[e])
        hidden, transpose = jax.vjp(
            lambda y, weight: gate(activation, y[:, 0], y[:, 1], weight), y, weight
        )
        d_y, d_weight = transpose(jnp.einsum("RD,DF->RF", d_out, down[e]))
        f32 = {"preferred_element_type": jnp.float32}
        grads = (
            jnp.einsum("RD,RPF->DPF", x, d_y, **f32),
            jnp.einsum("RD,RF->DF", d_out, hidden, **f32),
        )
        totals = tuple(
            jax.lax.dynamic_update_index_in_dim(total, total[e] + grad, e, 0)
            for total, grad in zip(totals, grads, strict=True)
        )
        return totals, (jnp.einsum("RPF,DPF->RD", d_y, gate_up[e]), d_weight)

    zeros = tuple(jnp.zeros(w.shape, jnp.float32) for w in (gate_up, down))
    blocks = _blocks(expert, permuted, weights, cotangent)
    totals, (d_permuted, d_weights) = jax.lax.scan(step, zeros, blocks)
    d_matrices = (_scatter(t.astype(gate_up.dtype)) for t in totals)
    return d_permuted.reshape(permuted.shape), d_weights.reshape(weights.shape), *d_matrices
