"""The row that `train` takes on GPUs, without any: of their kind, and for any number of them."""

from types import SimpleNamespace

import pytest

from jaxbench.base.errors import RecipeError
from jaxbench.recipe import published, recipes
from jaxbench.run import command
from jaxbench.run.arguments import parse_arguments


@pytest.fixture
def found(monkeypatch):
    def find(config, device, count, *options):
        kind = SimpleNamespace(platform="gpu", device_kind=device)
        monkeypatch.setattr(command.jax, "devices", lambda: [kind] * count)
        monkeypatch.setattr(command.job, "join", lambda **_: None)
        monkeypatch.setattr(command.devices, "select_platform", lambda count: None)
        monkeypatch.setattr(command.host_memory, "check_host_memory", lambda needed, when: None)
        args = parse_arguments(["--config", config, *options])
        overrides = recipes.parse_overrides(args.set)
        run = command.join_and_resolve(args, recipes.load(config), overrides)
        return run, published.differences(run, device)

    return find


def test_a_warning_is_printed_once_for_the_job(found, monkeypatch, capsys):
    monkeypatch.setattr(command.devices, "other_gpu", lambda gpu: "other GPUs")
    found("llama31_405b_bf16", "NVIDIA GB200", 256)
    assert capsys.readouterr().err == "warning: other GPUs\n"
    monkeypatch.setattr(command.jax, "process_index", lambda: 1)
    found("llama31_405b_bf16", "NVIDIA GB200", 256)
    assert capsys.readouterr().err == ""


def test_the_kind_of_gpu_chooses_its_rows(found):
    run, reasons = found("llama31_405b_bf16", "NVIDIA GB200", 256)
    assert (run.row, run.label, run.model.layers, reasons) == ("256", "full", 126, [])
    run, reasons = found("llama31_405b_bf16", "NVIDIA H100 80GB HBM3", 512)
    assert (run.mesh_text(), reasons) == ("data 2 x fsdp 128 x tensor 2", [])


@pytest.mark.parametrize(
    ("count", "mesh", "batch"),
    [(4, "fsdp 4", 64), (12, "data 3 x fsdp 4", 192), (24, "data 3 x fsdp 8", 384)],
)
def test_any_number_has_a_row(found, count, mesh, batch):
    """12 too: these GPUs are there, in whatever nodes."""
    run, reasons = found("llama31_8b_bf16", "NVIDIA H100 80GB HBM3", count)
    assert (run.label, run.mesh_text(), run.batch.global_batch) == ("derived", mesh, batch)
    assert reasons == [f"its row is derived: the recipe has none for {count} GPUs"]


def test_too_few_for_the_model(found):
    with pytest.raises(RecipeError, match="no mesh of them has room for the train state"):
        found("llama31_70b_bf16", "NVIDIA H100 80GB HBM3", 8)
