"""Why a forecast differs from the published step of another program.

`docs/forecast.md` has the same sentences, with links.
"""

from typing import Any, NamedTuple

from jaxbench.recipe.settings import BLOCKS


class Reason(NamedTuple):
    """What differs between the programs, and what is uncertain in the forecast; both may be
    empty."""

    differs: str = ""
    uncertain: str = ""


SENT = Reason(
    "Ours gathers the weights of experts for many sequences at once; the published programs send "
    "tokens, in pipelines",
    "grouped matmuls, and large rings next to matmuls",
)
REASONS = {
    "llama2 70b bf16": Reason(
        "The mesh is the same. In bf16 ours recomputes nothing, with activations in host memory"
    ),
    "llama2 70b fp8": Reason(
        "The mesh is the same. In FP8 ours reduces the amax once per step, the published program "
        "in each layer"
    ),
    "gpt3": Reason(
        "The mesh is the same. The published program is of March 2024; in 175B it recomputes "
        "attention and a third of the matmuls, ours nothing"
    ),
    "llama3.1 8b": Reason("Ours recomputes nothing, and has no context axis"),
    "llama3.1 70b": Reason(
        "FSDP and offloaded activations here; tensor parallelism and a pipeline there"
    ),
    "llama3.1 405b": Reason(
        "The published mesh leaves weights where they are; ours gathers them in rings of up to 512 "
        "GPUs",
        "latencies of large rings",
    ),
    "grok1": Reason(
        "The published tables are from an early release; figures of a year later are far better",
        "grouped matmuls",
    ),
    "nemotron4": Reason(
        "The pipeline is another one; what ours loses is counted. On GB200 ours has no pipeline",
        "attention with a width of 192",
    ),
    "nemotronh": Reason(
        "Ours has Mamba-2 in fused kernels. The published program improved later",
        "the scan was timed on Hopper only",
    ),
    "qwen3": SENT,
    "nemotron3 nano_30b_a3b": SENT,
    "gpt_oss": Reason(
        "The published program has a pipeline with one sequence at a time; ours takes many at once",
        "attention in windows, which no GPU has timed",
    ),
    "deepseek": Reason(
        "The published program has tensor parallelism, a pipeline and experts on 64 ranks; ours "
        "keeps all-to-alls inside a node",
        "attention with widths of 192 and 128, grouped matmuls",
    ),
    "kimi": Reason(
        "As DeepSeek-V3. The published program trains with Muon, which multiplies matrices (2.5 % "
        "of the model's FLOPs); ours has AdamW",
        "as DeepSeek-V3",
    ),
    "nemotron3 super_120b_a12b": Reason(
        "", "grouped matmuls with narrow experts, of which no table exists"
    ),
}  # fmt: skip
"""By the beginning of family, size and dtype."""

BLOCK_SCALED = Reason(
    "Some published programs have attention in FP8, or kernels that compute and send at the same "
    "time",
    "attention and block-scaled matmuls of Blackwell, partly from tables of other GPUs",
)


def reason(settings: dict[str, Any]) -> Reason:
    """The reason for a row of a recipe, from its resolved settings. Empty if somebody changed the
    row, since it may then be another one."""
    model, dtype = settings["model"], settings["precision"]["dtype"]
    if settings["overrides"]:
        return Reason()
    if dtype in BLOCKS:
        return BLOCK_SCALED
    work = f"{model['family']} {model['size']} {dtype}"
    return next((r for name, r in REASONS.items() if work.startswith(name)), Reason())
