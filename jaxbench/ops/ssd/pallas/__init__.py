"""The mixer in Pallas kernels for NVIDIA GPUs, Hopper and later. There are kernels for the
convolution, the scan, and the gate with its norm, each with a backward pass. XLA computes the time
steps, which are small.

Start with `mixer`. `ops.pallas_call` calls the kernels; `scan` and `gradients` are the forward and
the backward pass of the scan.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxbench.base.scopes import SCAN
from jaxbench.ops.implementations import Task
from jaxbench.ops.ssd.pallas.conv import conv_silu
from jaxbench.ops.ssd.pallas.gate import gate_norm
from jaxbench.ops.ssd.pallas.scan import scan
from jaxbench.ops.ssd.pallas.tiles import Tuning, tuning_of_mesh
from jaxbench.ops.ssd.parts import Dims, Parameters

__all__ = ["Tuning", "mixer", "refusal"]

LEAST, MOST = 16, 64 * 256
"""The smallest dimension of a matmul in a Triton kernel, and the largest number of elements of a
state (head_dim x state). A larger state would not fit a program's registers and, with its operands,
shared memory (213 of 227 KiB)."""


def refusal(task: Task) -> str | None:
    """Why the kernels cannot compute a model's mixers; None if they can."""
    mamba = task.cfg.mamba
    assert mamba is not None
    for name in ("head_dim", "state"):
        size = getattr(mamba, name)
        if size < LEAST or not _power_of_two(size):
            return f"cannot compute {name} = {size}, not a power of two of at least {LEAST}"
    if not _power_of_two(mamba.inner):
        return f"cannot compute {mamba.inner} features per group, not a power of two"
    if (elements := mamba.head_dim * mamba.state) > MOST:
        return f"cannot compute model.mamba.head_dim x state = {elements}, more than {MOST}"
    if task.dtype == "fp32":
        return "cannot compute in fp32, which takes twice a program's shared memory"
    if task.length % (chunk := Tuning().chunk):
        return f"cannot compute {task.length} tokens per sequence, not a multiple of {chunk}"
    return None


def _power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def mixer(
    dims: Dims,
    projected: Float[Array, "B S G I"],
    parameters: Parameters,
    tuning: Tuning | None = None,
) -> Float[Array, "B S G F"]:
    """`ops.ssd.Implementation.mixer`. Its residuals are the inputs. The backward pass recomputes
    the rest, with a scan that also writes the states that its gradients need. Without `tuning` the
    sizes of the kernels are those for the mesh's GPUs."""
    return _mixer(dims, tuning, projected, parameters)


def _forward(dims, projected, parameters, tuning):
    return _mixer(dims, tuning, projected, parameters), (projected, parameters)


def _backward(dims, tuning, inputs, cotangent):
    return jax.vjp(partial(_mixer, dims, tuning), *inputs)[1](cotangent)


mixer.defvjp(_forward, _backward)


def _mixer(dims: Dims, tuning: Tuning | None, projected, parameters: Parameters):
    tuning = tuning or tuning_of_mesh()
    u = conv_silu(dims, projected, parameters.taps, parameters.bias)
    with jax.named_scope(SCAN):
        dt, a = _times(dims, projected, parameters)
        y = scan(tuning, dims, u, dt, a, parameters.d.reshape(-1))
    return gate_norm(dims, y, projected, parameters.gain)


def _times(dims: Dims, projected, parameters: Parameters):
    """(dt `B A S`, a `A`), fp32."""
    raw = projected[..., -dims.heads :].astype(jnp.float32)
    dt = jax.nn.softplus(raw + parameters.dt_bias)
    dt = jnp.moveaxis(dt.reshape(*dt.shape[:2], -1), 1, 2)
    return dt, -jnp.exp(parameters.a_log).reshape(-1)
