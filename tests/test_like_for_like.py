"""benchmarks/like_for_like.py, without MaxText."""

import importlib
from pathlib import Path

import pytest

from jaxbench.forecast.costs import CONDITIONS, Measured
from jaxbench.forecast.tables import load
from jaxbench.hardware import H100
from jaxbench.xla.collectives import find
from jaxbench.xla.hlo import Program
from jaxbench.xla.schedule import Walk

PROGRAM = """\
HloModule toy, is_scheduled=true

ENTRY %main (x: bf16[1024,8192]) -> bf16[8192,8192] {
  %x = bf16[1024,8192]{1,0} parameter(0)
  %gather-start = ((bf16[1024,8192]{1,0}), bf16[8192,8192]{1,0}) all-gather-start(%x), \
replica_groups=[1,8]<=[8], dimensions={0}, metadata={scheduling_name="all-gather-start.7"}
  %dot.1 = bf16[1024,1024]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}, \
metadata={op_name="jit(step)/dot" scheduling_name="dot.2"}
  ROOT %gather-done = bf16[8192,8192]{1,0} all-gather-done(%gather-start), \
metadata={scheduling_name="all-gather-done.7"}
}
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return importlib.import_module("like_for_like")


def test_a_profile_has_kernels_and_collectives_by_the_names_before_scheduling(script):
    program = Program.parse(PROGRAM)
    costs = Measured(H100, load("h100"), CONDITIONS["expected"])
    ((_, dot, _),) = Walk(program).kernels()
    (gather,) = find(program)
    assert sorted(script.profile(program, costs).splitlines()) == [
        f'costs {{ name: "all-gather-start.7" cost_us: {1e6 * costs.collective(gather):.3f} }}',
        f'costs {{ name: "dot.2" cost_us: {1e6 * sum(costs.kernel(dot).values()):.3f} }}',
    ]


def test_a_summary_has_the_median_the_ninth_of_ten_and_the_worst(script):
    errors = [-0.1, 0.02, -0.03, 0.01, 0.0, 0.04, 0.05, 0.06, -0.07, 0.08, -0.2]
    assert script.summary(errors) == (
        "11 rows: median +1.0 %, nine of ten within 10.0 %, worst -20.0 %."
    )
