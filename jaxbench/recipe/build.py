"""Makes dataclasses from plain values: settings from YAML, where a mistake gives a message of one
line, and records."""

import contextlib
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import repeat
from typing import Any

from jaxbench.base.errors import RecipeError, meant

LARGEST = 2**31 - 1
"""The largest integer setting, since array indices are int32."""


def setting_names(cls: Any, prefix: str) -> Iterator[str]:
    """The names of all settings of a dataclass, including the settings inside of settings."""
    for name, hint in typing.get_type_hints(cls).items():
        yield prefix + name
        for option in (hint, *typing.get_args(hint)):
            if is_dataclass(option):
                yield from setting_names(option, f"{prefix}{name}.")


def build(cls: type, values: dict, where: str) -> Any:
    """A dataclass from the plain values of a recipe. Raises RecipeError for an unknown name, a
    missing one and a value of another type."""
    hints = typing.get_type_hints(cls)
    for key in values:
        check_key(key, list(hints), where)
    if missing := _missing(cls, values):
        raise RecipeError(f"{where}: missing {', '.join(missing)}")
    return cls(
        **{key: _convert(value, hints[key], f"{where}.{key}") for key, value in values.items()}
    )


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as the annotated type. Raises RecipeError if it has another type."""
    options = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return None if value is None else _convert(value, options[0], where)
    if typing.get_origin(hint) is typing.Literal:
        if value in options:
            return value
        raise RecipeError(f"{where} = {shown(value)}: expected one of {', '.join(options)}")
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, mapping(value, where), where)
    if hint is str and isinstance(value, list) and all(isinstance(part, str) for part in value):
        return ",".join(value)
    if not _is(hint, value):
        expected = "true or false" if hint is bool else hint.__name__
        got = type(value).__name__
        raise RecipeError(f"{where} = {shown(value)}: expected {expected}, got {got}")
    if hint is int and abs(value) > LARGEST:
        raise RecipeError(f"{where} is too large: at most {LARGEST}")
    if hint is float:
        with contextlib.suppress(OverflowError):
            if math.isfinite(number := float(value)):
                return number
        raise RecipeError(f"{where} = {shown(value)}: expected a finite number")
    return value


def restored(kind: Any, value: Any) -> Any:
    """A value of the type `kind` from the JSON of a record, which `asdict` made. `kind` is a
    dataclass, or a type that holds some. Raises TypeError for a value of another type, and for
    missing or unexpected fields; ValueError for a tuple of another length."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is types.UnionType:
        *others, last = sorted(inner, key=lambda option: option is not types.NoneType)
        for option in others:
            with contextlib.suppress(TypeError):
                return restored(option, value)
        return restored(last, value)  # its error is about the type, not about null
    plain = dict if is_dataclass(kind) else list if origin is tuple else origin or kind
    if isinstance(plain, type) and not _is(plain, value):
        raise TypeError(f"expected {plain.__name__}, got {shown(value)}")
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if other := value.keys() - hints.keys():
            raise TypeError(f"unexpected field {min(other)!r}")
        if missing := _missing(kind, value):
            raise TypeError(f"missing field {missing[0]!r}")
        return kind(**{name: restored(hints[name], of) for name, of in value.items()})  # type: ignore[operator]
    if origin is list:
        return [restored(inner[0], of) for of in value]
    if origin is tuple:
        kinds = repeat(inner[0], len(value)) if inner[-1] is Ellipsis else inner
        return tuple(restored(of_kind, of) for of_kind, of in zip(kinds, value, strict=True))
    return {key: restored(inner[1], of) for key, of in value.items()} if origin is dict else value


def _missing(cls: Any, values: dict) -> list[str]:
    """Fields of a dataclass that have no default and no value."""
    return [f.name for f in fields(cls) if f.name not in values and f.default is f.default_factory]


def _is(plain: type, value: Any) -> bool:
    """True for a value of a plain type. A whole number may stand for a float, but not a bool for a
    number."""
    if isinstance(value, bool):
        return plain is bool
    return isinstance(value, int | float if plain is float else plain)


def check_key(key: Any, allowed: list[str], where: str) -> None:
    """Raises RecipeError with the nearest name unless the key is allowed."""
    if key not in allowed:
        near = meant(shown(key), allowed, cutoff=0.0)
        raise RecipeError(f"{where}: unknown key {shown(key)}{near}")


def mapping(value: Any, where: str) -> dict:
    """The value, which must be a mapping. Raises RecipeError if it is not."""
    if not isinstance(value, dict):
        raise RecipeError(f"{where} must be a mapping, not {shown(value)}")
    return value


def shown(value: Any) -> str:
    """A user's value in a message: short, on one line."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print numbers with thousands of digits
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of all values in nested mappings, except None."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else key)
    elif value is not None:
        yield name, value


def differing(
    settings: dict[str, Any], other: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value, other value) of the settings that are in both nested mappings and
    differ."""
    for name, value in settings.items():
        if isinstance(value, dict) and isinstance(other.get(name), dict):
            yield from differing(value, other[name], f"{prefix}{name}.")
        elif name in other and value != other[name]:
            yield prefix + name, value, other[name]


def merged(settings: dict, changes: dict) -> dict:
    """The settings with changes. Mappings inside of mappings are merged too."""
    result = dict(settings)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = merged(old, value)
        result[key] = value
    return result
