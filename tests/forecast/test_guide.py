"""The profile that guides XLA's scheduler, of a program by hand."""

from compiled import collectives_of

from jaxbench.base.hardware import H100, placed
from jaxbench.forecast.costs import Measured
from jaxbench.forecast.guide import guide
from jaxbench.forecast.tables import load
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


def test_a_profile_has_kernels_and_collectives_by_the_names_before_scheduling():
    program = Program.parse(PROGRAM)
    costs = Measured(placed(H100, program.devices), load("h100"))
    ((_, dot, _),) = Walk(program).kernels()
    (gather,) = collectives_of(program)
    assert sorted(guide(program, H100).splitlines()) == [
        f'costs {{ name: "all-gather-start.7" cost_us: {1e6 * costs.collective(gather):.3f} }}',
        f'costs {{ name: "dot.2" cost_us: {1e6 * sum(costs.kernel(dot).values()):.3f} }}',
    ]
