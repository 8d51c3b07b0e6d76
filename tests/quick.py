"""What makes tests quick: compiler flags for CPUs, with a third of the time and the same results,
and a cache of the programs that commands compile."""

import os
from importlib.metadata import version

FLAGS = "--xla_backend_optimization_level=0"
if version("jax").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
elif version("jax").startswith("0.11."):
    FLAGS += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"

FOLDER = "JAXBENCH_TESTS_CACHE"
"""Variable with the folder of the cache, which `conftest` makes for the time of the tests."""


def cache() -> dict[str, str]:
    """Variables of JAX with which a command finds what another one has compiled; none outside of
    tests, as in a benchmark."""
    if FOLDER not in os.environ:
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": os.environ[FOLDER],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }
