"""The model families, a file of dimensions for each; `MODELS` is their registry.

A new family is a file with its `ModelConfig`s and a line here.
"""

from jaxbench.recipe.families import deepseek, gpt_oss, grok, llama, nemotron, qwen

MODELS = {
    f"{cfg.family.replace('.', '')}_{cfg.size}": cfg
    for family in (llama, grok, nemotron, qwen, deepseek, gpt_oss)
    for cfg in family.MODELS
}
