"""Activations in the host's memory: a step is the same, bit for bit, as with them on the device."""

import jax
import numpy as np
import pytest
from cases import slow_except
from commands import TINY, read, run
from steps import MESHES, loss_and_gradients, new_state
from tiny import mesh_of, tiny_run

from jaxbench.errors import RecipeError, RunFailed
from jaxbench.run import devices
from jaxbench.train.step import make_program

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
    "mamba": ("nemotronh_56b_bf16", "attention,residual", "up,mamba", FSDP),
    "prediction": ("deepseek_v3_bf16", "attention", "gate,up", (EXPERTS,)),
}
"""Recipe, what is saved on the device, what in the host's memory, and overrides."""
QUICK = ("one device", "some layers")
PIPELINE = ("execution.remat=full", "parallelism.pipeline=2")


def two_runs(case):
    """A tiny run that saves everything on the device, and the same with some in the host's memory;
    on eight devices where it has a mesh."""
    family, saved, offload, overrides = CASES[case]
    count = 8 if any(text.startswith("parallelism") for text in overrides) else 1

    def run_with(*execution):
        overridden = "precision.dtype=bf16", *overrides, *execution
        return tiny_run(*overridden, family=family, devices=count)

    return (
        run_with(f"execution.remat={saved},{offload}"),
        run_with(f"execution.remat={saved}", f"execution.offload={offload}"),
    )


@pytest.mark.parametrize("case", slow_except(QUICK, CASES))
def test_no_bit_of_a_step_changes(case):
    plain, offloaded = two_runs(case)
    (loss, expected), (other, actual) = map(loss_and_gradients, (plain, offloaded))
    assert loss == other
    for name, gradient in expected.items():
        np.testing.assert_array_equal(actual[name], gradient, err_msg=name)


def test_activations_are_in_the_host_s_memory_until_the_backward_pass():
    """Two of three layers' are copied there, the last layer's stay; all are copied back."""
    plain, offloaded = two_runs("one device")
    texts = []
    for tiny in (plain, offloaded):
        with mesh_of(tiny):
            lowered = make_program(tiny).lower(jax.eval_shape(lambda tiny=tiny: new_state(tiny)))
            texts.append(lowered.as_text())
    assert "pinned_host" not in texts[0]
    assert texts[1].count("pinned_host") >= 4  # two stacks, and what is written into each
    assert 'annotate_device_placement(' in texts[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("execution.offload=gat",), "execution.offload: cannot read 'gat'"),
        (("execution.offload=attention",), "name it in execution.remat"),
        (("execution.offload=up", "execution.remat=none"), "remat = none saves all on the device"),
        (("execution.offload=up", *PIPELINE), "a pipeline cannot offload"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(overrides, message):
    with pytest.raises(RecipeError, match=message):
        tiny_run("batch.microbatch=1", *overrides, devices=2)


def test_a_host_with_too_little_memory_is_named(monkeypatch):
    monkeypatch.setattr(devices, "host_memory", lambda _: 7 * 2**30)
    devices.check_host_memory(0)
    devices.check_host_memory(2**30 // jax.local_device_count())
    needed = r"needs 1.0 GiB of memory for each of 8 devices, but 7.0 GiB are available: --set"
    with pytest.raises(RunFailed, match=needed):
        devices.check_host_memory(2**30)


@pytest.mark.slow
def test_a_run_saves_and_another_goes_on(tmp_path):
    """With the losses of one that saves its activations on the device."""

    def losses(name, *options):
        status, _, err = run(*TINY, *options, "--output", tmp_path / name)
        assert (status, err) == (0, "")
        return [step["loss"] for step in read(tmp_path / name)[1]]

    offload = "--set", "execution.remat=attention", "--set", "execution.offload=gate,up"
    whole = losses("whole", "--set", "execution.remat=attention,gate,up", "--steps", 8)
    first = losses("first", *offload, "--steps", 4, "--checkpoint-every", 4)
    second = losses("second", *offload, "--steps", 8, "--restore", tmp_path / "first")
    assert first + second == whole
