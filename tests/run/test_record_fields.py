"""docs/reference/record.md names every field that a run writes, and no other."""

import re

import pytest
from commands import ROOT, TINY, read, run

from jaxbench.cluster.telemetry import Totals

OPAQUE = ("recipe", "versions", "published", "flags.compiler_options")
"""Whose content other documents describe."""

GPU = {"gpu", *Totals().summary(1980), *(
    "sm_mhz", "clock_ratio", "power_w", "max_temperature_c", "ecc_corrected", "ecc_uncorrected"
)}  # fmt: skip
"""Figures of a GPU, which tests/cluster/test_telemetry.py compares with a sampled one's."""

OTHER_RUNS = {
    "pgle", "kernel_sizes", "kernels.Mamba-2", "kernels.dropless experts", "kernels.offload",
    "kernels.schedule",
    "ranks[].products_s", "summary.tokens_dropped", "summary.joules_per_token",
    "summary.tokens_per_kwh", *(f"ranks[].gpus[].{name}" for name in GPU),
    *(f"slurm.{name}" for name in ("job", "state", "exit_code", "nodes", "elapsed")),
}  # fmt: skip
"""Fields of jobs, of runs on GPUs, of hybrids, of dropless experts, and with experts."""


def fields(value, name=""):
    """The paths of all values in a record."""
    if name in OPAQUE or not isinstance(value, dict | list) or not value:
        return {name}
    if isinstance(value, list):
        nested = [v for v in value if isinstance(v, dict)]
        return set().union(*(fields(v, f"{name}[]") for v in nested)) if nested else {name}
    return set().union(*(fields(v, f"{name}.{key}".lstrip(".")) for key, v in value.items()))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The fields of a run that is checked and saves, and of one that begins from there."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("first", "second"))
    checked = ("--steps", 5, "--check-repeatable", "--checkpoint", "--output", first)
    restored = ("--restore", first, "--output", second)
    found = set()
    for folder, options in ((first, checked), (second, restored)):
        status, out, err = run(*TINY, *options)
        assert (status, err) == (0, "")
        found |= fields(read(folder)[0])
        if folder is first:
            assert "\nrepeatable: 4 steps twice gave bitwise equal losses and 30 arrays\n" in out
    return found


@pytest.mark.slow
def test_the_table_has_every_field_and_no_other(written):
    lines = (ROOT / "docs" / "reference" / "record.md").read_text().splitlines()
    columns = [line.split("|")[1] for line in lines if line.startswith("| `")]
    documented = re.findall(r"`([^`]+)`", " ".join(columns))
    assert len(documented) == len(set(documented))
    assert set(documented) - OTHER_RUNS == written
