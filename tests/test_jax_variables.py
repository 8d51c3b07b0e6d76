"""Variables of JAX that change what is computed, or that JAX cannot read, are one line."""

import os

import commands
import pytest

from jaxbench.base import jax_variables
from jaxbench.base.errors import RecipeError
from jaxbench.cluster import devices
from jaxbench.run import host_memory


@pytest.fixture
def alone(monkeypatch):
    """No variable of JAX but those that a test sets."""
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAX_ENABLE_X64", "1"),
        ("JAX_NUMPY_DTYPE_PROMOTION", "strict"),
        ("JAX_THREEFRY_PARTITIONABLE", "0"),
    ],
)
def test_a_variable_that_changes_the_program_is_named(alone, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=f"^{name}={value} may change what JAX computes") as error:
        jax_variables.check_environment()
    assert "\n" not in str(error.value)


def test_what_leaves_the_program_alone_is_kept(alone, monkeypatch):
    for name in (
        "JAX_COMPILATION_CACHE_DIR", "JAX_PLATFORMS", "JAX_NO_OPTION",
        "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID",
    ):  # fmt: skip
        monkeypatch.setenv(name, "0")
    jax_variables.check_environment()


@pytest.mark.parametrize(
    ("kept", "refused"),
    [
        ("jax_log_compiles", "jax_compilation_cache_expect_pgle"),
        ("jax_persistent_cache_min_entry_size_bytes", "jax_enable_pgle"),
        ("jax_traceback_filtering", "jax_transfer_guard"),
        ("jax_cuda_visible_devices", "jax_debug_nans"),
    ],
)
def test_only_options_that_leave_the_program_alone_are_harmless(kept, refused):
    assert jax_variables.HARMLESS.fullmatch(kept)
    assert not jax_variables.HARMLESS.fullmatch(refused)


@pytest.mark.slow
def test_a_value_that_jax_cannot_import_with_is_one_line():
    status, out, err = commands.run(*commands.TINY, JAX_TRACEBACK_FILTERING="maybe")
    assert (status, out) == (2, "")
    assert err.startswith("error: JAX refuses a variable: ")
    assert "jax_traceback_filtering" in err.lower()
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (host_memory.FRACTION, "most", "expected a share, such as 0.92"),
        (host_memory.FRACTION, "92", "expected a share, such as 0.92"),
        (host_memory.HOST_LIMIT, "1.5", "expected a number of GiB"),
        (host_memory.HOST_LIMIT, "", "expected a number of GiB"),
    ],
)
def test_a_limit_of_memory_that_is_no_number_is_one_line(monkeypatch, name, value, message):
    monkeypatch.setenv(host_memory.FRACTION, "0.9")
    monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=f"^{name}={value}: {message}"):
        host_memory.limit_memory(0)


def test_a_platform_that_jax_does_not_know_is_the_users_mistake(monkeypatch):
    def fail():
        raise RuntimeError("Backend 'nonsense' is not in the list of known backends: ['cpu']")

    monkeypatch.setattr(devices.jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    with pytest.raises(RecipeError, match=r"^JAX_PLATFORMS=nonsense: Backend"):
        devices.find()
