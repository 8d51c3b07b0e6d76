"""Renders a page from its template.

We do not trust runs and logs: templates escape their texts, and the page forbids itself scripts and
requests (`templates/base.html`).
"""

import base64
import gzip
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from jaxbench.base.errors import counted
from jaxbench.base.terminal import RUNNING
from jaxbench.base.untrusted import printable
from jaxbench.base.versions import versions
from jaxbench.recipe.build import flat

SYMBOLS = {
    "pass": "✓", "slow": "▼", "failed": "✕", "interrupted": "■", "incomplete": "…",
    "not comparable": "–", "fail": "✕", "not reached": "–",
}  # fmt: skip
"""Symbols that stand next to the names of verdicts, of runs and of nodes."""

UNIT = re.compile(r"(?<=\d) (?=(?:%|s|GiB)(?!\w))")
"""The space between a figure and its unit. No line may end there."""


def render(
    template: str, filters: Mapping[str, Callable[..., Any]] | None = None, **content: Any
) -> str:
    """A page from one of the templates, which may use these filters too. It says how it was made:
    templates show `made` with the macro `made_by`."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    common = {
        "unbroken": unbroken,
        "counted": counted,
        "breakable": breakable,
        "symbol": SYMBOLS.__getitem__,
    }
    environment.filters |= {**common, **(filters or {})}
    content["made"] = made()
    content["headline"] = unbroken(content["headline"])
    return printable(environment.get_template(template).render(**content))


def made() -> dict[str, str]:
    """How this page is made: the whole command and its first words, the date in UTC, and the
    versions of jaxbench and jax."""
    found, command = versions(), RUNNING.get()
    commit = found["commit"] or ""
    at = f" ({commit[:7]}{'+' if commit.endswith('+') else ''})" if commit else ""
    return {
        "command": command,
        "by": " ".join(shlex.split(command)[:2]),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "jaxbench": f"jaxbench {found['jaxbench']}{at}",
        "jax": found["jax"] or "",
    }


def unbroken(text: str) -> str:
    """A text in which no line ends between a figure and its unit."""
    return UNIT.sub("\xa0", text)


def breakable(text: str) -> Markup:
    """A name in which a line may end after a dot, underscore, slash, comma or bracket."""
    return Markup(re.sub(r"([._/,\]])(?=[a-z\[]|\d+[a-z])", r"\1<wbr>", str(escape(text))))


def settings(record: Mapping[str, Any], parts: Sequence[str]) -> list[tuple[str, list]]:
    """(name, [(setting, value)]) of those `parts` that the record has."""
    return [
        (part, [(key.removeprefix(f"{part}."), value) for key, value in values])
        for part in parts
        if (values := [*flat(record.get(part), part)])
    ]


def attached(content: Any) -> str:
    """A link to compressed JSON that is inside the page."""
    # JSON has no NaN, so NaN is null in the file.
    valid = json.loads(json.dumps(content, default=str), parse_constant=lambda _: None)
    packed = gzip.compress(json.dumps(valid, indent=1).encode(), mtime=0)
    return f"data:application/gzip;base64,{base64.b64encode(packed).decode()}"
