"""The context of a forward pass: rotary tables, and which implementations compute it."""

from jaxtyping import Array, Int

from jaxbench import mesh
from jaxbench.base.hardware import Capability
from jaxbench.models.layers import ForwardContext, rotary_tables
from jaxbench.ops import attention, grouped, ssd
from jaxbench.recipe.execution import Execution
from jaxbench.recipe.model import ModelConfig
from jaxbench.recipe.settings import Precision


def forward_context(
    cfg: ModelConfig,
    length: int,
    execution: Execution,
    precision: Precision,
    first_sequence: Int[Array, ""] | int = 0,
) -> ForwardContext:
    """The context of a forward pass over sequences of `length` tokens, on the current mesh."""
    shards, mixer = mesh.ranks("seq"), cfg.attention_mixer
    chosen = implementations(
        cfg, length, shards, execution, precision, mesh.platform(), mesh.capability()
    )
    return ForwardContext(
        rotary=rotary_tables(mixer, length) if mixer else None,
        kernel=chosen["kernel"],
        ssd=chosen["ssd"],
        grouped_matmul=chosen["grouped_matmul"],
        expert_parts=execution.expert_parts,
        first_sequence=first_sequence,
    )


def implementations(
    cfg: ModelConfig,
    length: int,
    shards: int,
    execution: Execution,
    precision: Precision,
    platform: str,
    capability: Capability | None,
) -> dict[str, str]:
    """The names of the implementations that compute a model, by their fields of `ForwardContext`.

    A sequence of `length` tokens lies on `shards` ranks. `capability` is the compute capability of
    the GPUs, if it is known. Raises RecipeError if a requested implementation cannot compute the
    model.
    """
    dtype = precision.dtype
    return {
        "kernel": attention.choose(execution, cfg, dtype, length, platform, capability),
        "ssd": ssd.choose(execution, cfg, dtype, length // shards, platform),
        "grouped_matmul": grouped.choose(execution, cfg, dtype, platform),
    }
