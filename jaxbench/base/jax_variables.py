"""Variables of JAX that would change what is computed, or that JAX cannot read."""

import json
import os
import re
import subprocess
import sys
from typing import Any

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
"""Options of JAX that do not change what is computed. Every other one has to keep its default,
since each release of JAX adds some."""

OPTIONS = "import jax, json; print(json.dumps(jax.config.values, default=str))"


def check_environment() -> None:
    """Imports JAX. Raises RecipeError for a variable that JAX refuses, and for one that changes an
    option that is not `HARMLESS`."""
    ours = sorted(name for name in os.environ if name.startswith("JAX_"))
    try:
        import jax
    except ValueError:
        raise _refused(ours) from None
    # A job's processes have variables that are no options; these must not cost a process each.
    suspects = [
        name
        for name in ours
        if name.lower() in jax.config.values and not HARMLESS.fullmatch(name.lower())
    ]
    if not suspects:
        return
    try:
        values = _options(*suspects)
    except ValueError:
        raise _refused(suspects) from None
    defaults = _options()
    for name in suspects:
        if values[name.lower()] != (default := defaults[name.lower()]):
            raise RecipeError(
                f"{name}={os.environ[name]} changes what JAX computes; a benchmark needs JAX's "
                f"default, {default!r}: unset it"
            )


def _refused(names: list[str]) -> RecipeError:
    """The error for the first of some variables with which JAX cannot be imported."""
    for name in names:
        try:
            _options(name)
        except ValueError as error:
            return RecipeError(f"{name}={os.environ[name]}: JAX refuses it ({error}); unset it")
    return RecipeError(f"JAX refuses {', '.join(names)} together; unset them")


def _options(*kept: str) -> dict[str, Any]:
    """JAX's options with no other variable than these. Raises ValueError with JAX's last line."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name in kept or not name.startswith("JAX_")
    }
    command = [sys.executable, "-c", OPTIONS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)
