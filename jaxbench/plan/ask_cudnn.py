"""Asks the real cuDNN without a GPU whether it computes an attention, and in how much memory.

If it is told to (`OPTIONS`), XLA asks cuDNN while it compiles for an absent GPU. The compiled
program then has cuDNN's workspaces, and a call that cuDNN refuses does not compile.
"""

import re
from dataclasses import replace

from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import Gpu
from jaxbench.plan import stubs
from jaxbench.xla.flags import Options

OPTIONS: Options = {
    "xla_gpu_cudnn_deviceless_compilation_mode": "CUDNN_DEVICELESS_COMPILATION_ALWAYS"
}

PROPERTIES = (
    '\\",\\"memoryBusWidth\\":{},\\"oversizedSharedMemoryPerBlock\\":0,\\"smCountOrigin\\":0,'
    '\\"cudaRuntimeVer\\":13000,\\"x\\":\\"'
)
"""Fields of a GPU that cuDNN needs and XLA leaves out of its JSON. We put them into it as the end
of the GPU's name."""


def for_compiler(gpu: Gpu) -> tuple[Gpu, Options]:
    """The GPU as cuDNN has to see it, and the compiler options with which XLA asks cuDNN. If cuDNN
    cannot be asked, the same GPU and no options."""
    if stubs.load():
        return gpu, {}
    bus = 5120 if gpu.capability < (10, 0) else 8192
    return replace(gpu, device=f"{gpu.device} {PROPERTIES.format(bus)}"), OPTIONS


def refusals(error: Exception) -> list[str]:
    """cuDNN's own words for why it refused a call, taken from an error of the compiler."""
    return [reason.replace("|", "") for reason in re.findall(r"Reason: (.*)", str(error))]


def refusal(error: Exception, gpu: Gpu) -> RecipeError | None:
    """The error to raise if cuDNN refuses an attention on a GPU; None for another error."""
    reasons = refusals(error)
    if not reasons:
        return None
    capability = ".".join(map(str, gpu.capability))
    return RecipeError(
        f"execution.attention: cuDNN refuses this attention on {gpu.name} (compute capability "
        f"{capability}): {reasons[0]}; try --set execution.attention=xla"
    )
