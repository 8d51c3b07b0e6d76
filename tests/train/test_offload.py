"""Activations in the host's memory: a step is the same as with them on the device, bit for bit
where the compiler fuses alike.

On a CPU JAX leaves such an array where it is: here are the entries of the stacks and the order of
writes and reads. That they are the host's: `test_compile` and `tests/null_gpu`.
"""

import re
from functools import partial

import jax
import numpy as np
import pytest
from cases import tiered
from steps import MESHES, same_sequences
from tiny import mesh_of, tiny_run

from jaxbench.base.errors import RecipeError
from jaxbench.train.step import abstract_state, make_program

LLAMA, ATTENTION, EXPERTS = "llama31_8b_bf16", "key,value,attention", "parallelism.expert=4"
FSDP, MIXED = MESHES["fsdp 8"], MESHES["fsdp 2 x context 2 x tensor 2"]
CASES = {
    "one device": (LLAMA, ATTENTION, "gate,up", ("model.layers=3",)),
    "one layer": (LLAMA, ATTENTION, "gate,up", ("model.layers=1",)),
    "fsdp": (LLAMA, ATTENTION, "query,residual,gate,up", FSDP),
    "some layers": (LLAMA, ATTENTION, "gate,up:1", (*MIXED, "model.layers=3")),
    "accumulated": (LLAMA, ATTENTION, "gate,up", ("parallelism.fsdp=4", "batch.microbatch=1")),
    "fp8": (LLAMA, ATTENTION, "gate,up", (*FSDP, "precision.dtype=fp8")),
    "experts": ("grok1_314b_bf16", "attention", "dispatched,gate,up", (EXPERTS,)),
    "all experts": ("qwen3_30b_a3b_bf16", "key", "residual", FSDP),
    "mamba": ("nemotronh_56b_bf16", "attention,residual", "up,mamba", FSDP),
    "inputs of a hybrid": (
        "nemotronh_56b_bf16",
        "attention",
        "residual,up",
        (*FSDP, "model.pattern=M-M*-M-M*-", "model.layers=10"),
    ),
    "prediction": ("deepseek_v3_bf16", "attention", "gate,up", (EXPERTS,)),
    "input": (LLAMA, ATTENTION, "input", ("model.layers=3",)),
    "inputs": ("deepseek_v3_bf16", "attention", "residual,input", (*FSDP, "model.layers=4")),
}
"""Recipe, what is saved on the device, what in the host's memory, and overrides."""
QUICK, SLOW = ("input",), ("one device", "some layers", "experts")
PIPELINE = ("execution.remat=full", "parallelism.pipeline=2")


def two_runs(case):
    """A tiny run that saves everything on the device, and the same with some in the host's memory;
    on eight devices where it has a mesh."""
    family, saved, offload, overrides = CASES[case]
    count = 8 if any(text.startswith("parallelism") for text in overrides) else 1

    def run_with(*execution):
        overridden = "precision.dtype=bf16", *overrides, *execution
        return tiny_run(*overridden, family=family, devices=count)

    names = (name for name in offload.split(",") if name != "input")
    return (
        run_with(f"execution.remat={','.join((saved, *names))}"),
        run_with(f"execution.remat={saved}", f"execution.offload={offload}"),
    )


@pytest.mark.parametrize("case", tiered(QUICK, CASES, SLOW))
def test_no_bit_of_a_step_changes(case):
    plain, offloaded = two_runs(case)
    # Else a bf16 value that is used where it is made may keep more digits than one that waits.
    rounded = partial(same_sequences, xla_allow_excess_precision=False)
    (loss, expected), (other, actual) = map(rounded, (plain, offloaded))
    assert loss == other
    # jax 0.11 fuses otherwise on CPUs in some of these cases: some gradients are rounded to bf16
    # once more or less.
    otherwise = ("fsdp", "experts", "input", "some layers")
    fused = jax.__version_info__[:2] == (0, 11) and case in otherwise
    rounding = 2**-8 if fused else 0
    for name, gradient in expected.items():
        difference = np.linalg.norm(actual[name] - gradient)
        assert difference <= rounding * np.linalg.norm(gradient), name


@pytest.mark.parametrize(("case", "layer"), [("one device", "8,32,96"), ("input", "8,32,64")])
def test_activations_wait_in_the_host_s_memory(case, layer):
    """Those of every layer; on the device before they are written and after they are read."""
    expected = set(), {layer, f"1,{layer}", f"3,{layer}"}
    for tiny, shapes in zip(two_runs(case), expected, strict=True):
        with mesh_of(tiny):
            traced = make_program(tiny).trace(abstract_state(tiny))
        assert set(re.findall(r"<host>\[([\d,]*)\]", str(traced.jaxpr))) == shapes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("execution.offload=gat",), "execution.offload: cannot read 'gat'"),
        (("execution.offload=attention",), "name it in execution.remat"),
        (
            ("execution.offload=up", "execution.remat=none"),
            "remat = none saves everything",
        ),
        (("execution.offload=up", *PIPELINE), "a pipeline cannot offload"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(overrides, message):
    with pytest.raises(RecipeError, match=message):
        tiny_run("batch.microbatch=1", *overrides, devices=2)
