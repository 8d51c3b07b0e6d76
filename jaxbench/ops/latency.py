"""Latencies of custom calls for XLA's scheduler, which assumes that they take no time."""

from contextlib import AbstractContextManager

from jax.experimental.xla_metadata import set_xla_metadata

from jaxbench import hardware


def of_product(flops: int, dtype: str) -> AbstractContextManager:
    """Marks the custom calls traced inside with the time of these FLOPs at the peak of the H100, or
    of the B200 for a `dtype` that the H100 has not, so that the scheduler overlaps collectives with
    them."""
    gpu = hardware.H100 if dtype in hardware.H100.tflops else hardware.B200
    least_ns = flops / (gpu.tflops[dtype] * 1e3)
    return set_xla_metadata(latency_metadata=str(round(least_ns)))
