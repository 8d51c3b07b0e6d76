"""Checks of settings by name; each raises RecipeError with one line."""

from typing import Any

from jaxbench.errors import RecipeError


def positive(where: str, settings: Any, *names: str) -> None:
    """Settings, or options (`--`), that must be above zero; None passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            shown = name.replace("_", "-") if where == "--" else name
            raise RecipeError(f"{where}{shown} = {value} must be above 0")


def not_negative(where: str, settings: Any, *names: str) -> None:
    """Settings that must be zero or more."""
    for name in names:
        value = getattr(settings, name)
        if not value >= 0:
            raise RecipeError(f"{where}{name} = {value} must not be negative")


def divides(divisor: str, size: int, name: str, value: int) -> None:
    """A size that must divide another one."""
    if value % size:
        raise RecipeError(f"{divisor} = {size} must divide {name} = {value}")
