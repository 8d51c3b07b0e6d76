"""Eight virtual CPU devices, and every jaxtyping annotation checked at run time."""

import os

# Half of the compile time; what is computed stays the same.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax
import jaxtyping

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jaxtyping.install_import_hook("jaxbench", "typecheck.check")


def pytest_addoption(parser):
    parser.addoption("--write-golden", action="store_true", help="rewrite tests/golden")
