"""Eight virtual CPU devices, and every jaxtyping annotation checked at run time."""

import os

import quick

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick.FLAGS}"

import jax
import jaxtyping

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jaxtyping.install_import_hook("jaxbench", "typecheck.check")


def pytest_xdist_auto_num_workers(config):
    """One more than cores: the worker that runs Slurm's tests mostly waits."""
    return (os.cpu_count() or 1) + 1


def pytest_addoption(parser):
    parser.addoption("--write-golden", action="store_true", help="rewrite tests/golden")
    parser.addoption("--fuzz", type=int, default=300, help="mutated recipes to try")


def pytest_collection_modifyitems(items):
    """Slurm's tests first: one worker takes them all, and they wait while the other computes."""
    items.sort(key=lambda item: item.path.name != "test_slurm.py")
