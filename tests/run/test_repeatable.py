"""`--check-repeatable`: two runs of a few steps, bit by bit; `test_record_fields.py` runs it."""

import jax
import pytest
from tiny import mesh_of, tiny_run

from jaxbench.base.errors import RunFailed
from jaxbench.run import repeatable
from jaxbench.train.program import compile_program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "found"),
    [(7, "of step 3 was "), pytest.param(8, "was ", marks=pytest.mark.nightly)],
)
def test_a_single_bit_is_found(after, found):
    """One that flips in the second run: in time for a step's figures, or in the last state."""
    tiny, calls = tiny_run("parallelism.fsdp=2", devices=2, steps=6), []
    with mesh_of(tiny):
        program = compile_program(tiny).program

        def flips(state):
            state, figures = program(state)
            calls.append(state.step)
            if len(calls) == after:
                bit = jax.numpy.float32(1 + jax.numpy.finfo("float32").eps)
                state = jax.tree.map(lambda x: x * bit if x.dtype == "float32" else x, state)
            return state, figures

        with pytest.raises(RunFailed, match=f"^not repeatable: .*{found}.*, then ") as error:
            repeatable.check(tiny, flips, print)
    assert error.value.cause == "numbers"
    assert len(calls) == 8
