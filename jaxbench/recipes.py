"""Recipes: configs/*.yaml, resolved for a number of GPUs into a `Run`.

A recipe names a model, holds what all of its rows share, and a table of rows, one per GPU count. A
row is given in the short names of `ROW_KEYS`; it may also hold whole sections. Everything is
checked here, before any slow work.
"""

import difflib
import types
import typing
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxbench.config import (
    Batch,
    Execution,
    ModelConfig,
    Optimizer,
    Parallelism,
    Precision,
    RecipeError,
    Run,
)
from jaxbench.models import MODELS

SECTIONS = {
    "model": ModelConfig,
    "parallelism": Parallelism,
    "precision": Precision,
    "batch": Batch,
    "optimizer": Optimizer,
    "execution": Execution,
}
ROW_KEYS = {
    "layers": ("model", "layers"),
    "fsdp": ("parallelism", "fsdp"),
    "expert": ("parallelism", "expert"),
    "context": ("parallelism", "context"),
    "tensor": ("parallelism", "tensor"),
    "sequence_length": ("batch", "sequence_length"),
    "microbatch": ("batch", "microbatch"),
    "global_batch": ("batch", "global_batch"),
    "remat": ("execution", "remat"),
}
SMOKE = "smoke"


@dataclass(frozen=True)
class Recipe:
    """A recipe as it was read: `shared` sections, and `rows` by GPU count or `smoke`."""

    name: str
    model: str
    shared: dict[str, dict]
    rows: dict[int | str, dict]

    def row_names(self) -> str:
        """The rows there are, for a message."""
        return ", ".join(map(str, self.rows))


@dataclass(frozen=True)
class Override:
    """One `--set` entry: its text, and what it sets."""

    text: str
    section: str
    name: str
    value: Any


def config_folder() -> Path:
    """Where the recipes lie: inside an installed package, or beside it in a source tree."""
    installed = Path(__file__).parent / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "configs"


