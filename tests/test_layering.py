"""Imports point downward only (the map of the house is in CONTRIBUTING.md)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxbench

PACKAGE = Path(jaxbench.__file__).parent
LAPTOP = (
    "config", "recipes", "flops", "published", "metrics", "models.llama", "models.nemotron",
    "models.grok", "xla_flags", "hlo", "systems", "schedule", "memory", "plan_text",
    "heartbeat", "watchdog",
)  # fmt: skip
LAYERS = {
    "mesh": {"config"},
    "softcap": set(),
    "fp8": {"config", "hlo", "mesh"},
    "ops": {"config", "flops", "fp8", "mesh", "softcap"},
    "grouped": {"mesh"},
    "routing": {"config", "mesh", "ops"},
    "loss": {"mesh"},
    "data": {"mesh"},
    "ssd": {"config"},
    "target": set(),
    "job": {"config"},
    "environment": {"config", "job"},
    "checkpoint": {"config"},
    "heartbeat": {"metrics"},
    "watchdog": {"heartbeat", "metrics"},
    "models.layers": {"config", "mesh", "ops"},
    "models.mamba2": {"config", "mesh", "ops", "ssd", "models.layers"},
    "models.moe": {"config", "mesh", "ops", "grouped", "routing", "models.layers"},
    "models.decoder": {
        "config", "fp8", "mesh", "ops", "loss", "routing",
        "models.layers", "models.mamba2", "models.moe",
    },
    "optimizer": {"config", "models.layers"},
}  # fmt: skip
"""What the modules above the laptop ones and below the commands may import of the package."""


def imports(module: str) -> set[str]:
    """Top-level names that a module imports; jaxbench's own modules without the prefix."""
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            name = node.module.removeprefix("jaxbench").removeprefix(".")
            if not node.module.startswith("jaxbench"):
                found.add(node.module.split(".")[0])
            elif name in ("", "models"):
                names = {alias.name for alias in node.names if alias.name.islower()}
                found |= {f"{name}.{n}" if name else n for n in names}
            else:
                found.add(name)
    return found


@pytest.mark.parametrize(("module", "allowed"), LAYERS.items())
def test_imports_point_downward(module, allowed):
    own = {p.relative_to(PACKAGE).with_suffix("").as_posix() for p in PACKAGE.rglob("*.py")}
    assert imports(module) & {name.replace("/", ".") for name in own} <= allowed


def test_models_know_no_run_optimizer_or_environment():
    for path in (PACKAGE / "models").glob("*.py"):
        names = imports(f"models.{path.stem}")
        assert not names & {"optax", "orbax", "os", "recipes", "train"}
        assert "Run" not in path.read_text().split()


def test_laptop_modules_load_without_jax():
    modules = ", ".join(f"jaxbench.{name}" for name in LAPTOP)
    code = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_ops_names_a_kernel_library():
    for path in PACKAGE.rglob("*.py"):
        names = ("dot_product_attention", "transformer_engine", "pallas")
        found = [name for name in names if name in path.read_text()]
        assert not found or path.name == "ops.py"


def test_only_the_commands_read_the_environment():
    readers = {p.stem for p in PACKAGE.rglob("*.py") if "os.environ" in p.read_text()}
    assert readers <= {"command", "session", "plan", "environment", "profiling"}
