"""Reads a Hugging Face `config.json` of the Llama family as changes to one of our Llama models."""

from dataclasses import asdict
from math import log
from pathlib import Path
from typing import Any

from jaxbench.base.errors import RecipeError
from jaxbench.base.untrusted import read_json
from jaxbench.recipe.build import flat
from jaxbench.recipe.families import MODELS

BASES = ("llama31_8b", "llama31_70b", "llama31_405b")
"""The models whose recipes a `config.json` may use."""


def read(path: Path) -> tuple[str, list[str]]:
    """The model of `BASES` that is nearest in width, and the `--set` entries that make it the one
    of the file.

    Rotary frequencies and epsilons, which change no time, stay as they are. Raises RecipeError for
    a file that cannot be read, and for one of another family.
    """
    try:
        content = read_json(path)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise RecipeError(f"{path}: not valid JSON: {error}") from error
    kind = content.get("model_type") if isinstance(content, dict) else None
    if kind != "llama":
        raise RecipeError(
            f"{path}: model_type is {kind!r}; expected 'llama' (jaxbench list shows other models)"
        )
    for name, value in {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}.items():
        if content.get(name) not in (None, value):
            raise RecipeError(f"{path}: {name} is {content[name]!r}; our Llama has {value!r}")

    def number(name: str, default: int | None = None) -> int:
        value = content.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise RecipeError(f"{path}: {name} is {value!r}; expected a whole number above 0")
        return value

    embed, heads = number("hidden_size"), number("num_attention_heads")
    settings: dict[str, Any] = {
        "model.layers": number("num_hidden_layers"),
        "model.embed": embed,
        "model.vocabulary": number("vocab_size"),
        "model.attention.heads": heads,
        "model.attention.kv_heads": number("num_key_value_heads", heads),
        "model.attention.head_dim": number("head_dim", embed // heads),
        "model.mlp.ffn": number("intermediate_size"),
        "model.tied": bool(content.get("tie_word_embeddings", False)),
    }
    base = min(BASES, key=lambda name: abs(log(MODELS[name].embed / embed)))
    before = dict(flat(asdict(MODELS[base]), "model"))
    return base, [
        f"{key}={str(value).lower()}" for key, value in settings.items() if value != before[key]
    ]
