"""Settings of the optimizer."""

from dataclasses import dataclass
from typing import Literal

from jaxbench.recipe.checks import not_negative, positive


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW with betas 0.9 and 0.95, weight decay 0.1 and clipping at global norm 1, as in every
    published benchmark. `train.optimizer` has the formulas of the schedules."""

    schedule: Literal["maxtext", "megatron"]
    """linear warm-up and cosine decay, by MaxText's or Megatron's formula"""
    learning_rate: float
    """peak learning rate"""
    final_learning_rate: float
    """learning rate at the end of the decay"""
    warmup: float
    """steps of warm-up, or a fraction of the run if below 1"""
    eps: float
    """epsilon of AdamW"""
    decay_vectors: bool
    """weight decay of norm gains too, as in MaxText"""
    constant: int = 0
    """last steps, at the final learning rate"""
    moments: Literal["fp32", "bf16"] = "fp32"
    """dtype in which AdamW's moments are kept between steps; they are computed in fp32"""

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of weights, in fp32, and moments."""
        return 12 if self.moments == "fp32" else 8

    def __post_init__(self) -> None:
        positive("optimizer.", self, "eps")
        not_negative(
            "optimizer.", self, "learning_rate", "final_learning_rate", "warmup", "constant"
        )

    def warmup_steps(self, steps: int) -> int:
        """Length of the warm-up in a run of `steps`."""
        return int(self.warmup * steps) if self.warmup < 1 else int(self.warmup)
