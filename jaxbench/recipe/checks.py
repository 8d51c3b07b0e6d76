"""Checks of settings. Each raises RecipeError with a message of one line."""

from typing import Any

from jaxbench.base.errors import RecipeError


def require(condition: object, message: str) -> None:
    """Raises RecipeError with the message unless the condition holds."""
    if not condition:
        raise RecipeError(message)


def positive(prefix: str, settings: Any, *names: str) -> None:
    """Requires settings above zero; with the prefix `--`, options. None passes."""
    for name in names:
        value = getattr(settings, name)
        shown = name.replace("_", "-") if prefix == "--" else name
        require(value is None or value > 0, f"{prefix}{shown} = {value} must be above 0")


def not_negative(prefix: str, settings: Any, *names: str) -> None:
    """Requires settings of zero or more."""
    for name in names:
        value = getattr(settings, name)
        require(value >= 0, f"{prefix}{name} = {value} must not be negative")


def divides(divisor: str, size: int, name: str, value: int) -> None:
    """Requires that `size`, which `divisor` names, divides the value of the setting `name`."""
    require(value % size == 0, f"{divisor} = {size} must divide {name} = {value}")
