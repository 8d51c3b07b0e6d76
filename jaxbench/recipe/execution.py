"""Settings that decide how a run is computed: what is saved for the backward pass, implementations
of operators, compiler options. The string below a field is its meaning in the table of settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from jaxbench.recipe.checks import positive, require

SAVEABLE = (
    "latent", "query", "key", "value", "attention", "residual", "dispatched", "gate", "up", "mamba",
)  # fmt: skip
"""The activations that a remat policy can save, in the order in which a layer computes them.
`latent` are the latents of latent attention, from which queries, keys and values are projected, and
the sum of experts in a latent space. `dispatched` are the permuted tokens that the experts of a
rank receive. `mamba` is the input of a Mamba-2 mixer's output projection."""

INPUT = "input"
"""The input of each block of layers, which every remat policy saves. Only `offload` uses this
name."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the model is computed. These settings change speed and memory, not the result, except for
    rounding and for the tokens that dropless experts drop."""

    remat: str = "full"
    """what is saved for the backward pass. `none` saves all activations, `full` only the input of
    each layer. A list saves the activations that it names: `query,key,value,attention,residual:24`
    saves `residual` in the first 24 layers (if a repeated block has several layers, in its repeats
    within the first 24). With `none`, outside a pipeline, layers are not scanned, and gathered
    weights are saved too: this is fastest if all of it fits, and slower to compile"""
    offload: str = "none"
    """activations to save in the host's memory, in layers where `remat` does not save them: `none`,
    or a list like `remat`'s, such as `gate,up:64`. `input` is the input of each repeated block,
    which every `remat` except `none` saves. Copies to the host and back run alongside the matmuls
    of the layers (docs/design/offload.md)"""
    attention: Literal["auto", "cudnn", "xla"] = "auto"
    """attention implementation; `auto` is cuDNN on GPUs, except in fp32"""
    ssd: Literal["auto", "pallas", "xla"] = "auto"
    """the part of Mamba-2 between its projections (docs/design/scan.md); `auto` is Pallas kernels
    on GPUs where they can compute the model's mixers"""
    grouped_matmul: Literal["auto", "pallas", "xla"] = "auto"
    """grouped matmuls of dropless experts: `xla` copies an expert's weights for each block of 128
    tokens; `auto` is Pallas kernels on GPUs where they can multiply"""
    expert_parts: int = 1
    """parts of a microbatch that the experts of a layer compute one after the other. The exchanges
    of one part are then hidden behind the matmuls of another. Each part has its own slots of
    dropless experts, and its own FP8 scales of inputs and gradients"""
    replica_sums: Literal["step", "layer"] = "step"
    """when the gradients of layers are summed over the axis `data`: once per `step`, or in each
    `layer` as they arise, in every microbatch and in bf16, alongside the matmuls of other layers
    (docs/design/sharding.md). Not in a pipeline"""
    xla_flags: str = "tuned"
    """compiler options: `tuned`, `guided` or `default` (docs/reference/xla_flags.md),
    and changes: `tuned,xla_gpu_some_flag=false`"""

    def __post_init__(self) -> None:
        positive("execution.", self, "expert_parts")

    def saved(self, layers: int) -> dict[str, int] | None:
        """The number of layers that save each named activation; None without remat."""
        if self.remat in ("none", "full"):
            return None if self.remat == "none" else {}
        return _layer_counts("remat", self.remat, layers, "none, full, or ")

    def offloaded(self, layers: int) -> dict[str, int]:
        """The number of layers that save each named activation in host memory, unless they save it
        in the device's memory."""
        if self.offload == "none":
            return {}
        require(
            self.remat != "none", "execution.offload: remat = none saves everything on the device"
        )
        names = INPUT, *SAVEABLE
        counts = _layer_counts("offload", self.offload, layers, "none, or ", names)
        kept = "execution.offload: kernels keep attention on the device; name it in execution.remat"
        require("attention" not in counts, kept)
        return counts


@cache
def _layer_counts(
    setting: str, text: str, layers: int, others: str, names: Sequence[str] = SAVEABLE
) -> dict[str, int]:
    """The number of layers for each activation of a list: `query,residual:40`."""
    counts = {}
    for entry in text.split(","):
        name, colon, count = entry.strip().partition(":")
        require(
            name in names and bool(colon) == count.isdecimal(),
            f"execution.{setting}: cannot read {entry.strip()!r}; expected {others}some of "
            f"{', '.join(names)}, each with an optional layer count: residual:40",
        )
        counts[name] = min(int(count or layers), layers)
    return counts