def load(path: str | Path) -> Recipe:
    """Reads a recipe file. Raises RecipeError for a missing file, broken YAML or an unknown key."""
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        names = ", ".join(sorted(p.stem for p in config_folder().glob("*.yaml")))
        raise RecipeError(
            f"{path}: {error.strerror}; recipes in {config_folder()}: {names}"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: expected a mapping with model, rows and sections")
    sections = [s for s in SECTIONS if s != "model"]
    for key in content:
        _known(key, ["model", "rows", *sections], f"{path}")
    model, rows = content.get("model"), content.get("rows")
    if model not in MODELS:
        raise RecipeError(f"{path}: model is {model!r}; expected one of {', '.join(MODELS)}")
    if not isinstance(rows, dict) or not rows:
        raise RecipeError(f"{path}: rows must map GPU counts and 'smoke' to settings")
    for name, row in rows.items():
        if not (name == SMOKE or isinstance(name, int)) or not isinstance(row, dict):
            raise RecipeError(
                f"{path}: row {name!r} must be a GPU count or 'smoke' and hold a mapping"
            )
    shared = {section: content.get(section) or {} for section in sections}
    for section, values in shared.items():
        if not isinstance(values, dict):
            raise RecipeError(f"{path}: {section} must be a mapping")
    return Recipe(path.stem, model, shared, rows)


def choose_row(recipe: Recipe, platform: str, devices: int, gpus: int | None = None) -> int | str:
    """The row for the devices found: the GPU count, or `smoke` on a machine without GPUs.

    Raises RecipeError when `gpus` asks for another number, or when the recipe has no such row.
    """
    found = f"{devices} {'GPU' if platform == 'gpu' else 'CPU device'}{'s' if devices > 1 else ''}"
    if gpus is not None and (platform != "gpu" or gpus != devices):
        raise RecipeError(f"--gpus {gpus} was asked for, but this job sees {found}")
    row = devices if platform == "gpu" else SMOKE
    if row not in recipe.rows:
        raise RecipeError(
            f"recipe {recipe.name} has no row for {found}; its rows are {recipe.row_names()}"
        )
    return row


def resolve(
    recipe: Recipe,
    row: int | str,
    *,
    devices: int | None = None,
    overrides: tuple[Override, ...] = (),
    steps: int = 50,
    seed: int = 0,
) -> Run:
    """The run of one row with `--set` overrides applied; `devices` is needed for the smoke row
    only."""
    values = {name: dict(section) for name, section in {"model": {}, **recipe.shared}.items()}
    where = f"recipe {recipe.name}, row {row}"
    for key, value in recipe.rows[row].items():
        _known(key, [*ROW_KEYS, *SECTIONS], where)
        if key in ROW_KEYS:
            section, name = ROW_KEYS[key]
            values[section][name] = value
        else:
            values[key].update(value)
    for override in overrides:
        values[override.section][override.name] = override.value
    published = MODELS[recipe.model]
    values["model"] = asdict(published) | values["model"]
    built: dict[str, Any] = {
        name: _build(cls, values[name], f"{where}: {name}") for name, cls in SECTIONS.items()
    }
    return Run(
        recipe=recipe.name,
        row=str(row),
        label="smoke" if row == SMOKE else "full" if built["model"] == published else "proxy",
        gpus=row if isinstance(row, int) else devices or 1,
        steps=steps,
        seed=seed,
        overrides=tuple(override.text for override in overrides),
        **built,
    )


def describe(run: Run) -> dict[str, Any]:
    """The run as plain values, with what follows from it, for records and golden files."""
    values = asdict(run)
    values["parallelism"] = {"data": run.data, **values["parallelism"]}
    values["batch"] |= {"microbatch": run.microbatch, "accumulation": run.accumulation}
    return values


def parse_overrides(texts: list[str]) -> tuple[Override, ...]:
    """`section.key=value` entries of the command line. Raises RecipeError for an unknown key."""
    keys = [f"{section}.{f.name}" for section, cls in SECTIONS.items() for f in fields(cls)]
    overrides = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise RecipeError(f"--set {text}: expected key=value, such as parallelism.fsdp=4")
        _known(key, keys, "--set")
        try:
            section, name = key.split(".")
            overrides.append(Override(text, section, name, yaml.safe_load(value)))
        except yaml.YAMLError as error:
            raise RecipeError(f"--set {text}: cannot read the value {value!r}") from error
    return tuple(overrides)


def _known(key: Any, allowed: list[str], where: str) -> None:
    if key not in allowed:
        close = difflib.get_close_matches(str(key), allowed, n=1, cutoff=0.0)
        raise RecipeError(f"{where}: unknown key {key!r}; did you mean {close[0]!r}?")


def _build(cls: type, values: dict[str, Any], where: str) -> Any:
    """The dataclass from plain values; checks names and types."""
    hints = typing.get_type_hints(cls)
    for key in values:
        _known(key, list(hints), where)
    missing = [
        f.name for f in fields(cls) if f.name not in values and f.default is f.default_factory
    ]
    if missing:
        raise RecipeError(f"{where}: missing {', '.join(missing)}")
    return cls(
        **{key: _convert(value, hints[key], f"{where}.{key}") for key, value in values.items()}
    )


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as the annotated type, or RecipeError."""
    options = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return None if value is None else _convert(value, options[0], where)
    if typing.get_origin(hint) is typing.Literal:
        if value in options:
            return value
        raise RecipeError(f"{where} = {value!r}: expected one of {', '.join(options)}")
    if isinstance(hint, type) and is_dataclass(hint):
        if not isinstance(value, dict):
            raise RecipeError(f"{where} = {value!r}: expected a mapping")
        return _build(hint, value, where)
    if hint is str and isinstance(value, list):
        return ",".join(map(str, value))
    if hint is float and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-5 as text
        except (TypeError, ValueError):
            pass
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise RecipeError(f"{where} = {value!r}: expected {hint.__name__}, got {type(value).__name__}")
