"""What people call a model, a precision and GPUs."""

from typing import Any

from jaxbench.base.errors import counted

FAMILIES = {
    "deepseek": "DeepSeek-", "gpt3": "GPT-3", "gpt_oss": "GPT-OSS", "grok1": "Grok-1",
    "kimi": "Kimi", "llama2": "Llama 2", "llama3.1": "Llama 3.1", "nemotron3": "Nemotron 3",
    "nemotron4": "Nemotron-4", "nemotronh": "Nemotron-H", "qwen3": "Qwen3",
}  # fmt: skip
"""The names of families in titles. A name that ends with a hyphen has no space after it."""


def model_name(family: str, size: str) -> str:
    """`Llama 3.1 8B`, `Qwen3 30B-A3B`, `DeepSeek-V3`."""
    name = FAMILIES.get(family, family)
    *words, last = size.split("_")
    if words and last.startswith("a"):
        last = f"{words.pop()}-{last}".upper()
    else:
        last = last.upper()
    space = "" if name.endswith("-") else " "
    return name + space + " ".join([*(word.capitalize() for word in words), last])


def precision_name(dtype: str) -> str:
    """`bf16`, and `FP8` or another format in capital letters."""
    return dtype if dtype == "bf16" else dtype.upper()


def work_name(settings: dict[str, Any]) -> str:
    """The work of resolved settings: `Llama 2 70B in bf16`."""
    model, dtype = settings["model"], settings["precision"]["dtype"]
    return f"{model_name(model['family'], model['size'])} in {precision_name(dtype)}"


def gpus_name(gpus: int, gpu: str) -> str:
    """`64 H100s`."""
    return counted(gpus, gpu.upper())
