"""Latencies of custom calls for XLA's scheduler, which assumes that they take no time."""

from contextlib import AbstractContextManager

from jax.experimental.xla_metadata import set_xla_metadata

from jaxbench import hardware


def of_product(flops: int, dtype: str) -> AbstractContextManager:
    """Marks the custom calls traced inside with the time of these FLOPs at the H100's peak for
    `bf16` or `fp8`, so that the scheduler overlaps collectives with them."""
    least_ns = flops / (hardware.H100.tflops[dtype] * 1e3)
    return set_xla_metadata(latency_metadata=str(round(least_ns)))
