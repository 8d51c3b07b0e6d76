"""What XLA's scheduler cannot know: how long a kernel of another library takes."""

from contextlib import AbstractContextManager

from jax.experimental.xla_metadata import set_xla_metadata

from jaxbench import hardware


def of_product(flops: int, dtype: str) -> AbstractContextManager:
    """The custom calls made inside take as long as these FLOPs at the H100's peak for `bf16` or
    `fp8`: the scheduler, which takes a custom call for free, places collectives beside them."""
    least_ns = flops / (hardware.H100.tflops[dtype] * 1e3)
    return set_xla_metadata(latency_metadata=str(round(least_ns)))
