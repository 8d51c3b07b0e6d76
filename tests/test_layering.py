"""Imports point one way: packages as `MAY_IMPORT` says, modules without circles."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import jaxbench
from jaxbench.__main__ import COMMANDS

PACKAGE = Path(jaxbench.__file__).parent
ROOT = PACKAGE.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


MAY_IMPORT: dict[str, set[str]] = {
    "base": set(),
    "jax_internals": set(),
    "recipe": {"base"},
    "results": {"recipe", "base"},
    "xla": {"recipe", "base"},
    "forecast": {"xla", "base"},
    "mesh": {"recipe", "base"},
    "ops": {"mesh", "recipe", "base", "jax_internals"},
    "models": {"ops", "mesh", "recipe", "base"},
    "train": {"models", "ops", "mesh", "xla", "recipe", "base", "jax_internals"},
    "cluster": {"base", "jax_internals"},
    "run": {"train", "cluster", "forecast", "results", "mesh", "xla", "recipe", "base",
            "jax_internals"},
    "calibrate": {"ops", "cluster", "forecast", "xla", "base"},
    "pages": {"recipe", "base"},
    "report": {"results", "pages", "recipe", "base"},
    "check": {"report", "pages", "cluster", "forecast", "xla", "recipe", "base"},
    "plan": {"train", "forecast", "results", "pages", "mesh", "xla", "recipe", "base",
             "jax_internals"},
}  # fmt: skip
"""Packages and single modules of jaxbench, lowest first, with what each may import."""


def package_of(module: str) -> str:
    """The package of a module below jaxbench; empty for jaxbench itself."""
    return [*module.split("."), ""][1]


def imports(module: str) -> set[str]:
    """Everything that a module imports, modules of jaxbench by their full names."""
    imported = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                imported.add(whole if whole in MODULES else node.module)
    return imported


def test_every_package_has_its_layer():
    assert MAY_IMPORT.keys() == {package_of(module) for module in MODULES} - {"", "__main__"}


@pytest.mark.parametrize("module", [m for m in MODULES if not m.endswith("__main__")])
def test_imports_point_downward(module):
    used = {package_of(name) for name in imports(module) if name.startswith("jaxbench.")}
    package = package_of(module)
    if package:
        assert used <= MAY_IMPORT[package] | {package}
    else:
        assert used == set()


def test_there_are_no_circles():
    modules = {module: imports(module) & MODULES.keys() for module in MODULES}
    # A package's __init__ is not imported by what it imports.
    TopologicalSorter(modules).prepare()
    packages = {name: allowed - {name} for name, allowed in MAY_IMPORT.items()}
    TopologicalSorter(packages).prepare()


def test_what_registries_import_later_exists():
    names = {n for p in MODULES.values() for n in re.findall(r'= ?lazy\("(.+)"\)', p.read_text())}
    assert len(names) > 5
    for name in names:
        module, _, function = name.rpartition(".")
        assert hasattr(import_module(f"jaxbench.ops.{module}"), function), name


def test_a_package_says_what_it_imports():
    for module, path in MODULES.items():
        if path.name == "__init__.py" and module.count(".") == 1:
            assert re.search(r"\bImports? ", ast.get_docstring(ast.parse(path.read_text()))), module


def test_models_know_no_run_optimizer_or_environment():
    for module in MODULES:
        if package_of(module) == "models":
            assert not {name.split(".")[0] for name in imports(module)} & {"optax", "orbax", "os"}
            assert "Run" not in MODULES[module].read_text().split()


def test_laptop_packages_load_without_jax():
    laptop = ("base", "recipe", "results", "xla", "forecast", "pages", "report")
    modules = [m for m in MODULES if package_of(m) in laptop and not m.endswith("__main__")]
    modules.append("jaxbench.__main__")
    modules += [f"jaxbench.{command.options}" for command in COMMANDS.values()]
    code = f"import sys, {', '.join(modules)}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_operators_name_a_kernel_library():
    names = (
        "dot_product_attention",
        "import transformer_engine",
        "from transformer_engine",
        "experimental.pallas",
        "experimental import pallas",
    )
    for module, path in MODULES.items():
        if package_of(module) not in ("ops", "jax_internals"):
            assert not [name for name in names if name in path.read_text()], module


def test_only_the_mesh_names_its_axes():
    """Axis names occur in the mesh, and in the modules that size it, know what an axis sends, or
    describe it to users."""
    allowed = {
        "jaxbench.mesh",
        "jaxbench.recipe.settings",
        "jaxbench.recipe.recipes",
        "jaxbench.recipe.derived_rows",
        "jaxbench.plan.candidates",
    }
    axes = r'"(data|fsdp|expert|context|tensor|pipeline)"'
    for module, path in MODULES.items():
        assert module in allowed or not re.search(axes, path.read_text()), module


def test_only_the_commands_read_the_environment():
    readers = {m for m, path in MODULES.items() if "os.environ" in path.read_text()}
    allowed = {"run.command", "run.start_record", "cluster.devices", "run.host_memory",
               "run.profiling", "plan.command", "base.files", "cluster.job", "cluster.ending",
               "cluster.nvml", "cluster.jobs", "base.jax_variables", "xla.flags",
               "__main__"}  # fmt: skip
    assert readers <= {f"jaxbench.{name}" for name in allowed}
