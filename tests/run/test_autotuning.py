"""Results of autotuning: kept for all programs of a user, and announced before compiling."""

import stat

import pytest

from jaxbench.cluster import job
from jaxbench.run import cache
from jaxbench.run.cache import Cached, autotuning_notice, program_cache

GPU = {"hardware": {"device": "NVIDIA H100 80GB HBM3"}}
FOLDER = "xla_gpu_per_fusion_autotune_cache_dir"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """What a cache in the folder has for a recipe."""
    monkeypatch.setattr(cache, "KEEPS_AUTOTUNING", True)

    def look(recipe="llama", said=None):
        say = (said or []).append if said is not None else pytest.fail
        with program_cache(tmp_path / "cache", {"recipe": recipe}, say, GPU) as found:
            return found

    return look


def test_all_programs_of_a_gpu_share_the_results(cached, tmp_path):
    first = cached()
    assert (first.program, first.autotuned) == (False, 0)
    (folder,) = (tmp_path / "cache").glob("autotuned-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "gpu").mkdir()
    (folder / "gpu" / "kernel.pb").write_bytes(b"x")
    assert cached("grok").autotuned == 1
    # Each rank writes: XLA gives each another share of the kernels.
    assert first.options["xla_gpu_experimental_autotune_cache_mode"] == "AUTOTUNE_CACHE_MODE_UPDATE"
    assert first.options[FOLDER].startswith("/proc/self/fd/")  # the folder that was checked


def test_they_are_not_taken_from_a_folder_that_others_can_change(cached, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    said = ["said:"]
    assert cached(said=said) == Cached()
    assert "others may write into it" in said[1]
    (tmp_path / "cache").chmod(0o700)
    monkeypatch.setattr(job, "all_gather", lambda _, value: [value, (False, "x: not theirs")])
    assert cached(said=said) == Cached()


def test_an_older_jax_would_hash_the_folder_into_a_program_s_key(cached, monkeypatch):
    monkeypatch.setattr(cache, "KEEPS_AUTOTUNING", False)
    assert cached() == Cached()


@pytest.mark.parametrize(
    ("found", "keeps", "message"),
    [
        (Cached(), True, "does not do; the results are not kept (--compilation-cache FOLDER"),
        (Cached(), False, "does not do; the results are not kept (needs jax 0.11.2)"),
        (Cached(False, 0, {"x": "y"}), True, "does not do; later starts use the results"),
        (Cached(False, 122, {"x": "y"}), True, "autotuning: 122 results of earlier starts are"),
    ],
)
def test_the_log_says_before_compiling_what_autotuning_costs(found, keeps, message, monkeypatch):
    monkeypatch.setattr(cache, "KEEPS_AUTOTUNING", keeps)
    assert message in autotuning_notice(found)
