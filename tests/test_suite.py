"""The suite on a machine that lacks optional packages, and how it counts what it skips."""

import ast
import sys
from pathlib import Path

import conftest
import pytest
from beartype.roar import BeartypeCallHintParamViolation
from commands import ROOT

from jaxbench.base.versions import installed
from jaxbench.recipe import recipes

FILES = [path for path in Path(__file__).parent.rglob("*.py") if path.parent.name != "fixtures"]
OPTIONAL = {"jax_plugins", "jax_cuda13_plugin", "transformer_engine", "playwright", "torch",
            "pynvml", "axe_playwright_python"}  # fmt: skip


@pytest.mark.parametrize("absent", ["jax_plugins", "jax_plugins.xla_cuda13"])
def test_a_module_is_absent_with_or_without_its_package(absent, monkeypatch):
    monkeypatch.delitem(sys.modules, "jax_plugins.xla_cuda13", raising=False)
    monkeypatch.setitem(sys.modules, absent, None)
    assert not installed("jax_plugins.xla_cuda13")


def test_no_optional_package_is_imported_at_collection():
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")]
            names.append(getattr(node, "module", None) or "")
            assert not OPTIONAL & {name.split(".")[0] for name in names}, path


def test_every_annotation_of_an_array_is_checked():
    for package in conftest.WITHOUT_ARRAYS:
        files = list((ROOT / "jaxbench" / package).rglob("*.py"))
        assert files
        assert not [path for path in files if "jaxtyping" in path.read_text()]


def test_plain_annotations_are_checked_too():
    with pytest.raises(BeartypeCallHintParamViolation):
        recipes.load(1.5)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (conftest.SLOW, "4 slow ones (--slow)"),
        ("needs gcc: apt-get install gcc", "4 for want of gcc (apt-get install gcc)"),
        ("no such case", "4: no such case"),
    ],
)
def test_skipped_tests_are_counted_by_what_they_lack(reason, text):
    assert conftest.skipped(4, reason) == text
