"""docs/reference/settings.md is what the code says: the fields of settings and the strings below
them, as Markdown."""

import ast
import inspect
import json
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from jaxbench.recipe.recipes import SECTIONS

FILE = Path(__file__).parents[2] / "docs/reference/settings.md"
HEADING = """# Settings

This page lists every `section.key` of a recipe and of `--set section.key=value`.
`pytest --write-golden` rewrites it from the code (`tests/recipe/test_reference.py`).

Some keys need no section in rows of `configs/*.yaml`.
They are `layers`, `remat`, and the keys of `parallelism` and `batch`.

Values are YAML 1.2:

- `true` and `false` are the only booleans.
- `0100` is one hundred, `0x10` is 16, and `1e3` is a float.
- `yes`, `1:30` and `1_000` are text.

A key that occurs twice in a mapping is an error.
So is a setting that a row gives both with its section and without.
"""


def reference() -> str:
    """The text of docs/reference/settings.md: one table per section."""
    tables = [f"## {name}\n\n{_table(cls, name)}" for name, cls in SECTIONS.items()]
    return "\n".join([HEADING, *tables])


def _table(cls: type, prefix: str) -> str:
    about = " ".join((cls.__doc__ or "").split())
    lines = [about, "", "| key | type | default | meaning |", "|---|---|---|---|"]
    lines += _lines(cls, prefix)
    return "\n".join(lines) + "\n"


def _lines(cls: type, prefix: str) -> list[str]:
    meanings = _meanings(cls)
    hints = inspect.get_annotations(cls, eval_str=True)
    lines = []
    for field in fields(cls):
        key, hint = f"{prefix}.{field.name}", hints[field.name]
        default = "" if field.default is MISSING else f"`{_shown(field.default)}`"
        lines.append(f"| `{key}` | {_type(hint)} | {default} | {meanings[field.name]} |")
        nested = next((t for t in getattr(hint, "__args__", ()) if is_dataclass(t)), None)
        lines += _lines(nested, key) if isinstance(nested, type) else []
    return lines


def _meanings(cls: type) -> dict[str, str]:
    """The string literal below each field. Raises KeyError, in `_lines`, for a field without."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    meanings: dict[str, str] = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    meanings[field.target.id] = " ".join(text.split())
    return meanings


def _type(hint: Any) -> str:
    """A type as in a recipe: values of a Literal, `null` for None, a mapping for a dataclass."""
    parts = [hint]
    if type(None) in (args := getattr(hint, "__args__", ())):
        parts = [*(part for part in args if part is not type(None)), None]
    return " or ".join(_part(part) for part in parts)


def _part(hint: Any) -> str:
    if hint is None:
        return "`null`"
    if not isinstance(hint, type):
        return ", ".join(f"`{value}`" for value in hint.__args__)
    return "mapping" if is_dataclass(hint) else hint.__name__


def _shown(value: Any) -> str:
    """A value as in YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def test_the_reference_of_settings_is_current(request):
    text = reference()
    if request.config.getoption("--write-golden"):
        FILE.write_text(text)
    assert FILE.read_text() == text, "pytest --write-golden rewrites it"
