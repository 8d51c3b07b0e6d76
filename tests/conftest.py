"""Eight virtual CPU devices, and every jaxtyping annotation checked at run time."""

import os
from pathlib import Path

import quick

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick.FLAGS}"

import jax
import jaxtyping
import pytest
from xdist.scheduler import LoadScopeScheduling

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jaxtyping.install_import_hook("jaxbench", "typecheck.check")


def pytest_xdist_auto_num_workers(config):
    """One more than cores: the worker that runs Slurm's tests mostly waits."""
    return (os.cpu_count() or 1) + 1


def pytest_addoption(parser):
    parser.addoption("--write-golden", action="store_true", help="rewrite tests/golden")
    parser.addoption("--fuzz", type=int, default=300, help="mutated recipes to try")


@pytest.fixture
def transformer_engine_on_a_cpu(monkeypatch):
    """Its own fallback in plain JAX."""
    from jaxbench.plan import driver

    driver.pretend(9)
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "false")


SHARING = (
    "test_slurm.py", "test_compile.py", "test_plan.py", "test_search.py", "test_survive.py",
    "test_nemotron.py", "test_cli.py", "test_checkpoint.py", "test_routing.py",
)  # fmt: skip
"""Files whose tests share what takes long to make, the longest first."""


def place(path):
    """Of a file among `SHARING`, or behind them."""
    return SHARING.index(path.name) if path.name in SHARING else len(SHARING)


def pytest_collection_modifyitems(items):
    """The files that share something begin."""
    items.sort(key=lambda item: place(item.path))


class Scheduler(LoadScopeScheduling):
    """One worker takes all tests of a file that shares something."""

    def _split_scope(self, nodeid):
        file, _, _ = nodeid.partition("::")
        return file if place(Path(file)) < len(SHARING) else nodeid


def pytest_xdist_make_scheduler(config, log):
    return Scheduler(config, log)
