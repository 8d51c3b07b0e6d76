"""Variables of JAX that would change what is computed, or that JAX cannot read."""

import json
import os
import re
import subprocess
import sys
from typing import Any

from jaxbench.errors import RecipeError

HARMLESS = re.compile(r"""jax_(
    (compilation|persistent)_cache_(?!expect_pgle)\w+ | enable_compilation_cache |
    raise_persistent_cache_errors | (cuda_visible|num_cpu)_devices | platforms |
    cpu_(collectives_implementation|get_\w+) | check_proxy_envs | share_binary_between_hosts\w* |
    log\w+ | debug_log_modules | distributed_debug | explain_cache_misses | dump_ir\w+ |
    include_debug_info_in_dumps | include_full_tracebacks_in_locations | trace(back|r_error)\w+ |
    send_traceback_to_runtime | pprint_use_color | captured_constants\w+ | hlo_source\w+ |
    source_url_schema | mock_gpu_topology
)""", re.X)  # fmt: skip
"""Options of JAX that leave alone what is computed. Every other one has to keep its default: JAX
adds some with each release."""

OPTIONS = "import jax, json; print(json.dumps(jax.config.values, default=str))"


def check_environment() -> None:
    """Imports JAX. Raises RecipeError for a variable that it refuses, and for one that gives an
    option of JAX that is not `HARMLESS` another value than its default."""
    ours = sorted(name for name in os.environ if name.startswith("JAX_"))
    suspects = [name for name in ours if not HARMLESS.fullmatch(name.lower())]
    try:
        import jax  # noqa: F401
    except ValueError:
        suspects = ours
    defaults = _options() if suspects else {}
    for name in suspects:
        text, option = f"{name}={os.environ[name]}", name.lower()
        try:
            value = _options(name).get(option)
        except ValueError as error:
            raise RecipeError(f"{text}: JAX refuses it ({error}); unset it") from error
        if value != defaults.get(option) and not HARMLESS.fullmatch(option):
            raise RecipeError(
                f"{text} changes what JAX computes; a benchmark needs JAX's default, "
                f"{defaults[option]!r}: unset it"
            )


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
