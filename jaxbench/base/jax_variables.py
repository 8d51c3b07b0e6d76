"""Variables of JAX that would change what is computed, or that JAX cannot read."""

import os
import re

from jaxbench.base.errors import RecipeError

HARMLESS = re.compile(r"""jax_(
    (compilation|persistent)_cache_(?!expect_pgle)\w+ | enable_compilation_cache |
    raise_persistent_cache_errors | (cuda_visible|num_cpu)_devices | platforms |
    cpu_(collectives_implementation|get_\w+) | check_proxy_envs | share_binary_between_hosts\w* |
    log\w+ | debug_log_modules | distributed_debug | explain_cache_misses | dump_ir\w+ |
    include_debug_info_in_dumps | include_full_tracebacks_in_locations | trace(back|r_error)\w+ |
    send_traceback_to_runtime | pprint_use_color | captured_constants\w+ | hlo_source\w+ |
    source_url_schema | mock_gpu_topology
)""", re.X)  # fmt: skip
"""Options of JAX that do not change what is computed. Variables for all others are refused, since
each release of JAX adds some."""


def check_environment() -> None:
    """Imports JAX. Raises RecipeError for a variable that JAX refuses, and for one that sets an
    option that is not `HARMLESS`."""
    try:
        import jax
    except ValueError as error:
        raise RecipeError(f"JAX refuses a variable: {error}; unset it") from error
    for name in sorted(name for name in os.environ if name.startswith("JAX_")):
        # A job's processes also have variables that are no options.
        option = name.lower()
        if option in jax.config.values and not HARMLESS.fullmatch(option):
            raise RecipeError(
                f"{name}={os.environ[name]} may change what JAX computes; a benchmark needs JAX's "
                "default: unset it"
            )
