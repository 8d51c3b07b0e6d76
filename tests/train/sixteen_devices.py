"""Loss and gradients with experts on eight devices and another axis of two, next to one device.

    PYTHONPATH=.:tests python tests/train/sixteen_devices.py [AXIS ..]

A program of its own, since it has sixteen devices and other tests have eight. It compares all axes,
or those named: a nightly test of each.
"""

import sys
from functools import cache

import jax
from steps import assert_same, same_sequences
from tiny import tiny_run

QWEN, GPT_OSS = ("qwen3_30b_a3b_bf16",), ("gpt_oss_120b_bf16", "model.layers=2")
CASES = {
    "data": QWEN,
    "fsdp": QWEN,
    "context": GPT_OSS,
    "tensor": GPT_OSS,
    # A dense layer before the stages, multi-token prediction behind them.
    "pipeline": ("deepseek_v3_bf16",),
}
"""Family and overrides by the other axis."""


@cache
def gradients_of(family: tuple[str, ...], *mesh: str):
    """Loss and gradients of a tiny run on a mesh, or on one device."""
    name, *changes = family
    changes += ["batch.global_batch=16", "precision.accumulate=fp32", "model.experts.count=16"]
    return same_sequences(tiny_run(*changes, *mesh, devices=16 if mesh else 1, family=name))


def main() -> None:
    """Compares every case; raises AssertionError for a difference."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 16)
    for axis in sys.argv[1:] or CASES:
        family = CASES[axis]
        mesh = ["parallelism.expert=8", f"parallelism.{axis}=2"]
        actual = gradients_of(family, *(mesh if axis != "data" else mesh[:1]))
        # Sums over 512 tokens, in another order on each mesh.
        assert_same(actual, gradients_of(family), roundings=300)
        print(f"expert 8 x {axis} 2: {family[0]}", flush=True)


if __name__ == "__main__":
    main()
