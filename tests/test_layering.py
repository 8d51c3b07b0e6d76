"""Imports point one way: wings as the table in CONTRIBUTING.md says, modules without circles."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import jaxbench

PACKAGE = Path(jaxbench.__file__).parent
ROOT = PACKAGE.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def wings() -> dict[str, set[str]]:
    """What each wing may import, from the table."""
    table = re.findall(
        r"^\| `(\w+)/?` \|[^|]*\| (.*?) ?\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    return {wing: set(re.findall(r"`(\w+)`", allowed)) for wing, allowed in table}


def wing(module: str) -> str:
    """The wing of a module; empty for the package itself."""
    return [*module.split("."), ""][1]


def imports(module: str) -> set[str]:
    """Everything that a module imports, modules of the package by their full names."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
    return found


def test_the_table_has_a_line_for_every_wing():
    assert set(wings()) == {wing(module) for module in MODULES} - {"", "__main__"}


@pytest.mark.parametrize("module", [m for m in MODULES if not m.endswith("__main__")])
def test_imports_point_downward(module):
    own = {wing(found) for found in imports(module) if found.startswith("jaxbench.")}
    if wing(module):
        assert own <= wings()[wing(module)] | {wing(module)}
    else:
        assert own == set()


def test_there_are_no_circles():
    package = {module: imports(module) & MODULES.keys() for module in MODULES}
    # A package's __init__ is not imported by what it imports.
    TopologicalSorter(package).prepare()
    by_wing = {name: allowed - {name} for name, allowed in wings().items()}
    TopologicalSorter(by_wing).prepare()


def test_a_wing_says_what_lives_there():
    for module, path in MODULES.items():
        if path.name == "__init__.py" and module.count(".") == 1:
            assert re.search(r"\bImports? ", ast.get_docstring(ast.parse(path.read_text()))), module


def test_models_know_no_run_optimizer_or_environment():
    for module in MODULES:
        if wing(module) == "models":
            assert not {name.split(".")[0] for name in imports(module)} & {"optax", "orbax", "os"}
            assert "Run" not in MODULES[module].read_text().split()


def test_laptop_wings_load_without_jax():
    laptop = ("errors", "files", "hardware", "versions", "recipe", "xla", "forecast", "report")
    modules = [m for m in MODULES if wing(m) in laptop and not m.endswith("__main__")]
    modules += ["jaxbench.cluster.heartbeat", "jaxbench.cluster.watchdog", "jaxbench.run.arguments"]
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
        if wing(module) not in ("ops", "ssd"):
            assert not [name for name in names if name in path.read_text()], module


def test_only_the_mesh_names_its_axes():
    """Strings of axes stand in the mesh and in what describes it to people, or sizes it."""
    allowed = {
        "jaxbench.mesh",
        "jaxbench.recipe.settings",
        "jaxbench.recipe.recipes",
        "jaxbench.recipe.derive",
    }
    axes = r'"(data|fsdp|expert|context|tensor|pipeline)"'
    for module, path in MODULES.items():
        assert module in allowed or not re.search(axes, path.read_text()), module


def test_only_the_commands_read_the_environment():
    readers = {m for m, path in MODULES.items() if "os.environ" in path.read_text()}
    allowed = {"run.command", "run.session", "run.devices", "run.profiling", "planning.command",
               "cluster.job"}  # fmt: skip
    assert readers <= {f"jaxbench.{name}" for name in allowed}
