"""Recipes: configs/*.yaml, resolved for a number of GPUs into a `Run`.

A recipe names a model, holds what all of its rows share, and has a table of rows, one per number of
GPUs. A row uses the short names of `ROW_KEYS`; it may also hold whole sections. Rows are sized for
the H100. Another GPU may have a table too, under its name, and its rows replace the rows for the
same number of GPUs (`Recipe.on`). Everything is checked here, before any slow work.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from jaxbench.base import hardware
from jaxbench.base.errors import RecipeError, meant
from jaxbench.recipe import strict_yaml
from jaxbench.recipe.build import LARGEST, build, check_key, mapping, merged, setting_names, shown
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.model import ModelConfig
from jaxbench.recipe.settings import (
    SMOKE_STEPS,
    STEPS,
    Batch,
    Execution,
    Optimizer,
    Parallelism,
    Precision,
    Run,
)

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
    **{f.name: ("parallelism", f.name) for f in fields(Parallelism)},
    **{f.name: ("batch", f.name) for f in fields(Batch)},
    **{name: ("execution", name) for name in ("remat", "offload")},
}
SMOKE = "smoke"


@dataclass(frozen=True)
class Recipe:
    """A recipe as read from its file: `shared` sections, `rows` by number of GPUs or `smoke`, and
    `gpu_rows`, which replace them on a GPU of that name. `derived` are the numbers of GPUs whose
    rows were added by `derived_rows.extend`."""

    name: str
    model: str
    shared: dict[str, dict]
    rows: dict[int | str, dict]
    gpu_rows: dict[str, dict[int | str, dict]] = field(default_factory=dict)
    derived: frozenset[int] = frozenset()

    def on(self, gpu: hardware.Gpu | None) -> "Recipe":
        """The recipe on a GPU: `gpu_rows` replace the rows for the same number of GPUs."""
        return replace(
            self, rows=self.rows | self.gpu_rows.get(gpu.name.lower() if gpu else "", {})
        )

    def row_names(self) -> str:
        """The names of the rows, for a message."""
        return ", ".join(map(str, self.rows))


@dataclass(frozen=True)
class Override:
    """One `--set` entry: its text, and what it sets. If the value is a mapping, it sets settings
    inside a setting."""

    text: str
    section: str
    name: str
    value: Any


def config_folder() -> Path:
    """The folder of recipes. It is inside an installed package, or next to it in a source tree."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def names() -> list[str]:
    """The names of all recipes."""
    return sorted(path.stem for path in config_folder().glob("*.yaml"))


def load_all() -> list[Recipe]:
    """All recipes, sorted by name."""
    return [load(name) for name in names()]


def find(config: str | Path) -> Path:
    """The file of a recipe: the file that is named, or for a bare name the one in
    `config_folder`."""
    path = Path(config)
    by_name = not path.suffix and path.name == str(config)
    return config_folder() / f"{config}.yaml" if by_name else path


def load(config: str | Path) -> Recipe:
    """Reads a recipe that `find` finds. Raises RecipeError for a missing file, broken YAML or an
    unknown key."""
    path = find(config)
    content = _read(path)
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: expected a mapping with model, rows and sections")
    sections = [s for s in SECTIONS if s != "model"]
    for key in content:
        check_key(key, ["model", "rows", *hardware.PLANNED, *sections], f"{path}")
    model = content.get("model")
    if not isinstance(model, str) or model not in MODELS:
        raise RecipeError(f"{path}: model is {shown(model)}; expected one of {', '.join(MODELS)}")
    rows = _rows(content.get("rows"), f"{path}: rows")
    gpu_rows = {
        gpu: _rows(content[gpu], f"{path}: {gpu}") for gpu in hardware.PLANNED if gpu in content
    }
    shared = {section: content.get(section) or {} for section in sections}
    for section, values in shared.items():
        mapping(values, f"{path}: {section}")
    return Recipe(path.stem, model, shared, rows, gpu_rows)


def _rows(rows: Any, where: str) -> dict[int | str, dict]:
    """A table of rows with checked names. `resolve` checks their settings."""
    if not isinstance(rows, dict) or not rows:
        raise RecipeError(f"{where} must map GPU counts and 'smoke' to settings")
    for name, row in rows.items():
        count = type(name) is int and 0 < name <= LARGEST
        if not (name == SMOKE or count) or not isinstance(row, dict):
            raise RecipeError(
                f"{where}: row {shown(name)} must be a GPU count or 'smoke' and hold a mapping"
            )
    return rows


