"""`benchmarks/gpu.py` around its checks: what hangs, crashes or comes too late is told. The checks
themselves are rehearsed by `.ci/run`."""

import importlib.util
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import jax
import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    """The script as a module."""
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture
def call(tmp_path):
    """The arguments of a call on a GPU."""
    return Namespace(output=tmp_path, only="operators,survives", mode="gpu", budget=None)


@pytest.mark.parametrize(
    ("code", "left", "verdict", "figure"),
    [
        ("import time; time.sleep(60)", 0.5, "not run", "stopped: the budget is spent"),
        ("import os; os.abort()", 60, "WRONG", "ended with status -6"),
        ("raise SystemExit(3)", 60, "WRONG", "ended with status 3"),
    ],
)
def test_a_check_that_does_not_end_well_is_told(gpu, call, code, left, verdict, figure):
    gpu.write(call.output, "trains", gpu.Finding("before", gpu.OK))
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    gpu.finish(call, {"operators": process}, left)
    before, found = gpu.results(call.output)
    assert before["what"] == "before"
    assert found["verdict"] == verdict
    assert figure in found["figure"]
    assert process.poll() is not None


def test_a_check_has_a_limit_of_its_own(gpu, call, monkeypatch):
    monkeypatch.setitem(gpu.CHECKS, "operators", gpu.Check(iter, limit=0.5))
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    gpu.finish(call, {"operators": subprocess.Popen(command, start_new_session=True)}, 60)
    assert gpu.results(call.output)[0]["verdict"] == "WRONG"


def test_what_the_budget_leaves_out_is_told(gpu, call, tmp_path):
    call.budget = 1
    gpu.run_checks(call, tmp_path)
    found = gpu.results(call.output)
    assert [f["verdict"] for f in found] == ["not run"] * 2
    assert {f["figure"].partition("--only ")[2] for f in found} == {"operators", "survives"}
    assert gpu.table(call.output).count("\n| ") == 2


def test_an_unknown_check_is_refused():
    command = [sys.executable, str(SCRIPT), "--only", "speed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--only speed: the checks are operators, trains" in done.stderr


def test_a_measured_function_keeps_no_results(gpu):
    """Twenty results of the copy's 4 GiB do not fit into a GPU's memory."""
    from jaxbench.train import kernel_timing

    most, x = [], jax.numpy.zeros(8)
    before = len(jax.live_arrays())

    def function(x):
        most.append(len(jax.live_arrays()) - before)
        return x + 1

    assert kernel_timing.seconds(function, x) > 0
    assert max(most) <= 1


def test_a_rate_above_the_peak_is_wrong(gpu):
    from one_gpu import speed

    assert speed.against(9026, 989) == ("WRONG", "above the peak of 989: nothing was computed")
    assert speed.against(700, 989) == ("measured", "")


def test_the_page_of_measurements_is_of_its_findings(gpu):
    import measured

    assert measured.PAGE.read_text().partition(measured.MARK)[2].strip() == measured.tables()
