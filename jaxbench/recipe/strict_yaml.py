"""YAML of recipes, `--set` and sweeps: the scalars of YAML 1.2, and no key twice in a mapping.

PyYAML reads YAML 1.1, in which `0100` is 64, `1:30` is 90 and `no` is false. We keep its loader,
which takes a tenth of the time if libyaml is installed, and replace only scalars and mappings.
"""

import re
from collections.abc import Callable
from typing import Any

import yaml

SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"(?:~|null|Null|NULL|)$", lambda text: None),
    "bool": (r"(?:true|True|TRUE|false|False|FALSE)$", lambda text: text.lower() == "true"),
    "int": (
        r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$",
        lambda text: int(text, 0 if text[1:2] in ("o", "x") else 10),
    ),
    "float": (
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
}
"""The tag, pattern and value of each scalar that is not text, in the order in which we try them
(YAML 1.2.2, section 10.3.2)."""


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Also raises YAMLError for a key that occurs twice. Merge keys (`<<`) are not in YAML 1.2."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  # filled below

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """The mapping of a node."""
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            keys = [self.construct_object(key) for key, _ in node.value]
            second = next(n for n, key in enumerate(keys) if key in keys[:n])
            mark = node.value[second][0].start_mark
            raise yaml.MarkedYAMLError(
                problem=f"the key {keys[second]!r} occurs twice", problem_mark=mark
            )
        return mapping


def _constructor(kind: str) -> Callable[[Any, yaml.Node], Any]:
    pattern, value = SCALARS[kind]

    def construct(loader: Any, node: yaml.Node) -> Any:
        text = loader.construct_scalar(node)
        if not re.match(pattern, text):  # a tag that the file states: `!!int x`
            raise yaml.MarkedYAMLError(
                problem=f"{text!r} is no {kind}", problem_mark=node.start_mark
            )
        return value(text)

    return construct


for _kind, (_pattern, _) in SCALARS.items():
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), None)
    Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _constructor(_kind))


def load(text: str) -> Any:
    """The value of a YAML text. Raises ValueError with one line that says what is wrong, and
    where."""
    try:
        value = yaml.load(text, Loader)
        _check_finite(value, set())
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(where + " ".join(str(error.problem).split())) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    return value


def _check_finite(value: Any, finite: set[int], containers: tuple = ()) -> None:
    """Raises ValueError for a mapping or list that contains itself, which YAML can express.
    `finite` are the ids of those that do not: aliases can repeat them more often than there are
    atoms."""
    if not isinstance(value, dict | list) or id(value) in finite:
        return
    if any(value is container for container in containers):
        raise ValueError("it contains itself")
    for inner in value.values() if isinstance(value, dict) else value:
        _check_finite(inner, finite, (*containers, value))
    finite.add(id(value))