def _read(path: Path) -> Any:
    try:
        return strict_yaml.load(path.read_text())
    except OSError as error:
        near = meant(path.stem, names())
        raise RecipeError(f"{path}: {error.strerror}{near} (jaxbench list shows all)") from error
    except ValueError as error:
        raise RecipeError(f"{path}: not valid YAML: {error}") from error


def row_name(platform: str, devices: int, gpus: int | None = None) -> int | str:
    """The name of the row for the devices of a job: the number of GPUs, or `smoke` on a machine
    without GPUs. The recipe may have no row of this name (`derived_rows.extend`).

    Raises RecipeError if `gpus` asks for another number.
    """
    seen = f"{devices} {'GPU' if platform == 'gpu' else 'CPU device'}{'s' if devices > 1 else ''}"
    if gpus is not None and (platform != "gpu" or gpus != devices):
        raise RecipeError(f"--gpus {gpus} was asked for, but this job sees {seen}")
    return devices if platform == "gpu" else SMOKE


def resolve(
    recipe: Recipe,
    row: int | str,
    *,
    devices: int | None = None,
    overrides: tuple[Override, ...] = (),
    steps: int | None = None,
    seed: int = 0,
) -> Run:
    """The run of one row with the `--set` overrides. Only the smoke row needs `devices`: its batch
    grows to a multiple of them. It also takes fewer steps, unless `steps` says how many."""
    sections = {"model": asdict(MODELS[recipe.model]), **recipe.shared}
    values = {name: dict(section) for name, section in sections.items()}
    where = f"recipe {recipe.name}, row {row}"
    for key, value in recipe.rows[row].items():
        check_key(key, [*ROW_KEYS, *SECTIONS], where)
        if key in ROW_KEYS:
            section, name = ROW_KEYS[key]
            if name in (recipe.rows[row].get(section) or {}):
                raise RecipeError(f"{where}: {key} and {section}.{name} are one setting; keep one")
            values[section][name] = value
        else:
            values[key] = merged(values[key], mapping(value, f"{where}: {key}"))
    row_model = build(ModelConfig, values["model"], f"{where}: model")
    for override in overrides:
        change = {override.name: override.value}
        values[override.section] = merged(values[override.section], change)
    built: dict[str, Any] = {
        name: build(cls, values[name], f"{where}: {name}") for name, cls in SECTIONS.items()
    }
    asked = any((change.section, change.name) == ("batch", "global_batch") for change in overrides)
    if row == SMOKE and devices and not asked:
        batch = built["batch"]
        size = -(-batch.global_batch // devices) * devices
        built["batch"] = replace(batch, global_batch=size)
    return Run(
        recipe=recipe.name,
        row=str(row),
        label=_label(recipe, row, built["model"], row_model),
        gpus=row if isinstance(row, int) else devices or 1,
        steps=(SMOKE_STEPS if row == SMOKE else STEPS) if steps is None else steps,
        seed=seed,
        overrides=tuple(override.text for override in overrides),
        **built,
    )


def _label(
    recipe: Recipe, row: int | str, model: ModelConfig, row_model: ModelConfig
) -> Literal["full", "proxy", "derived", "smoke"]:
    """`Run.label`. A row may limit the tokens of experts otherwise than the published model."""
    if row == SMOKE:
        return "smoke"
    if row in recipe.derived:
        return "derived"
    published = MODELS[recipe.model]
    as_published = row_model.architecture == published.architecture
    allowed = [published, row_model] if as_published else [published]
    return "full" if model.without_slots in [m.without_slots for m in allowed] else "proxy"


def describe(run: Run) -> dict[str, Any]:
    """The run as values of JSON, including what follows from it, for records and golden files."""
    values = json.loads(json.dumps(asdict(run)))  # lists, not tuples
    values["parallelism"] = {"data": run.data, **values["parallelism"]}
    values["batch"] |= {"microbatch": run.microbatch, "accumulation": run.accumulation}
    return values


def settings() -> list[str]:
    """The dotted name of every setting."""
    return [key for section, cls in SECTIONS.items() for key in setting_names(cls, f"{section}.")]


def parse_overrides(texts: list[str]) -> tuple[Override, ...]:
    """`section.key=value` entries of the command line. Raises RecipeError for an unknown key."""
    overrides = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise RecipeError(f"--set {shown(text)}: expected key=value: parallelism.fsdp=4")
        check_key(key, settings(), "--set")
        section, name, *inner = key.split(".")
        try:
            parsed = strict_yaml.load(value)
        except ValueError as error:
            reason = f"cannot read the value {shown(value)}: {error}"
            raise RecipeError(f"--set {key}: {reason}") from error
        for part in reversed(inner):
            parsed = {part: parsed}
        overrides.append(Override(text, section, name, parsed))
    return tuple(overrides)
