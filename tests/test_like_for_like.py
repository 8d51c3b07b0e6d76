"""benchmarks/like_for_like.py, without MaxText."""

import math
from types import SimpleNamespace

import pytest
from commands import ROOT

from jaxbench.base.hardware import H100
from jaxbench.forecast.costs import Measured
from jaxbench.forecast.interval import timed_programs
from jaxbench.forecast.tables import load
from jaxbench.recipe import published
from jaxbench.xla.hlo import Work
from jaxbench.xla.timeline import Kernel


@pytest.fixture
def script(benchmark_script):
    return benchmark_script("like_for_like")


def test_every_mesh_has_the_gpus_of_its_row(script):
    rows = script.rows()
    assert len(rows) >= 24
    for row in rows:
        assert math.prod(row.own["mesh"].values()) == row.gpus, row.name
        assert len(row.of["combine"]) == 3


def test_the_steps_of_llama_2_are_the_published_ones(script):
    steps = {
        f"llama2_70b_{row.dtype}:{row.gpus}": row.step_time_s
        for row in published.rows()
        if (row.workload, row.size) == ("llama2", "70b")
    }
    ours = {row.name: row.published_s for row in script.rows() if row.name in steps}
    assert ours == steps


def test_tables_are_those_of_the_recorded_forecasts(script):
    """Whoever records the next step can write these tables again."""
    text = (ROOT / "docs/like_for_like.md").read_text()
    for lines in (
        script.changes(),
        script.coverage(timed_programs()),
        script.alternatives(timed_programs()),
    ):
        assert "\n".join(lines).strip() in text


def test_the_last_axis_of_a_mesh_fills_a_node(script):
    options = script.Row("mixtral_8x7b_bf16_h200", 256).program.maxtext_options
    sizes = {name: n for name, n in options.items() if name.endswith("_parallelism")}
    assert sizes == {
        "ici_data_parallelism": 1, "dcn_data_parallelism": 16,
        "ici_fsdp_parallelism": 1, "dcn_fsdp_parallelism": 2,
        "ici_expert_parallelism": 8, "dcn_expert_parallelism": 1,
    }  # fmt: skip
    assert options["scan_layers"] is False


def test_saved_matmuls_run_once_and_no_schedule_meets_a_limit(script):
    """Faults P1 and P2 of November's list."""
    for name in ("llama2_70b_fp8", "llama2_70b_bf16"):
        options = script.Row(name, 512).program.compiler_options
        assert options["xla_gpu_enable_dynamic_slice_fusion"] is False
        assert options["xla_gpu_memory_limit_slop_factor"] > 100
        assert "rematerialization" in options["xla_disable_hlo_passes"]
    assert options["xla_gpu_reduce_scatter_combine_threshold_bytes"] == 2**24


def test_a_row_without_a_program_says_how_to_compile_it(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["", "llama2_7b_bf16", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit):
        script.main()
    assert "--maxtext PYTHON compiles llama2_7b_bf16:8\n" in capsys.readouterr().out


def test_changes_are_shown_in_the_order_in_which_they_were_recorded(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "STEPS", tmp_path / "steps.csv")

    def found(family, gpus, seconds):
        row, forecast = script.Row(family, gpus), SimpleNamespace(step_s=seconds)
        return script.Result(row, None, forecast, forecast, 0)

    b200 = found("llama31_70b_fp8_b200", 256, 23.0285)
    script.record("before, as it was", [found("llama2_70b_bf16", 64, 6.2991)])
    script.record("after", [found("llama2_70b_bf16", 64, 6.999), b200])
    heading, _, before, after, _ = script.changes()
    assert "| fp8 B200 |" in heading
    assert before.startswith("| before, as it was | -10.0, -10.0 (1) | -10.0, -10.0 (1) |")
    assert after.startswith("| after | +5.0, +10.0 (2) | +0.0, +0.0 (1) |")


def test_a_spread_has_the_median_its_size_the_worst_and_the_sign(script):
    assert script.spread([-0.1, 0.02, -0.03]) == ["3", "-3.0", "3.0", "-10.0", "2 of 3"]


MATMUL = Kernel((Work("product", "bf16", 2 * 16384**3, (1, 16384, 16384, 16384)),), 3 * 2**29, "")
BACKWARD = Kernel(
    (Work("attention", "bf16", 0, (1, 64, 8192, 128, 128), backward=True),), 2**28, ""
)
COPY = Kernel((), 2**30, "")


def test_a_change_alters_the_kernels_that_it_names_and_no_others(script):
    """Every change but those of collectives and of the network acts on one kernel or more."""
    expected = Measured(H100, load("h100"))

    def seconds(changed):
        costs = changed(expected)
        return [sum(costs.kernel(kernel).values()) for kernel in (MATMUL, BACKWARD, COPY)]

    changes = dict(script.causes.CHANGES)
    before = seconds(changes.pop("the forecast"))
    ratios = {
        name: [round(after / s, 2) for after, s in zip(seconds(change), before, strict=True)]
        for name, change in changes.items()
    }
    less = ratios["bf16 and FP8 matmuls sustain 5 % less (as one H100)"]
    assert 1 < less[0] <= 1.05
    assert less[1:] == [1.0, 1.0]
    assert ratios["attention backward 1.16 slower"] == [1.0, 1.16, 1.0]
    assert ratios["other kernels at 70 % of the bandwidth"] == [1.0, 1.0, 1.14]
