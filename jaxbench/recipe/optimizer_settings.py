"""Settings of the optimizer."""

from dataclasses import dataclass
from typing import Literal

from jaxbench.recipe.checks import not_negative, positive, require


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW with betas 0.9 and 0.95 and clipping at global norm 1, as in every published benchmark.
    `train.optimizer` has the formulas of the schedules."""

    schedule: Literal["cosine", "megatron", "wsd"]
    """linear warm-up, then a decay. `cosine` is that of MaxText and Megatron Core. `megatron` is
    NeMo's, whose warm-up starts above 0. `wsd` is Nemotron 3 Super's, which decays with the root of
    the time"""
    learning_rate: float
    """peak learning rate"""
    final_learning_rate: float
    """learning rate at the end of the decay"""
    warmup: float
    """steps of warm-up, or a fraction of the run if below 1"""
    eps: float
    """epsilon of AdamW"""
    weight_decay: float = 0.1
    """weight decay; each step multiplies it by the learning rate"""
    decay_vectors: bool
    """norm gains are decayed too, as in MaxText"""
    constant: int = 0
    """number of last steps that stay at the final learning rate"""
    moments: Literal["fp32", "bf16"] = "fp32"
    """dtype in which AdamW's moments are kept between steps; they are computed in fp32"""

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of the weights, in fp32, and of the moments."""
        return 12 if self.moments == "fp32" else 8

    def __post_init__(self) -> None:
        positive("optimizer.", self, "eps")
        not_negative(
            "optimizer.", self, "learning_rate", "final_learning_rate", "warmup", "weight_decay",
            "constant",
        )  # fmt: skip
        require(
            self.schedule != "wsd" or not self.constant,
            f"optimizer.constant = {self.constant}: wsd has no constant tail; expected 0",
        )

    def warmup_steps(self, steps: int) -> int:
        """The length of the warm-up, in steps, in a run of `steps`."""
        return int(self.warmup * steps) if self.warmup < 1 else int(self.warmup)
