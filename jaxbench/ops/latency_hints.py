"""Latencies of custom calls. XLA's scheduler assumes that these calls take no time."""

from contextlib import AbstractContextManager

from jax.experimental.xla_metadata import set_xla_metadata

from jaxbench.base import hardware


def of_product(flops: int, dtype: str) -> AbstractContextManager:
    """Marks the custom calls that are traced inside with the time that their `flops` take at the
    GPU's peak, so that the scheduler overlaps collectives with them. The GPU is the H100, or the
    B200 for a `dtype` that the H100 lacks."""
    gpu = hardware.H100 if dtype in hardware.H100.tflops else hardware.B200
    least_ns = flops / (gpu.tflops[dtype] * 1e3)
    return set_xla_metadata(latency_metadata=str(round(least_ns)))
